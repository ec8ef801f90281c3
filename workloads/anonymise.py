"""Make a workload anonymous."""

from dataclasses import replace

import msgspec

from workloads.workload import Workload


def anonymise(workload: Workload) -> Workload:
    """Keep only lengths, times and sharing: number ids, sessions, adapters and media in order of appearance, and drop texts."""
    ids: dict[int, int] = {}
    sessions: dict[str, str] = {}
    adapters: dict[str, str] = {}
    items: dict[str, str] = {}
    requests = []
    for request in workload:
        named = tuple(ids.setdefault(id, len(ids)) for id in request.hash_ids)
        session = sessions.setdefault(request.session, str(len(sessions))) if request.session else ""
        adapter = adapters.setdefault(request.adapter, f"adapter-{len(adapters)}") if request.adapter else ""
        kept = msgspec.structs.replace(request, hash_ids=named, session=session, adapter=adapter)
        media = tuple(
            msgspec.structs.replace(item, id=items.setdefault(item.id, f"item-{len(items)}")) for item in request.media
        )
        requests.append(msgspec.structs.replace(kept, media=media, content=None, extra_body=None))
    return replace(workload, requests=requests, notes=(*workload.notes, "anonymised"))
