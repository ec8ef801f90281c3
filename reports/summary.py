"""summary.json: per arm counts and metrics, and the paired differences to the first arm."""

from dataclasses import asdict
from typing import Any

import numpy as np

from reports import metrics
from reports.records import ArmResult
from reports.statistics import PairedDifference, paired_difference

PAIRED = ("ttft_sched", "tpot", "e2e_sched")
Json = dict[str, Any]


def summarize(runs: list[ArmResult]) -> Json:
    """Summarize the runs of an experiment; repeats of an arm are pooled, differences averaged per request first."""
    arms: dict[str, list[ArmResult]] = {}
    for run in runs:
        arms.setdefault(run.arm, []).append(run)
    summary: Json = {"arms": {}, "differences": {}, "formulas": metrics.FORMULAS, "is_complete": True, "is_valid": True}
    averages: dict[str, dict[str, Any]] = {}
    size = max(int(run.columns["request"].max(initial=-1)) for run in runs) + 1
    for arm, repeats in arms.items():
        summary["arms"][arm] = _arm(repeats)
        summary["is_complete"] &= summary["arms"][arm]["is_complete"]
        summary["is_valid"] &= not summary["arms"][arm]["notes"]
        averages[arm] = _averages(repeats, size)
    first, *others = arms
    for arm in others:
        summary["differences"][arm] = {
            name: None
            if (difference := paired_difference(averages[first][name], averages[arm][name])) is None
            else asdict(difference)
            for name in PAIRED
        }
    summary["baseline"] = first
    summary["verdict"] = verdict(summary)
    return summary


def verdict(summary: Json) -> str:
    """Say in a sentence or two which arm won, by how much, and whether that is more than noise."""
    baseline = summary["baseline"]
    parts = [] if summary["differences"] else [f"Only {baseline} was measured; there is nothing to compare it with."]
    for name, label in (("ttft_sched", "mean TTFT"), ("tpot", "mean time per output token")):
        means = {
            arm: figures[name]["mean"] for arm, figures in summary["arms"].items() if figures[name]["mean"] is not None
        }
        if baseline not in means or len(means) < 2:
            continue
        best = min(means, key=lambda arm: float(means[arm]))
        if best == baseline:
            rival = min((arm for arm in means if arm != baseline), key=lambda arm: float(means[arm]))
            parts.append(_sentence(label, baseline, rival, summary["differences"][rival][name], sign=-1))
        else:
            parts.append(_sentence(label, best, baseline, summary["differences"][best][name], sign=1))
    if not summary["is_complete"]:
        parts.append("The run was interrupted, so this is not the whole workload.")
    if not summary["is_valid"]:
        parts.append("Something spoiled the run (see the notes): do not trust these figures.")
    return " ".join(parts) or "No request succeeded."


def _sentence(label: str, winner: str, loser: str, difference: Json | None, *, sign: int) -> str:
    if difference is None:
        return f"{winner} and {loser} have too few requests in common to compare {label}."
    pair = PairedDifference(**difference)
    low, high = sorted((abs(pair.low), abs(pair.high)))
    base = pair.mean / pair.relative if pair.relative else 0.0
    share = abs(pair.mean) / (base if sign > 0 else base + pair.mean) if base else 0.0
    amount = f"{abs(pair.mean) * 1000:.3g} ms ({share:.1%})"
    if pair.is_noise:
        return f"{winner} and {loser} do not differ in {label} by more than noise ({amount}; the 95 % interval holds zero)."
    return (
        f"{winner} has the lower {label}, by {amount} against {loser} "
        f"(95 % interval {low * 1000:.3g} to {high * 1000:.3g} ms, paired by request): more than noise."
    )


def _arm(repeats: list[ArmResult]) -> Json:
    values = [metrics.per_request(run) for run in repeats]
    failed = sum(int((run.columns["error"] != "").sum()) for run in repeats)
    figures: Json = {
        "requests": sum(len(run.columns["request"]) for run in repeats),
        "failed": failed,
        "errors": _errors(repeats),
        "repeats": len(repeats),
        "is_complete": all(run.is_complete for run in repeats),
        "notes": sorted({note for run in repeats for note in run.notes}),
        "preemptions": _preemptions(repeats),
    }
    for name in ("ttft_sched", "ttft", "tpot", "e2e_sched", "e2e"):
        figures[name] = metrics.describe(np.concatenate([value[name] for value in values]), num_failed=failed)
    gaps = metrics.TokenGaps(np.concatenate([run.gaps for run in repeats]))
    figures["itl"] = metrics.describe_gaps(gaps)
    lag = np.concatenate([run.columns["sent_s"] - run.columns["intended_s"] for run in repeats])
    figures["schedule_lag"] = metrics.describe(lag)
    for name, of_run in (
        ("throughput", metrics.throughput),
        ("cache", metrics.cache),
        ("imbalance", metrics.imbalance),
    ):
        rows = [of_run(run) for run in repeats]
        figures[name] = {key: _mean([row[key] for row in rows]) for key in rows[0]}
    return figures


def _preemptions(repeats: list[ArmResult]) -> int | None:
    """Count preemptions; None where the engines did not tell (-1)."""
    counts = [run.columns["preemptions"] for run in repeats]
    return None if any((count < 0).any() for count in counts) else sum(int(count.sum()) for count in counts)


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _errors(repeats: list[ArmResult]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for run in repeats:
        for error in run.columns["error"]:
            if error:
                counts[error] = counts.get(error, 0) + 1
    return counts


def _averages(repeats: list[ArmResult], size: int) -> dict[str, Any]:
    """Average each request's metrics over the repeats, placed by request number."""
    averages = {}
    for name in PAIRED:
        table = np.full((len(repeats), size), np.nan)
        for place, run in enumerate(repeats):
            table[place, run.columns["request"]] = metrics.per_request(run)[name]
        averages[name] = table[0] if len(repeats) == 1 else table.mean(axis=0)
    return averages
