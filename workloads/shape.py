"""Reshape a workload (cut, scale, cap, spread ticks) while keeping what its prompts share."""

import random
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from foundation.settings import Count, NotNegative, Positive, check_settings
from workloads.arrivals import Process, Profile, arrival_times
from workloads.media import refuse_media
from workloads.request import Ends, Request, WorkloadError
from workloads.row import check_span
from workloads.thin import thin
from workloads.workload import Workload

if TYPE_CHECKING:
    from workloads.columns import Floats, RequestColumns

UNIT_SCALES = (SECONDS_AS_MS, MS_AS_SECONDS) = (0.001, 1000)
"""Rate scales that correct times in seconds that were read as milliseconds, and the other way round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeConfig:
    """What to change about a workload before it is used."""

    rate_scale: Positive = 1.0
    """Speed up arrivals by this factor."""

    start_s: NotNegative = 0.0
    """Leave out requests that arrive before this time of the trace (s)."""

    duration_s: Positive | None = None
    """Keep this much of the trace after --start-s (s of the trace, before scaling)."""

    max_requests: Count | None = None
    """Keep at most this many requests."""

    cap_isl: Count | None = None
    """Cut prompts to this many tokens."""

    spread_ticks: bool = False
    """Spread requests with equal timestamps evenly until the next timestamp (for traces with coarse clocks)."""

    thin: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Keep this share of the sessions, each of them whole (if the trace names no sessions: of the groups of requests
    that share a rare prefix)."""

    isl_scale: Positive = 1.0
    """Make prompts this many times as long; what they share stays shared."""

    osl_scale: Positive = 1.0
    """Make outputs this many times as long."""

    ends: Ends | None = None
    """How answers end: `length` forces the planned length, as load generators do; `stop` ends them with the model's EOS
    (default: the workload's; traces: length)."""

    arrival: Process | None = None
    """Draw new arrival times for requests, or for the first of each session, from this process at --rate (none: keep
    the trace's times)."""

    rate: Positive | None = None
    """Arrivals per second (default: the trace's mean rate)."""

    burstiness: Positive = 1.0
    """Shape of gamma arrivals: 1 is Poisson, less is burstier."""

    rate_profile: Profile = "flat"
    """How the rate changes over time: `ramp` to --rate-to within --profile-s, or `sine` between the two with that
    period."""

    rate_to: Positive | None = None
    """The rate at the end of a ramp, or the highest of a sine (arrivals per second)."""

    profile_s: Positive = 60.0
    """Length of the ramp, or period of the sine (s)."""

    def __post_init__(self) -> None:
        """Refuse settings that make no sense."""
        check_settings(self)
        if self.arrival is None and (self.rate is not None or self.rate_profile != "flat"):
            raise ValueError("rate and rate_profile apply to new arrival times; choose a process with --arrival")
        if self.arrival is not None and self.rate_scale != 1:
            raise ValueError("rate_scale scales the trace's arrival times; with --arrival, use --rate")
        if (self.rate_profile == "flat") != (self.rate_to is None):
            raise ValueError("rate_to is the target of a ramp or sine; give both or neither")


def shape(workload: Workload, config: ShapeConfig, *, seed: int = 0) -> Workload:
    """Apply the settings and shift the first arrival to time 0.

    Raises:
        WorkloadError: nothing is left.
    """
    if config.thin is not None:
        workload = thin(workload, config.thin, seed)
    if config.isl_scale != 1 or config.cap_isl is not None:
        refuse_media(workload.columns, workload.name, f"{'cap_isl' if config.cap_isl else 'isl_scale'} might cut")
    if config.isl_scale != 1 or config.osl_scale != 1:
        workload = scale_lengths(workload, config.isl_scale, config.osl_scale)
    requests, notes = workload.columns, [note for note in workload.notes if not _is_answered(note, config)]
    if config.ends is not None:
        requests = requests.replace(ends=[config.ends] * len(requests))
    if config.spread_ticks:
        requests = requests.replace(arrival_s=_spread(requests.arrival_s, random.Random(f"ticks {seed}")))
        notes.append("equal timestamps spread until the next")
    end_s = config.start_s + config.duration_s if config.duration_s is not None else float("inf")
    if config.start_s > 0 or config.duration_s is not None:
        is_inside = (config.start_s <= requests.arrival_s) & (requests.arrival_s < end_s)
        requests = requests.select(is_inside.nonzero()[0].tolist())
        notes.append(f"cut to {config.start_s:g} to {end_s:g} s")
    if config.max_requests is not None:
        requests = requests[: config.max_requests]
        notes.append(f"cut to {config.max_requests} requests")
    if workload.has_dependencies and not any(requests.values("after")):
        notes.append("no turn is left that waits for an answer; --thin keeps whole sessions")
    if config.cap_isl is not None:
        limit, size = config.cap_isl, workload.block_size
        requests = requests.of(_cap(request, limit, size) for request in requests)
        notes.append(f"prompts cut to {config.cap_isl} tokens")
    if not requests:
        raise WorkloadError(f"{workload.name}: no request is left ({'; '.join(notes) or 'the file is empty'})")
    if config.arrival is not None:
        arrival_s, rate = _arrive_again(requests, config, seed)
        requests = requests.replace(arrival_s=arrival_s)
        notes.append(f"new {config.arrival} arrivals at {rate:g}/s" + _profile(config))
    if config.rate_scale != 1:
        notes.append(f"arrival rate x {config.rate_scale:g}")
    first = requests.arrival_s[0]
    if first or config.rate_scale != 1:
        requests = requests.replace(arrival_s=(requests.arrival_s - first) / config.rate_scale)
    check_span(workload.name, float(requests.arrival_s.max()))
    return replace(workload, requests=requests, notes=tuple(notes))


def unit_hint(scale: float) -> str:
    """Return how a note that asks for the unit of times ends."""
    return f"if so, use --rate-scale {scale:g}"


def _is_answered(note: str, config: ShapeConfig) -> bool:
    """Return whether a note asks for the unit of times, and these settings correct it or replace the times."""
    scales = UNIT_SCALES if config.arrival else (config.rate_scale,)
    return note.endswith(tuple(map(unit_hint, scales)))


def scale_lengths(workload: Workload, isl: float, osl: float) -> Workload:
    """Make prompts and answers longer or shorter; for prompts, each id gets more or fewer tokens.

    The factor of the prompts is rounded so that a block is a multiple of 16 tokens.
    """
    before = workload.block_size
    size = max(round(before * isl / 16) * 16, 16) if isl != 1 else before
    notes = list(workload.notes)
    if size != before:
        notes.append(f"prompts x {size / before:g}")
    if osl != 1:
        notes.append(f"outputs x {osl:g}")
    requests = [
        msgspec.structs.replace(
            request,
            input_length=_scaled(request, before, size),
            output_length=max(round(request.output_length * osl), 1),
            content=request.content if size == before else None,
        )
        for request in workload
    ]
    return replace(workload, block_size=size, requests=requests, notes=tuple(notes))


def _arrive_again(requests: "RequestColumns", config: ShapeConfig, seed: int) -> "tuple[Floats, float]":
    """Draw new arrival times for the requests that wait for no other; the others keep to the one before them."""
    import numpy as np

    roots = requests.scheduled_s.tolist()
    span = roots[-1] - roots[0]
    rate = config.rate or ((len(roots) - 1) / span if span > 0 else 0.0)
    if not rate:
        raise WorkloadError("the workload has no arrival times from which to take a rate; use --rate")
    new = arrival_times(
        random.Random(f"arrivals {seed}"),
        process=config.arrival or "poisson",
        rate=rate,
        burstiness=config.burstiness,
        profile=config.rate_profile,
        rate_to=config.rate_to,
        profile_s=config.profile_s,
    )
    drawn = np.fromiter(new, float, len(roots))
    waits = [bool(after) for after in requests.values("after")]
    # One before the first that waits for nothing is at 0.
    return np.concatenate([[0.0], drawn])[np.cumsum(np.logical_not(waits))], rate


def _profile(config: ShapeConfig) -> str:
    if config.rate_profile == "flat":
        return ""
    return f", {config.rate_profile} to {config.rate_to:g}/s in {config.profile_s:g} s"


def _spread(arrival_s: "Floats", rng: random.Random) -> "Floats":
    """Place the requests of each tick at sorted uniform times of the gap to the next tick."""
    import numpy as np

    spread, gap = list[float](), 0.0
    ticks = [(tick, len(list(group))) for tick, group in groupby(arrival_s.tolist())]
    for place, (tick, count) in enumerate(ticks):
        if place + 1 < len(ticks):
            gap = ticks[place + 1][0] - tick
        spread += [tick + offset * gap for offset in sorted(rng.random() for _ in range(count))]
    return np.array(spread)


def _cap(request: Request, limit: int, block_size: int) -> Request:
    if request.input_length <= limit:
        return request
    ids = request.hash_ids[: -(-limit // block_size)]
    return msgspec.structs.replace(request, input_length=limit, hash_ids=ids, content=None)


def _scaled(request: Request, before: int, size: int) -> int:
    full = len(request.hash_ids) - 1
    rest = request.input_length - full * before
    return full * size + max(round(rest * size / before), 1)
