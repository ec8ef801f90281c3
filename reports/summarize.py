"""From the runs of an experiment to the content of summary.json."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, structs

from reports.figures import fleet as fleet_figures
from reports.figures import insight, metrics, slo, sufficiency, tiers
from reports.figures.conditions import METRICS, Condition
from reports.figures.metrics import Goodput, Intervals, Throughput
from reports.figures.outcomes import of_run
from reports.figures.server import remarks as server_remarks
from reports.figures.server import server_figures
from reports.figures.split import split_ttft
from reports.figures.stability import stability
from reports.figures.statistics import (
    Blocks,
    PairedDifference,
    blocks_of,
    mean_interval,
    paired_difference,
    quantile_intervals,
)
from reports.figures.tier_sizes import bases
from reports.figures.tiers import Hits, Saving
from reports.record.pools import averaged
from reports.record.records import Floats, Record, Texts
from reports.summary import (
    NOISE_FLOOR,
    PAIRED,
    SCHEMA,
    SMALLEST,
    ArmSummary,
    Bound,
    Difference,
    Summary,
)
from reports.verdicts.comparison import verdict
from reports.verdicts.differences import Table, differences, noise_floor
from reports.verdicts.engines import EngineError, engine_errors
from reports.verdicts.ranking import OUT_OF_LIMITS, rank

BEYOND = re.compile(r"maximum context length is \d+ tokens")
"""What servers write, vLLM's too, to refuse a request that is longer than the context."""

Figures = TypeVar("Figures", bound=msgspec.Struct)


def summary_of(manifest: dict[str, Any], runs: list[Record]) -> Summary:
    """Summarize the runs of a results folder, with what its manifest says of them."""
    return summarize(
        runs,
        [slo.parse_slo(text) for text in manifest["limits"]],
        manifest.get("bound_s"),
        manifest.get("best_hit_shares"),
        smallest=manifest.get("smallest_difference", SMALLEST),
        elsewhere=manifest.get("elsewhere"),
        engine_errors=engine_errors(manifest),
    )


def compared(
    runs: Sequence[Record], arm: str, to: str, *, smallest: float = SMALLEST
) -> dict[str, dict[str, Difference | None]]:
    """Return how one arm differs from another, by metric and statistic, as `Summary.differences` does from the first."""
    first, other = ([run.measured for run in runs if run.arm == name] for name in (to, arm))
    size = max(int(run.requests.request.max(initial=-1)) for run in (*first, *other)) + 1
    base: Table = ByRequest(first, size)
    table: Table = ByRequest(other, size)
    blocks = blocks_of(base["intended_s"], base["e2e_sched"])
    again = [run.measured for run in runs if run.arm == to + NOISE_FLOOR]
    floor = noise_floor(to, {to: base} | ({to + NOISE_FLOOR: ByRequest(again, size)} if again else {}), blocks)
    is_stable = all(stability(run).is_stable for run in (*first, *other))
    return differences(base, table, blocks, floor, smallest=smallest, is_stable=is_stable)


def summarize(
    runs: list[Record],
    limits: list[Condition] | None = None,
    bound_s: float | None = None,
    best_hit_shares: dict[str, dict[str, float]] | None = None,
    *,
    smallest: float = SMALLEST,
    with_intervals: bool = True,
    elsewhere: dict[str, str | None] | None = None,
    engine_errors: dict[str, EngineError] | None = None,
) -> Summary:
    """Summarize the runs of an experiment; repeats of an arm are pooled, and differences are averaged per request first.

    Args:
        runs: every run of every arm.
        limits: what makes a request, or run, good.
        bound_s: the mean TTFT that no router could have beaten (s).
        best_hit_shares: the same for hit shares, by arm and memory.
        smallest: the relative difference below which two arms are equal in practice.
        with_intervals: compute intervals for each arm's own figures, which takes a while.
        elsewhere: what other routers call the mode of each arm, if arms differ by it.
        engine_errors: the error of each arm's engine, if arms differ by engine.
    """
    arms: dict[str, list[Record]] = {}
    rates: dict[str, list[Throughput]] = {}
    for run in runs:
        arms.setdefault(run.arm, []).append(run.measured)
        rates.setdefault(run.arm, []).append(metrics.throughput(run))
    size = max(int(run.requests.request.max(initial=-1)) for run in runs) + 1
    tables: dict[str, Table] = {arm: ByRequest(repeats, size) for arm, repeats in arms.items()}
    first = next(iter(arms))
    blocks = blocks_of(tables[first]["intended_s"], tables[first]["e2e_sched"])
    figures = {
        arm: _arm(repeats, tables[arm], blocks if with_intervals else None, limits or [], _averaged(rates[arm]))
        for arm, repeats in arms.items()
    }
    figures = _with_fleet(_with_tiers(figures, runs, tables, blocks), runs, limits or [])
    floor = noise_floor(first, tables, blocks)
    is_stable = {arm: value.stability.is_stable for arm, value in figures.items()}
    summary = Summary(
        schema=SCHEMA,
        is_valid=not any(value.notes for value in figures.values()),
        verdict="",
        baseline=first,
        arms=figures,
        differences={
            arm: differences(
                tables[first], table, blocks, floor, smallest=smallest, is_stable=is_stable[first] and is_stable[arm]
            )
            for arm, table in tables.items()
            if arm != first
        },
        noise_floor=floor,
        limits=[str(limit) for limit in limits or []],
        bound=_bound(figures, bound_s, best_hit_shares or {}),
        num_blocks=int(blocks.max(initial=0)) + 1,
        formulas=metrics.FORMULAS,
        is_complete=all(value.is_complete for value in figures.values()),
        is_stable=all(is_stable.values()),
    )
    if summary.shows_ttst:
        summary = structs.replace(summary, formulas=summary.formulas | {"ttst": metrics.TTST_FORMULA})
    if summary.has_tiers:
        summary = structs.replace(summary, formulas=summary.formulas | tiers.FORMULAS)
    if summary.has_fleet:
        summary = structs.replace(summary, formulas=summary.formulas | fleet_figures.FORMULAS)
    if each := [limit for limit in limits or [] if limit.statistic is None]:
        for arm, repeats in arms.items():
            tables[arm][OUT_OF_LIMITS] = _out_of_limits(repeats, each, size)
    ranking = rank(summary, tables, blocks, smallest=smallest, elsewhere=elsewhere)
    summary = structs.replace(summary, ranking=ranking or UNSET)
    return structs.replace(summary, verdict=verdict(summary, engine_errors or {}))


def _bound(arms: dict[str, ArmSummary], bound_s: float | None, best: dict[str, dict[str, float]]) -> Bound:
    means = {arm: figures.ttft_sched.mean for arm, figures in arms.items() if figures.ttft_sched.mean}
    best = {arm: best[arm] for arm in arms if best.get(arm)}
    actual = {arm: arms[arm].waterfall.actual for arm in best}
    reached = {
        arm: found / most
        for arm, shares in best.items()
        if (found := actual[arm]) is not None and (most := max(shares.values()))
    }
    return Bound(bound_s, insight.covered(means, bound_s), best or UNSET, reached or UNSET)


def _with_tiers(
    figures: dict[str, ArmSummary], runs: list[Record], tables: dict[str, Table], blocks: Blocks
) -> dict[str, ArmSummary]:
    """If any arm has KV tiers, add to each where prompt tokens came from, what it used, and what it saved."""
    if not any(arm.tiers for arm in figures.values()):
        return figures
    by_arm = {arm: [run for run in runs if run.arm == arm] for arm in figures}
    spent = {arm: [tiers.spent(run) for run in its] for arm, its in by_arm.items()}
    sizes = {arm: sum(use.capacity_bytes for use in its.tiers or ()) for arm, its in figures.items()}
    against = bases(sizes)
    found = {}
    for arm, its in figures.items():
        hits, gpu_s, base = tiers.hits(by_arm[arm]), tiers.gpu_seconds(spent[arm]), against[arm]
        saved = None if sizes[arm] == sizes[base] else tiers.saved(base, spent[base], spent[arm])
        if saved is not None:
            is_stable = its.stability.is_stable and figures[base].stability.is_stable
            pair = (
                paired_difference(tables[base]["ttft_sched"], tables[arm]["ttft_sched"], blocks) if is_stable else None
            )
            saved = structs.replace(saved, ttft_s=pair and _saving(pair, len(by_arm[arm])))
        found[arm] = structs.replace(
            its,
            remarks=its.remarks + tiers.remarks(its.tiers or (), hits or Hits()),
            hits=hits or UNSET,
            avoided=tiers.avoided(spent[arm]) or UNSET,
            gpu_s=UNSET if gpu_s is None else gpu_s,
            saved=saved or UNSET,
        )
    return found


def _with_fleet(figures: dict[str, ArmSummary], runs: list[Record], limits: list[Condition]) -> dict[str, ArmSummary]:
    """If the number of workers changed in any arm, add to each what its workers used."""
    if not any(run.fleet and run.fleet.is_shown for run in runs):
        return figures
    edges = fleet_figures.windows(runs)
    return {
        arm: structs.replace(
            its, fleet=fleet_figures.figures([run for run in runs if run.arm == arm], limits, edges) or UNSET
        )
        for arm, its in figures.items()
    }


def _saving(pair: PairedDifference, repeats: int) -> Saving:
    """Return a difference as a saving."""
    return Saving(-pair.mean, -pair.relative, repeats, (-pair.high, -pair.low))


def _arm(
    repeats: list[Record], table: Table, blocks: Blocks | None, limits: list[Condition], rates: Throughput
) -> ArmSummary:
    failed = sum(int((~run.requests.succeeded).sum()) for run in repeats)
    latencies: dict[str, Any] = {
        name: metrics.describe(_all(repeats, name), num_failed=failed)
        for name in ("ttft_sched", "ttft", "tpot", "e2e_sched", "e2e")
    }
    settled = [stability(run) for run in repeats]
    # If the queue grew, times grow with the length of the run, so there is no true value for an interval to include.
    if blocks is not None and all(one.is_stable for one in settled):
        for name in PAIRED:
            latencies[name] = structs.replace(latencies[name], intervals=_intervals(table[name], blocks))
    server = server_figures(repeats)
    arm = ArmSummary(
        requests=sum(len(run.requests) for run in repeats),
        failed=failed,
        errors=_counts([run.requests.error for run in repeats]),
        repeats=len(repeats),
        is_complete=all(run.is_complete for run in repeats),
        notes=sorted({note for run in repeats for note in run.notes}),
        remarks=[*insight.remarks(repeats), *sufficiency.remarks(repeats[0]), *server_remarks(server)],
        stability=max(settled, key=lambda one: (not one.is_stable, one.end - one.start)),
        preemptions=_preemptions(repeats),
        **latencies,
        itl=metrics.describe_gaps(metrics.TokenGaps(np.concatenate([run.gaps for run in repeats]))),
        schedule_lag=metrics.describe(np.concatenate([metrics.schedule_lag(run.requests) for run in repeats])),
        throughput=rates,
        cache=_averaged([metrics.cache(run) for run in repeats]),
        imbalance=_averaged([insight.imbalance(run) for run in repeats]),
        waterfall=_averaged([insight.waterfall(run) for run in repeats]),
        client={name: _mean([run.facts.get(name) for run in repeats]) for name in repeats[0].facts},
        ends=_counts([run.requests.finish_reason for run in repeats]) or UNSET,
        affinity_breaks=_mean([insight.affinity_breaks(run) for run in repeats]),
        split=split_ttft(repeats) or UNSET,
        pools=averaged([run.pools for run in repeats]) or UNSET,
        links=averaged([run.links for run in repeats]) or UNSET,
        tiers=averaged([run.tiers for run in repeats]) or UNSET,
        adapters=averaged([run.adapters for run in repeats]) or UNSET,
        drafts=averaged([run.drafts for run in repeats]) or UNSET,
        encoders=averaged([run.encoders for run in repeats]) or UNSET,
        server=server or UNSET,
    )
    seconds = _all(repeats, "ttst")
    if not np.isnan(seconds).all():
        arm = structs.replace(arm, ttst=metrics.describe(seconds, num_failed=failed))
    if not limits:
        return arm
    goodput = _goodput(repeats, limits)
    outcomes = [
        of_run(limit, arm.metric(METRICS[limit.metric]), repeats) for limit in limits if limit.statistic is not None
    ]
    return structs.replace(arm, goodput=goodput, outcomes=outcomes)


def _all(repeats: list[Record], name: str) -> Floats:
    """Return a metric of the requests of all repeats."""
    values = [metrics.of_each(run.requests, name) for run in repeats]
    return values[0] if len(values) == 1 else np.concatenate(values)


def _goodput(repeats: list[Record], limits: list[Condition]) -> Goodput:
    """Return the goodput within all limits, and the attainment of the per-request limits, if there are any."""
    found = _averaged([metrics.goodput(run, slo.good_requests(run, limits)) for run in repeats])
    own = [limit for limit in limits if limit.statistic is None]
    if own and len(own) < len(limits):
        attained = _averaged([metrics.goodput(run, slo.good_requests(run, own)) for run in repeats])
        found = structs.replace(found, attainment=attained.attainment)
    return found


def _intervals(values: Floats, blocks: Blocks) -> Intervals:
    """Return the 95% intervals of mean and percentiles for which there are enough samples."""
    known = int((~np.isnan(values)).sum())
    wanted = [p for p in (50, 90, 99) if known >= metrics.LEAST_SAMPLES[p]]
    found = quantile_intervals(values, blocks, [p / 100 for p in wanted])
    at = dict(zip(wanted, found, strict=True))
    return Intervals(mean=mean_interval(values, blocks), p50=at.get(50), p90=at.get(90), p99=at.get(99))


def _preemptions(repeats: list[Record]) -> int | None:
    """Count preemptions; return None if an engine did not report them."""
    counts = [metrics.preemptions(run) for run in repeats]
    return None if None in counts else sum(filter(None, counts))


def _averaged(rows: list[Figures]) -> Figures:
    """Average each field over the repeats that know it."""
    kind = type(rows[0])
    return kind(**{name: _mean([getattr(row, name) for row in rows]) for name in kind.__struct_fields__})


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(sum(known) / len(known)) if known else None


def _counts(texts: list[Texts]) -> dict[str, int]:
    """Count the values of a text column, without the empty ones; the first stands for its kind."""
    counts = Counter[str]()
    for each in texts:
        counts.update({each[0]: len(each)} if len(each) and each.strides == (0,) else each)
    counts.pop("", None)
    found: dict[str, tuple[str, int]] = {}
    for text, count in counts.items():
        kind = _kind(text)
        first, before = found.get(kind, (text, 0))
        found[kind] = first, before + count
    return dict(found.values())


def _kind(text: str) -> str:
    """Return what is equal in texts that count as one: refusals beyond a context differ in the lengths of requests."""
    refusal = BEYOND.search(text)
    return text[: refusal.end()] if refusal else text


def _out_of_limits(repeats: list[Record], limits: list[Condition], size: int) -> Floats:
    """Return whether each request was out of the limits, averaged over the repeats."""
    table = np.full((len(repeats), size), np.nan)
    for place, run in enumerate(repeats):
        table[place, run.requests.request] = ~slo.good_requests(run, limits)
    averages: Floats = table.mean(axis=0)
    return averages


class ByRequest(Table):
    """Each request's metrics by its number, averaged over the repeats; NaN where one is missing.

    They are computed when they are asked for, and not kept: those of many requests take much memory.
    """

    def __init__(self, repeats: Sequence[Record], size: int) -> None:
        """Number requests below `size`."""
        self._repeats, self._size = repeats, size

    def __contains__(self, name: object) -> bool:
        return name in PAIRED or name == "intended_s" or super().__contains__(name)

    def __missing__(self, name: str) -> Floats:
        table = np.full((len(self._repeats), self._size), np.nan)
        for row, run in zip(table, self._repeats, strict=True):
            requests = run.requests
            row[requests.request] = requests.intended_s if name == "intended_s" else metrics.of_each(requests, name)
        if name == "intended_s":
            np.nan_to_num(table, copy=False)
        averages: Floats = table[0] if len(table) == 1 else table.mean(axis=0)
        return averages
