"""Try one layout with a number of workers; a hopeless one already fails in the busiest part of the workload."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dynabench.arm import Arm, Run
from dynabench.capacity.sureness import sureness_in
from dynabench.experiment.points import point_of, simulate_runs, simulated_whole
from dynabench.experiment.source import Source
from dynabench.interrupt import Flag
from reports.capacity.answer import Sureness
from reports.figures.conditions import METRICS, Condition
from reports.figures.metrics import TokenGaps, per_request
from reports.figures.outcomes import Outcome, num_required
from reports.record.records import Record
from reports.sweep.points import AnyPoint, Cut, Impossible
from workloads import Workload, WorkloadError
from workloads.shape import ShapeConfig

PARTS = 8
"""The busiest part is one of this many equal parts."""
WORTH_CUTTING = 4000
"""With this many requests or more, the busiest part is tried first."""
DEFAULT = ShapeConfig()


def attempt(
    arm: Arm,
    source: Source,
    seed: int,
    repeats: int,
    limits: list[Condition],
    attainment: float,
    flag: Flag,
    is_sure_wanted: bool,
) -> tuple[AnyPoint, list[Sureness]]:
    """Simulate a combination of settings: the busiest part of the workload, and all of it unless that fails.

    If wanted, also return how certain it is that the limits are met, as long as the runs are at hand.
    """
    workload = source(arm.settings.shape)
    is_worth_it = len(workload) >= WORTH_CUTTING and not _shares_prefixes(workload, arm)
    is_worth_it &= not arm.settings.load.is_closed  # a part would begin with a burst that is not in the whole
    is_worth_it &= not arm.settings.load.has_window  # of a part, other requests count
    part = busiest(source, arm.settings.shape) if is_worth_it else None
    if part is not None:
        cut = Arm(arm.name, replace(arm.settings, shape=part), arm.changes)
        try:
            record = simulated_whole(Run(cut, seed=seed), source(part), flag)
        except ValueError:
            record = None  # `simulate_runs` says why
        if record is not None:
            missed = certain_misses(record, workload, limits, attainment)
            if missed:
                return Cut(arm.name, arm.plain_changes, missed), []
    runs = simulate_runs(arm, source, seed, repeats, flag)
    if isinstance(runs, Impossible):
        return runs, []
    point = point_of(arm, source, runs, limits, attainment)
    is_needed = is_sure_wanted and point.state == "met"
    return point, sureness_in(runs[0], arm, limits, attainment) if is_needed else []


def _shares_prefixes(workload: Workload, arm: Arm) -> bool:
    """Return whether a part of a workload would lack the prefixes that earlier requests left in the caches."""
    caches = any(pool.mocker.enable_prefix_caching for pool in arm.settings.deployment.pools)
    return caches and workload.knows_prefixes


def busiest(source: Source, shape: ShapeConfig) -> ShapeConfig | None:
    """Return the shape of the part of a trace with the most tokens; None if the workload has other times, or is cut."""
    if replace(shape, rate_scale=1.0) != replace(
        DEFAULT, ends=shape.ends, cap_isl=shape.cap_isl, spread_ticks=shape.spread_ticks
    ):
        return None
    whole = source(replace(shape, rate_scale=1.0))
    if whole.has_dependencies or not whole.duration_s:
        return None
    edges = np.linspace(0, whole.duration_s, 4 * PARTS + 1)
    arrivals = np.array([request.arrival_s for request in whole])
    tokens = np.array([request.input_length + request.output_length for request in whole], float)
    sums = np.convolve(np.histogram(arrivals, edges, weights=tokens)[0], np.ones(4), mode="valid")
    start_s, duration_s = float(edges[int(sums.argmax())]), float(edges[4])
    part = replace(shape, start_s=start_s, duration_s=duration_s)
    try:
        source(part)
    except WorkloadError:  # its times may start elsewhere than those of the whole; then it may be less busy, or empty
        return None
    return part


def certain_misses(part: Record, whole: Workload, limits: Sequence[Condition], attainment: float) -> list[Outcome]:
    """Return the limits that the whole workload misses, whatever its other requests do.

    A percentile is missed if more requests (or tokens) of the part exceed the limit than the whole may have; a mean if
    the part alone adds up to more. In the part on its own, no request meets a queue left by earlier ones.
    """
    values, failed = per_request(part.requests), int((~part.requests.succeeded).sum())
    num_gaps = sum(request.output_length - 1 for request in whole)
    found = []
    for limit in limits:
        of, count = values.get(METRICS[limit.metric]), len(whole)
        if limit.metric == "itl":
            gaps, count = TokenGaps(part.gaps), num_gaps
            beyond = gaps.count - int(gaps.counts_below(np.array([limit.value]))[0]) if len(part.gaps) else 0
            total = gaps.mean() * gaps.count if len(part.gaps) else 0.0
        elif of is not None:
            beyond, total = int((of > limit.value).sum()) + failed, float(np.nansum(of))
        else:
            continue
        if limit.statistic == "mean":
            is_missed, said = total > limit.value * count, "its sum is too high"
        else:
            most = count - num_required(limit, count, attainment)
            unit = "gaps" if limit.metric == "itl" else "requests"
            is_missed, said = beyond > most, f"{beyond:,} {unit} exceed it, and at most {most:,} may"
        if is_missed:
            found.append(Outcome(str(limit), "missed", reason=f"in the busiest part of the workload alone, {said}"))
    return found
