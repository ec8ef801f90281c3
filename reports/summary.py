"""summary.json: per arm counts and metrics, the differences to the first arm with a verdict each, and one in words."""

from dataclasses import asdict
from typing import Any

import numpy as np

from reports import insight, metrics, slo
from reports.records import Floats, Record
from reports.stability import stability
from reports.statistics import (
    Blocks,
    PairedDifference,
    blocks_of,
    mean_interval,
    paired_difference,
    quantile_interval,
)

SCHEMA = "dynabench.summary/2"
PAIRED = ("ttft_sched", "tpot", "e2e_sched")
SHARES = {"mean": None, "p50": 0.5, "p90": 0.9, "p99": 0.99}
NOISE_FLOOR = " (A/A)"
"""Ends the name of an arm that repeats the first to show how far two equal runs differ."""
Json = dict[str, Any]
Table = dict[str, Floats]


def summarize(
    runs: list[Record],
    limits: list[slo.Limit] | None = None,
    bound_s: float | None = None,
    *,
    with_intervals: bool = True,
) -> Json:
    """Summarize the runs of an experiment; repeats of an arm are pooled, differences averaged per request first.

    Args:
        runs: every run of every arm.
        limits: what a good request, or run, is.
        bound_s: what no router could have beaten as mean TTFT (s).
        with_intervals: give each arm's own figures intervals, which takes a while.
    """
    arms: dict[str, list[Record]] = {}
    for run in runs:
        arms.setdefault(run.arm, []).append(run.measured)
    size = max(int(run.requests.request.max(initial=-1)) for run in runs) + 1
    tables = {arm: _by_request(repeats, size) for arm, repeats in arms.items()}
    first = next(iter(arms))
    blocks = blocks_of(tables[first]["intended_s"], tables[first]["e2e_sched"])
    figures = {
        arm: _arm(repeats, tables[arm], blocks if with_intervals else None, limits or [])
        for arm, repeats in arms.items()
    }
    floor = _noise_floor(figures, tables, blocks)
    differences = {arm: _differences(tables[first], tables[arm], blocks, floor) for arm in arms if arm != first}
    for arm, names in differences.items():
        if not (figures[first]["stability"]["is_stable"] and figures[arm]["stability"]["is_stable"]):
            for statistics in names.values():
                for difference in filter(None, statistics.values()):
                    difference["verdict"] = "unstable"
    means = {arm: value["ttft_sched"]["mean"] for arm, value in figures.items() if value["ttft_sched"]["mean"]}
    summary: Json = {
        "schema": SCHEMA,
        "is_valid": not any(value["notes"] for value in figures.values()),
        "verdict": "",
        "baseline": first,
        "arms": figures,
        "differences": differences,
        "noise_floor": floor,
        "limits": [str(limit) for limit in limits or []],
        "bound": {"ttft_mean_s": bound_s, "covered": insight.covered(means, bound_s)},
        "num_blocks": int(blocks.max(initial=0)) + 1,
        "formulas": metrics.FORMULAS,
        "is_complete": all(value["is_complete"] for value in figures.values()),
        "is_stable": all(value["stability"]["is_stable"] for value in figures.values()),
    }
    summary["verdict"] = verdict(summary)
    return summary


def verdict(summary: Json) -> str:
    """Say in a few sentences which arm won, by how much, and whether that is more than noise."""
    baseline = summary["baseline"]
    parts = [] if summary["is_valid"] else ["This run is not valid (see the notes): do not trust its figures."]
    if not summary["differences"]:
        parts.append(f"Only {baseline} was measured; there is nothing to compare it with.")
    for name, label in (("ttft_sched", "mean TTFT"), ("tpot", "mean time per output token")):
        means = {
            arm: figures[name]["mean"]
            for arm, figures in summary["arms"].items()
            if figures[name]["mean"] is not None and figures["stability"]["is_stable"] and not is_repeated(arm)
        }
        if baseline not in means or len(means) < 2:
            continue
        best = min(means, key=lambda arm: float(means[arm]))
        if best == baseline:
            rival = min((arm for arm in means if arm != baseline), key=lambda arm: float(means[arm]))
            parts.append(_sentence(label, baseline, rival, summary["differences"][rival][name]["mean"], sign=-1))
        else:
            parts.append(_sentence(label, best, baseline, summary["differences"][best][name]["mean"], sign=1))
    for arm, figures in summary["arms"].items():
        if not figures["stability"]["is_stable"]:
            settled = figures["stability"]
            parts.append(
                f"{arm} could not keep up: {settled['start']:.0f} requests were in the system at first and {settled['end']:.0f} at "
                "the end, so its averages measure how long the run was and are not compared."
            )
    if not summary["is_complete"]:
        parts.append("The run was interrupted, so this is not the whole workload.")
    return " ".join(parts) or "No request succeeded."


def is_repeated(arm: str) -> bool:
    """Tell whether an arm is only there for the noise floor."""
    return arm.endswith(NOISE_FLOOR)


def _sentence(label: str, winner: str, loser: str, difference: Json | None, *, sign: int) -> str:
    if difference is None:
        return f"{winner} and {loser} have too few requests in common to compare {label}."
    mean, relative = difference["mean"], difference["relative"]
    low, high = sorted((abs(difference["low"]), abs(difference["high"])))
    base = mean / relative if relative else 0.0
    share = abs(mean) / (base if sign > 0 else base + mean) if base else 0.0
    amount = f"{abs(mean) * 1000:.3g} ms ({share:.1%})"
    if difference["verdict"] == "inconclusive":
        why = "the 95 % interval holds zero"
        if not difference["low"] <= 0 <= difference["high"]:
            why = "two runs of the same arm differ by as much"
        return (
            f"{winner} and {loser} do not differ in {label} by more than noise ({amount}; {why}; "
            f"a difference of {difference['detectable']:.1%} would have been found)."
        )
    return (
        f"{winner} has the lower {label}, by {amount} against {loser} "
        f"(95 % interval {low * 1000:.3g} to {high * 1000:.3g} ms, paired by request): more than noise."
    )


def _differences(baseline: Table, other: Table, blocks: Blocks, floor: Json) -> Json:
    return {
        name: {
            statistic: _judged(
                paired_difference(baseline[name], other[name], blocks, share=share), floor.get(name, {}).get(statistic)
            )
            for statistic, share in SHARES.items()
        }
        for name in PAIRED
    }


def _judged(difference: PairedDifference | None, floor_s: float | None) -> Json | None:
    if difference is None:
        return None
    if difference.is_noise or (floor_s is not None and abs(difference.mean) <= floor_s):
        word = "inconclusive"
    else:
        word = "better" if difference.mean < 0 else "worse"
    return asdict(difference) | {"verdict": word}


def _noise_floor(figures: Json, tables: dict[str, Table], blocks: Blocks) -> Json:
    """Return by how much the first arm differs from itself, per metric and statistic (s)."""
    first = next(iter(figures))
    again = tables.get(first + NOISE_FLOOR)
    if again is None:
        return {}
    floor: Json = {}
    for name in PAIRED:
        floor[name] = {}
        for statistic, share in SHARES.items():
            difference = paired_difference(tables[first][name], again[name], blocks, share=share)
            floor[name][statistic] = None if difference is None else abs(difference.mean)
    return floor


def _arm(repeats: list[Record], table: Table, blocks: Blocks | None, limits: list[slo.Limit]) -> Json:
    values = [metrics.per_request(run.requests) for run in repeats]
    failed = sum(int((~run.requests.succeeded).sum()) for run in repeats)
    settled = [stability(run) for run in repeats]
    worst = max(settled, key=lambda one: (not one.is_stable, one.end - one.start))
    figures: Json = {
        "requests": sum(len(run.requests) for run in repeats),
        "failed": failed,
        "errors": _errors(repeats),
        "repeats": len(repeats),
        "is_complete": all(run.is_complete for run in repeats),
        "notes": sorted({note for run in repeats for note in run.notes}),
        "remarks": insight.remarks(repeats),
        "stability": asdict(worst),
        "preemptions": _preemptions(repeats),
    }
    for name in ("ttft_sched", "ttft", "tpot", "e2e_sched", "e2e"):
        figures[name] = metrics.describe(np.concatenate([value[name] for value in values]), num_failed=failed)
        if name in PAIRED and blocks is not None:
            figures[name]["intervals"] = _intervals(table[name], blocks)
    figures["itl"] = metrics.describe_gaps(metrics.TokenGaps(np.concatenate([run.gaps for run in repeats])))
    lag = np.concatenate([metrics.schedule_lag(run.requests) for run in repeats])
    figures["schedule_lag"] = metrics.describe(lag)
    for name, of_run in (
        ("throughput", metrics.throughput),
        ("cache", metrics.cache),
        ("imbalance", insight.imbalance),
        ("waterfall", insight.waterfall),
        ("client", lambda run: run.facts),
    ):
        rows: list[Any] = [of_run(run) for run in repeats]
        figures[name] = {key: _mean([row.get(key) for row in rows]) for key in rows[0]}
    figures["affinity_breaks"] = _mean([insight.affinity_breaks(run) for run in repeats])
    if limits:
        goods = [metrics.goodput(run, slo.good(run, limits)) for run in repeats]
        figures["goodput"] = {key: _mean([row[key] for row in goods]) for key in goods[0]}
        figures["missed"] = slo.missed(figures, limits)
    return figures


def _intervals(values: Floats, blocks: Blocks) -> Json:
    """Return the 95 % intervals of mean and percentiles, where there are enough samples for them."""
    known = int((~np.isnan(values)).sum())
    found: Json = {"mean": mean_interval(values, blocks)}
    for name, share in SHARES.items():
        if share is not None:
            enough = known >= metrics.LEAST_SAMPLES[round(share * 100)]
            found[name] = quantile_interval(values, blocks, share) if enough else None
    return found


def _preemptions(repeats: list[Record]) -> int | None:
    """Count preemptions; None where an engine did not report them."""
    counts = [metrics.preemptions(run) for run in repeats]
    return None if None in counts else sum(filter(None, counts))


def _mean(values: list[Any]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _errors(repeats: list[Record]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for run in repeats:
        for error in run.requests.error:
            if error:
                counts[error] = counts.get(error, 0) + 1
    return counts


def _by_request(repeats: list[Record], size: int) -> Table:
    """Average each request's metrics over the repeats, placed by request number; NaN where one is missing."""
    result = {}
    for name in (*PAIRED, "intended_s"):
        table = np.full((len(repeats), size), np.nan)
        for place, run in enumerate(repeats):
            values = run.requests.intended_s if name == "intended_s" else metrics.per_request(run.requests)[name]
            table[place, run.requests.request] = values
        if name == "intended_s":
            table = np.nan_to_num(table)
        result[name] = table[0] if len(repeats) == 1 else table.mean(axis=0)
    return result
