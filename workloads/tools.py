"""Trace tools that keep what prompts share: thin by session, scale lengths, merge, anonymise."""

import random
from collections import Counter
from collections.abc import Sequence

import msgspec

from workloads.formats import reblocked
from workloads.request import Request, Workload, WorkloadError, select

COMMON = 0.01
"""An id that more than this share of the requests have is no session's own."""


def thin(workload: Workload, share: float, seed: int = 0) -> Workload:
    """Keep a share of the sessions, whole; where the trace names none, requests with a rare prefix in common are one.

    Arrival times stay, so the rate falls with the share; reuse within a session keeps its intervals.
    """
    names = sessions_of(workload)
    kept = {name for name in dict.fromkeys(names) if random.Random(f"thin {seed} {name}").random() < share}
    numbers = [number for number, name in enumerate(names) if name in kept]
    if not numbers:
        raise WorkloadError(f"{workload.name}: thinning to {share:g} leaves no session")
    note = f"thinned to {len(kept):,} of {len(set(names)):,} sessions"
    return Workload(workload.name, workload.block_size, select(workload.requests, numbers), (*workload.notes, note))


def sessions_of(workload: Workload) -> list[str]:
    """Name each request's session: as the trace does, or by the first block of its prompt that few requests have."""
    uses = Counter(id for request in workload for id in request.hash_ids)
    limit = max(COMMON * len(workload), 1)
    names = []
    for number, request in enumerate(workload):
        own = next((id for id in request.hash_ids if uses[id] <= limit), None)
        names.append(request.session or (f"request {number}" if own is None else f"block {own}"))
    return names


def scale_lengths(workload: Workload, isl: float, osl: float) -> Workload:
    """Make prompts and answers longer or shorter; prompts by letting each id stand for more or fewer tokens.

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
    return Workload(workload.name, size, requests, tuple(notes))


def merge(workloads: Sequence[Workload], *, is_shared: bool = False) -> Workload:
    """Lay workloads over each other in time, in the smallest of their block sizes.

    Args:
        workloads: what to merge.
        is_shared: equal ids are equal blocks (parts of one trace); otherwise the workloads share nothing.
    """
    size = min(workload.block_size for workload in workloads)
    merged: list[tuple[float, int, int, Request]] = []
    offset = 0
    for source, workload in enumerate(reblocked(workload, size) for workload in workloads):
        largest = max((id for request in workload for id in request.hash_ids), default=-1)
        for number, request in enumerate(workload):
            ids = request.hash_ids if is_shared else tuple(id + offset for id in request.hash_ids)
            session = f"{source}:{request.session}" if request.session and not is_shared else request.session
            merged.append(
                (request.arrival_s, source, number, msgspec.structs.replace(request, hash_ids=ids, session=session))
            )
        offset += 0 if is_shared else largest + 1
    merged.sort(key=lambda entry: entry[:3])
    places = {(source, number): place for place, (_, source, number, _) in enumerate(merged)}
    requests = [
        msgspec.structs.replace(request, after=tuple(places[source, parent] for parent in request.after))
        for _, source, _, request in merged
    ]
    notes = tuple(f"{workload.name}: {note}" for workload in workloads for note in workload.notes)
    return Workload(" + ".join(workload.name for workload in workloads), size, requests, notes)


def anonymise(workload: Workload) -> Workload:
    """Leave lengths, times and sharing, and nothing else: ids and sessions numbered as they come, no texts."""
    ids: dict[int, int] = {}
    sessions: dict[str, str] = {}
    requests = []
    for request in workload:
        named = tuple(ids.setdefault(id, len(ids)) for id in request.hash_ids)
        session = sessions.setdefault(request.session, str(len(sessions))) if request.session else ""
        requests.append(msgspec.structs.replace(request, hash_ids=named, session=session, content=None))
    return Workload(workload.name, workload.block_size, requests, (*workload.notes, "anonymised"))


def _scaled(request: Request, before: int, size: int) -> int:
    full = len(request.hash_ids) - 1
    rest = request.input_length - full * before
    return full * size + max(round(rest * size / before), 1)
