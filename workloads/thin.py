"""Thin a workload by session, so that what prompts share stays shared."""

import random
from collections import Counter
from dataclasses import replace

from workloads.request import WorkloadError
from workloads.workload import Workload, select

COMMON = 0.01
"""An id that more than this share of the requests have does not belong to a single session."""


def thin(workload: Workload, share: float, seed: int = 0) -> Workload:
    """Keep a share of the sessions, each as a whole; if the trace names none, requests that share a rare prefix form one.

    Arrival times stay, so the rate falls with the share; reuse within a session keeps its intervals.
    """
    names = sessions_of(workload)
    kept = {name for name in dict.fromkeys(names) if random.Random(f"thin {seed} {name}").random() < share}
    numbers = [number for number, name in enumerate(names) if name in kept]
    if not numbers:
        raise WorkloadError(f"{workload.name}: thinning to {share:g} leaves no session")
    note = f"thinned to {len(kept):,} of {len(set(names)):,} sessions"
    return replace(workload, requests=select(workload.requests, numbers), notes=(*workload.notes, note))


def sessions_of(workload: Workload) -> list[str]:
    """Name each request's session, as in the trace or by the first block of its prompt that few requests have."""
    uses = Counter(id for request in workload for id in request.hash_ids)
    limit = max(COMMON * len(workload), 1)
    names = []
    for number, request in enumerate(workload):
        own = next((id for id in request.hash_ids if uses[id] <= limit), None)
        names.append(request.session or (f"request {number}" if own is None else f"block {own}"))
    return names
