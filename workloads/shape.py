"""Reshape a workload and keep what its prompts share: cut, scale, cap, spread ticks."""

import random
from dataclasses import dataclass

import msgspec

from workloads.request import Request, Workload, WorkloadError


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeConfig:
    """What to change about a workload before it is used."""

    rate_scale: float = 1.0
    """Let requests arrive this many times as fast."""

    start_s: float = 0.0
    """Leave out what arrives before this time of the trace (s)."""

    duration_s: float | None = None
    """Keep this much of the trace from there on (s of the trace, before scaling)."""

    max_requests: int | None = None
    """Keep this many requests at most."""

    cap_isl: int | None = None
    """Cut prompts to this many tokens."""

    spread_ticks: bool = False
    """Spread requests with equal time stamps evenly until the next time stamp (for traces with coarse clocks)."""

    def __post_init__(self) -> None:
        """Refuse settings without a meaning."""
        if not self.rate_scale > 0:
            raise ValueError(f"rate_scale must be greater than 0, not {self.rate_scale}")
        if self.start_s < 0:
            raise ValueError(f"start_s must not be negative, not {self.start_s}")
        if self.duration_s is not None and not self.duration_s > 0:
            raise ValueError(f"duration_s must be greater than 0, not {self.duration_s}")
        for name in ("max_requests", "cap_isl"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")


def shape(workload: Workload, config: ShapeConfig, *, seed: int = 0) -> Workload:
    """Apply the settings; the first request then arrives at time 0.

    Raises:
        WorkloadError: nothing is left.
    """
    requests, notes = workload.requests, list(workload.notes)
    if config.spread_ticks:
        requests = _spread(requests, random.Random(f"ticks {seed}"))
        notes.append("equal time stamps spread until the next")
    end_s = config.start_s + config.duration_s if config.duration_s is not None else float("inf")
    if config.start_s > 0 or config.duration_s is not None:
        requests = [request for request in requests if config.start_s <= request.arrival_s < end_s]
        notes.append(f"cut to {config.start_s:g} s until {end_s:g} s")
    if config.max_requests is not None:
        requests = requests[: config.max_requests]
        notes.append(f"cut to {config.max_requests} requests")
    if config.cap_isl is not None:
        requests = [_cap(request, config.cap_isl, workload.block_size) for request in requests]
        notes.append(f"prompts cut to {config.cap_isl} tokens")
    if not requests:
        raise WorkloadError(f"{workload.name}: no request is left ({'; '.join(notes) or 'the file is empty'})")
    if config.rate_scale != 1:
        notes.append(f"arrival rate x {config.rate_scale:g}")
    first = requests[0].arrival_s
    if first or config.rate_scale != 1:
        requests = [
            Request((r.arrival_s - first) / config.rate_scale, r.input_length, r.output_length, r.hash_ids)
            for r in requests
        ]
    return Workload(workload.name, workload.block_size, requests, tuple(notes))


def _spread(requests: list[Request], rng: random.Random) -> list[Request]:
    """Place the requests of each tick at sorted uniform times of the gap to the next tick."""
    spread: list[Request] = []
    start = 0
    while start < len(requests):
        tick = requests[start].arrival_s
        stop = start
        while stop < len(requests) and requests[stop].arrival_s == tick:
            stop += 1
        if stop < len(requests):
            gap = requests[stop].arrival_s - tick
        offsets = sorted(rng.random() for _ in range(stop - start))
        if stop == len(requests) and start == 0:
            gap = 0.0
        for request, offset in zip(requests[start:stop], offsets, strict=True):
            spread.append(msgspec.structs.replace(request, arrival_s=tick + offset * gap))
        start = stop
    return spread


def _cap(request: Request, limit: int, block_size: int) -> Request:
    if request.input_length <= limit:
        return request
    return Request(request.arrival_s, limit, request.output_length, request.hash_ids[: -(-limit // block_size)])
