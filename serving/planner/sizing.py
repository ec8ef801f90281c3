"""How many workers a pool needs for the arriving requests."""

import math
from collections.abc import Sequence

from serving.planner.capacity import Capacity, RequestShape, aggregated_capacity, decode_capacity, prefill_capacity
from serving.planner.observation import PoolFacts, RequestTraffic


def capacity_of(facts: PoolFacts, shape: RequestShape, *, ttft_s: float, itl_s: float) -> Capacity | None:
    """Return the capacity of a worker with all its ranks; None if it cannot run such requests at all."""
    times = facts.times
    assert times is not None
    match facts.role:
        case "prefill":
            found: Capacity | None = prefill_capacity(
                times,
                shape,
                max_num_seqs=facts.max_num_seqs,
                max_num_batched_tokens=facts.max_num_batched_tokens,
                ttft_s=ttft_s,
            )
        case "decode":
            found = decode_capacity(
                times, shape, max_num_seqs=facts.max_num_seqs, max_kv_tokens=facts.max_kv_tokens, itl_s=itl_s
            )
        case "aggregated":
            found = aggregated_capacity(
                times,
                shape,
                max_num_seqs=facts.max_num_seqs,
                max_num_batched_tokens=facts.max_num_batched_tokens,
                max_kv_tokens=facts.max_kv_tokens,
                ttft_s=ttft_s,
                itl_s=itl_s,
            )
    if found is None:
        return None
    return found._replace(batch=found.batch * facts.num_ranks, rps=found.rps * facts.num_ranks)


def workers_for(demand: float, each: float) -> int:
    """Return how many workers serve a demand if each serves `each` of it."""
    return math.ceil(demand / each - 1e-9)


def merged(windows: Sequence[RequestTraffic]) -> RequestTraffic:
    """Return the traffic of several intervals as one; means are weighted by the requests that arrived in each."""

    def mean(name: str) -> float | None:
        known = [(value, each.num_requests or 1) for each in windows if (value := getattr(each, name)) is not None]
        weight = sum(number for _, number in known)
        return sum(value * number for value, number in known) / weight if known else None

    return RequestTraffic(
        duration_s=sum(each.duration_s for each in windows),
        num_requests=sum(each.num_requests for each in windows),
        **{name: mean(name) for name in ("isl", "osl", "hit_share", "ttft_s", "itl_s", "e2e_s")},
    )
