"""The most prefix-cache hits that any router could get, for the routing study."""

from heapq import heappop, heappush

from mocker.timing.choose import SimulatedEngine
from workloads import Workload


def belady_share(workload: Workload, engine: SimulatedEngine, num_workers: int) -> float:
    """Return the highest share of prompt tokens that caches of this size could hold, all pooled and clairvoyant.

    Belady's rule over blocks: whatever is needed again last goes first.
    """
    size = workload.block_size
    capacity = engine.num_usable_tokens * num_workers // size
    accesses = [id for request in workload for id in request.hash_ids[: request.input_length // size]]
    next_use: list[float] = [float("inf")] * len(accesses)
    seen: dict[int, int] = {}
    for place in range(len(accesses) - 1, -1, -1):
        next_use[place] = seen.get(accesses[place], float("inf"))
        seen[accesses[place]] = place
    held: dict[int, float] = {}
    farthest: list[tuple[float, int]] = []
    hits = 0
    for place, id in enumerate(accesses):
        if id in held:
            hits += 1
        elif len(held) >= capacity:
            while True:
                use, victim = heappop(farthest)
                if held.get(victim) == -use:
                    del held[victim]
                    break
        held[id] = next_use[place]
        heappush(farthest, (-next_use[place], id))
    return hits * size / sum(request.input_length for request in workload)
