"""Alibaba's Qwen-Bailian: timestamps in s, unchained ids of 16 tokens each, chats linked by parent."""

from collections.abc import Iterator
from typing import IO

import msgspec

from workloads.formats.format import Format, has, json_priority
from workloads.request import Request
from workloads.source import Source
from workloads.workload import Workload


def _read(source: Source) -> Iterator[Request]:
    roots: dict[str, str] = {}
    for row in source.objects():
        chat, parent = row.text("chat_id"), row.text("parent_chat_id", "-1")
        roots[chat] = session = roots.get(parent, parent) if parent != "-1" else chat
        sizes = source.sizes(row, "input_length", "output_length")
        if sizes is None:
            continue
        ids = source.namer.chained(row.block_ids(sizes[0], source.namer.block_size))
        yield Request(row.seconds("timestamp", unit="s"), *sizes, ids, session, priority=row.priority())


def _write(workload: Workload, file: IO[bytes]) -> None:
    last: dict[str, tuple[int, int]] = {}
    for place, request in enumerate(workload):
        parent, turn = last.get(request.session, (-1, 0)) if request.session else (-1, 0)
        row = {
            "chat_id": place,
            "parent_chat_id": parent,
            "timestamp": round(request.arrival_s, 6),
            "input_length": request.input_length,
            "output_length": request.output_length,
            "type": "text",
            "turn": turn + 1,
            "hash_ids": request.hash_ids,
            **json_priority(request),
        }
        last[request.session] = (place, turn + 1)
        file.write(msgspec.json.encode(row) + b"\n")


FORMAT = Format(
    name="bailian",
    description="Alibaba Qwen-Bailian JSONL: chat_id, parent_chat_id, timestamp (s), hash_ids of 16 tokens",
    is_like=has("chat_id", "hash_ids"),
    read=_read,
    write=_write,
    block_size=16,
    time_unit="s",
    keeps=frozenset({"times", "sharing", "names", "priorities"}),
)
