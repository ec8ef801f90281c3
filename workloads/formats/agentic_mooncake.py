"""AISimulate's agentic Mooncake, version 2: a header, then requests that wait for others by name.

`{"schema": "dynamo.agentic_mooncake", "version": 2, "block_size": 64, "hash_id_scope": "local", ...}`
`{"request_id", "play_id", "session_id", "input_length", "output_length", "hash_ids", "not_before_ms", "dependencies"}`
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workloads.formats import graph
from workloads.formats.format import Format
from workloads.request import Request
from workloads.row import Row
from workloads.source import Source, objects_of

SCHEMA, VERSION = "dynamo.agentic_mooncake", 2
TRIGGERS = ("dispatch", "completion")
TURNED = "priorities, of which the highest goes first in Dynamo: their signs are changed, so that the lowest does, as in vLLM"
OTHER = "requests with strict_priority or policy_class, which only Dynamo's router knows: ignored"


def _block_size(path: Path) -> int:
    return _checked(next(objects_of(path), Row({}, str(path)))).count("block_size")


def _checked(header: Row) -> Row:
    """Return a header that can be read.

    Raises:
        WorkloadError: it is of another version.
    """
    for name, expected in (("schema", SCHEMA), ("version", VERSION), ("hash_id_scope", "local")):
        if header.values.get(name) != expected:
            raise header.fail(f"{name} must be {expected!r}, not {header.values.get(name)!r}")
    return header


def _read(source: Source) -> Iterator[Request]:
    nodes: list[graph.GraphNode] = []
    for path in source.files:
        rows = objects_of(path)
        size = _checked(header := next(rows, Row({}, str(path)))).count("block_size")
        if size != source.namer.block_size:
            raise header.fail(f"block_size is {size}, not {source.namer.block_size}")
        nodes += [_node(row, source) for row in rows]
    return graph.in_turn(nodes, source, is_recorded=False)


def _node(row: Row, source: Source) -> graph.GraphNode:
    play, length = row.text("play_id"), row.count("input_length", "input_tokens")
    ids = source.namer.renamed(play, row.block_ids(length, source.namer.block_size))
    if row.has("strict_priority") or row.has("policy_class"):
        source.count(OTHER)
    if priority := -row.priority():
        source.count(TURNED)
    request = Request(
        row.seconds("not_before_ms"),
        length,
        source.output(row, "output_length" if row.has("output_length") else "output_tokens"),
        ids,
        f"{play}/{row.text('session_id')}",
        priority=priority,
    )
    waits = [_wait(wait) for wait in (row.items("dependencies") if row.has("dependencies") else [])]
    return graph.GraphNode(row.text("request_id"), row, request, waits)


def _wait(row: Row) -> graph.GraphWait:
    trigger = row.text("trigger")
    if trigger not in TRIGGERS:
        raise row.fail(f"trigger must be {' or '.join(TRIGGERS)}, not {trigger!r}")
    return graph.GraphWait(row.text("request_id"), row.seconds("delay_ms", default=0), trigger == "dispatch")


def _is_like(first: dict[str, Any] | None, start: bytes) -> bool:
    return first is not None and first.get("schema") == SCHEMA


FORMAT = Format(
    name="agentic-mooncake",
    description="AISimulate's agentic Mooncake v2: a header, then requests that wait for others (dependencies, delay_ms)",
    tried="tried on agentic-mooncake.jsonl in dynamo/replay/tests of ai-dynamo 1.6.1 (PyPI)",
    is_like=_is_like,
    read=_read,
    block_size=None,
    block_size_of=_block_size,
)
