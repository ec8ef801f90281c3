"""Describe a trace by distributions only, and make similar workloads, so that a private trace can be shared as a spec.

The spec holds quantiles and a table: how the time between arrivals, new prompt tokens and output tokens are
distributed and, for prompts that share a prefix, how many requests ago it was last used and how long it is. No ids,
times or texts of the trace are included.
"""

import itertools
import random
from collections import Counter
from collections.abc import Sequence

import msgspec

from workloads.media import refuse_media
from workloads.request import Ends, Request, WorkloadError
from workloads.workload import Workload

SCHEMA = "dynabench.workload-spec/1"
POINTS = 101
TRIES = 64


class Spec(msgspec.Struct):
    """What is known about a trace."""

    schema: str
    name: str
    block_size: int
    requests: int
    gaps_s: list[float]
    """Quantiles of the time between arrivals."""
    reuse_share: float
    """Share of the requests whose first block was seen before."""
    reuses: list[list[float]]
    """[requests since the last use of the prefix, its blocks, share of the reusing requests], in classes of factor 2."""
    fresh_tokens: list[float]
    """Quantiles of prompt tokens after the shared prefix, of requests that reuse one."""
    first_tokens: list[float]
    """Quantiles of prompt tokens of requests that reuse nothing."""
    output_tokens: list[float]
    """Quantiles of output tokens."""
    stop_share: float = 0.0
    """Share of the answers that end by the model's EOS rather than by a forced length."""
    priorities: list[tuple[int, float]] = []
    """[priority, share of the requests], if there is more than one."""
    knows_prefixes: bool = True
    """Whether it is known what the trace's prompts share; if not, generated prompts share nothing, and their sharing is unknown, too."""


def fit_workload(workload: Workload) -> Spec:
    """Measure a workload.

    Raises:
        WorkloadError: it has too few requests, or adapters, or media.
    """
    if len(workload) < 20:
        raise WorkloadError(
            f"{workload.name}: {len(workload)} requests are too few to fit distributions; expected at least 20"
        )
    if workload.columns.adapters:
        raise WorkloadError(
            f"{workload.name}: requests ask for {len(workload.columns.adapters)} adapters, which a fit would lose; expected none "
            "(`dynabench workload synth --adapters N` makes some)"
        )
    refuse_media(workload.columns, workload.name, "a fit would lose")
    size = workload.block_size
    used: dict[int, int] = {}
    fresh, first = [], []
    classes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for number, request in enumerate(workload):
        full = request.hash_ids[: request.input_length // size]
        depth = next((place for place, id in enumerate(full) if id not in used), len(full))
        if depth:
            gap = number - used[full[depth - 1]]
            classes.setdefault((gap.bit_length(), depth.bit_length()), []).append((gap, depth))
            fresh.append(request.input_length - depth * size)
        else:
            first.append(request.input_length)
        used.update(dict.fromkeys(full, number))
    arrivals = [request.arrival_s for request in workload]
    reusing = max(len(fresh), 1)
    return Spec(
        SCHEMA,
        workload.name,
        size,
        len(workload),
        _quantiles([later - earlier for earlier, later in itertools.pairwise(arrivals)]),
        len(fresh) / len(workload),
        [[*map(float, _middle(members)), len(members) / reusing] for _, members in sorted(classes.items())],
        _quantiles(fresh or [1]),
        _quantiles(first or [1]),
        _quantiles([request.output_length for request in workload]),
        sum(request.ends == "stop" for request in workload) / len(workload),
        _priorities(workload),
        workload.knows_prefixes,
    )


def make_workload(spec: Spec, *, requests: int | None = None, seed: int = 0) -> list[Request]:
    """Generate a workload with the spec's distributions; the same seed gives the same workload."""
    rng, endings = random.Random(f"fit {seed}"), random.Random(f"fit ends {seed}")
    levels, shares = zip(*spec.priorities, strict=True) if spec.priorities else ((0,), (1.0,))
    order = random.Random(f"fit priorities {seed}")
    ids = itertools.count()
    made: list[Request] = []
    weights = [row[2] for row in spec.reuses]
    now, size = 0.0, spec.block_size
    for number in range(requests or spec.requests):
        shared: tuple[int, ...] = ()
        if made and spec.reuses and rng.random() < spec.reuse_share:
            gap, depth, _ = rng.choices(spec.reuses, weights)[0]
            shared = _prefix(
                made,
                number,
                gap * 2 ** rng.uniform(-0.4, 0.4),
                max(1, round(depth * 2 ** rng.uniform(-0.4, 0.4))),
                size,
            )
        length = len(shared) * size + max(round(_draw(rng, spec.fresh_tokens if shared else spec.first_tokens)), 0)
        length = max(length, 1)
        blocks = -(-length // size)
        named = (*shared, *itertools.islice(ids, max(blocks - len(shared), 0)))[:blocks]
        num_output = max(round(_draw(rng, spec.output_tokens)), 1)
        ends: Ends = "stop" if endings.random() < spec.stop_share else "length"
        (priority,) = order.choices(levels, shares)
        made.append(Request(round(now, 6), length, num_output, named, ends=ends, priority=priority))
        now += _draw(rng, spec.gaps_s)
    return made


def read_spec(text: bytes, place: str) -> Spec:
    """Read a spec.

    Raises:
        WorkloadError: it is not a specification.
    """
    try:
        spec = msgspec.json.decode(text, type=Spec)
    except msgspec.MsgspecError as error:
        raise WorkloadError(f"{place}: not a workload spec ({error})") from error
    if spec.schema != SCHEMA:
        raise WorkloadError(f"{place}: schema is {spec.schema!r}, expected {SCHEMA!r}")
    return spec


def _prefix(made: list[Request], number: int, gap: float, depth: int, size: int) -> tuple[int, ...]:
    """Take a prefix of about this depth from a request about this long ago."""
    place = min(max(number - max(round(gap), 1), 0), number - 1)
    best: tuple[int, ...] = ()
    for offset in range(TRIES):
        for near in {place - offset, place + offset}:
            if 0 <= near < number:
                request = made[near]
                found = request.hash_ids[: min(depth, request.input_length // size)]
                if len(found) > len(best):
                    best = found
                if len(best) == depth:
                    return best
    return best


def _priorities(workload: Workload) -> list[tuple[int, float]]:
    """Return each priority with its share of the requests; nothing if no request goes before others."""
    counts = Counter(request.priority for request in workload)
    return [(level, count / len(workload)) for level, count in sorted(counts.items())] if len(counts) > 1 else []


def _middle(members: list[tuple[int, int]]) -> tuple[float, float]:
    """Return the mean gap and depth of a class."""
    return (
        round(sum(gap for gap, _ in members) / len(members), 1),
        round(sum(depth for _, depth in members) / len(members), 1),
    )


def _quantiles(values: Sequence[float]) -> list[float]:
    """Return evenly spaced quantiles, including the ends."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return [round(float(ordered[round(last * place / (POINTS - 1))]), 6) for place in range(POINTS)]


def _draw(rng: random.Random, quantiles: list[float]) -> float:
    """Draw from a distribution given by its quantiles, linear in between."""
    place = rng.random() * (len(quantiles) - 1)
    low = int(place)
    return quantiles[low] + (quantiles[low + 1] - quantiles[low]) * (place - low)
