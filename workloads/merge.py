"""Merge workloads into one."""

from collections.abc import Sequence

import msgspec

from workloads.blocks import chained, reblocked
from workloads.request import Request
from workloads.workload import Workload


def merge_workloads(workloads: Sequence[Workload], *, is_shared: bool = False) -> Workload:
    """Overlay workloads in time, in the smallest of their block sizes.

    Args:
        workloads: the workloads to merge.
        is_shared: whether equal ids are equal blocks (parts of one trace); otherwise the workloads share nothing.
    """
    size = min(workload.block_size for workload in workloads)
    merged: list[tuple[float, int, int, Request]] = []
    offset = 0
    for source, workload in enumerate(reblocked(workload, size) for workload in workloads):
        largest = max((id for request in workload for id in request.hash_ids), default=-1)
        for number, request in enumerate(workload):
            ids = request.hash_ids if is_shared else tuple(id + offset for id in request.hash_ids)
            session = f"{source}:{request.session}" if request.session and not is_shared else request.session
            if request.media and not is_shared:
                media = tuple(msgspec.structs.replace(item, id=f"{source}:{item.id}") for item in request.media)
                request = msgspec.structs.replace(request, media=media)
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
    name = " + ".join(workload.name for workload in workloads)
    return chained(Workload(name, size, requests, notes, all(workload.knows_prefixes for workload in workloads)))
