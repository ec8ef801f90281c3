"""Dynamo's request traces (DYN_REQUEST_TRACE): a row at the end of each request, with rolling hashes of its prompt.

Requests of agents name their session and its parent. Which request waited for which is known from the times: one that
began after another had ended waits for its end, one that began earlier for its dispatch.

    parent   ── spawns ──────────────────── joins ──     spawns: the last request of the parent that began before the child
                  └─ first ─── last ──────────┘          joins: the first one that began after the child had ended
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workloads.formats import graph
from workloads.formats.format import Format
from workloads.request import Request, WorkloadError
from workloads.row import Row
from workloads.source import Source, objects_of

SCHEMA = b"dynamo.request.trace.v1"
TOOLS = ("tool_end", "tool_error")
IGNORED = "ignored rows of other events than request_end, tool_end and tool_error"
ENDLESS = "requests without total_time_ms or event_time_unix_ms, assumed to end when they begin"
ORPHANED = "sessions whose parent has no requests in the file, sent at their own times"


@dataclass(slots=True)
class _Call:
    """A request as it was recorded; times are in seconds since 1970."""

    node: graph.GraphNode
    start_s: float
    end_s: float

    def wait_for(self, earlier: "_Call") -> None:
        """Let this request be sent as long after the earlier one as it was."""
        is_overlapping = self.start_s < earlier.end_s
        delay_s = self.start_s - (earlier.start_s if is_overlapping else earlier.end_s)
        self.node.waits.append(graph.GraphWait(earlier.node.name, max(delay_s, 0.0), is_overlapping))


def _block_size(path: Path) -> int:
    ends = (row for row in objects_of(path) if row.values.get("event_type") == "request_end")
    if (first := next(ends, None)) is None:
        raise WorkloadError(f"{path}: no request_end row gives trace_block_size")
    return first.object("request").object("replay").count("trace_block_size")


def _read(source: Source) -> Iterator[Request]:
    sessions: dict[str, list[_Call]] = {}
    parents: dict[str, str] = {}
    failed: set[str] = set()
    alone: list[graph.GraphNode] = []
    tools: list[Row] = []
    for row in source.objects():
        event = row.values.get("event_type")
        if event in TOOLS:
            tools.append(row)
        elif event != "request_end":
            source.count(IGNORED)
        elif not row.has("agent_context"):
            alone += [call.node for call in _calls(row, "", source)]
        else:
            context = row.object("agent_context")
            session = context.text("session_id")
            calls = _calls(row, session, source)
            sessions.setdefault(session, []).extend(calls)
            if not calls:
                failed.add(str(row.object("request").values.get("request_id")))
            if context.has("parent_session_id"):
                parents.setdefault(session, context.text("parent_session_id"))
    for calls in sessions.values():
        _chain(calls)
    explicit = _explicit(tools)
    for child, parent in parents.items():
        if sessions[child] and sessions.get(parent):
            _join(sessions[child], sessions[parent], explicit.get(child), failed)
        elif sessions[child]:
            source.count(ORPHANED)
    nodes = alone + [call.node for calls in sessions.values() for call in calls]
    return graph.in_turn(nodes, source, is_recorded=True)


def _calls(row: Row, session: str, source: Source) -> list[_Call]:
    """Return the request of a row: none if it failed."""
    request = row.object("request")
    replay = request.object("replay")
    size = replay.count("trace_block_size")
    if size != source.namer.block_size:
        raise replay.fail(f"trace_block_size is {size}, not {source.namer.block_size}")
    lengths = replay.values | {"output_tokens": request.values.get("output_tokens") or 0}
    sizes = source.sizes(Row(lengths, replay.place), "input_length", "output_tokens")
    if sizes is None:
        return []
    ids = replay.block_ids(sizes[0], size, "input_sequence_hashes")
    start_s = request.seconds("request_received_ms")
    end_s = start_s + request.seconds("total_time_ms", default=0)
    if not request.has("total_time_ms"):
        end_s = row.seconds("event_time_unix_ms", default=start_s * 1000)
        if not row.has("event_time_unix_ms"):
            source.count(ENDLESS)
    sent = Request(start_s, *sizes, source.namer.renamed("", ids), session)
    return [_Call(graph.GraphNode(request.text("request_id"), row, sent), start_s, end_s)]


def _chain(calls: list[_Call]) -> None:
    """Let the requests of a session wait for the one that began before them."""
    calls.sort(key=lambda call: call.start_s)
    for earlier, later in itertools.pairwise(calls):
        later.wait_for(earlier)


def _explicit(tools: Sequence[Row]) -> dict[str, Row]:
    """Return what harnesses said about the session that a tool call started, by that session."""
    said = [row.object("tool") for row in tools if isinstance(row.values.get("tool"), dict)]
    told = [tool.object("claude") for tool in said if isinstance(tool.values.get("claude"), dict)]
    return {one.text("child_session_id"): one for one in told if one.has("child_session_id")}


def _join(child: list[_Call], parent: list[_Call], said: Row | None, failed: set[str]) -> None:
    """Let a session start after the request that spawned it, and its parent go on after it has ended."""
    first, last = child[0], max(child, key=lambda call: call.end_s)
    spawns = [call for call in parent if call.start_s <= first.start_s][-1:]
    joins = [call for call in parent if call.start_s >= last.end_s][:1]
    if said is not None:
        spawns = _named(parent, said, "source_request_id", failed, spawns)
        joins = _named(parent, said, "consumer_request_id", failed, joins)
    for spawn in spawns:
        first.wait_for(spawn)
    for join in joins:
        join.wait_for(last)


def _named(calls: list[_Call], said: Row, name: str, failed: set[str], by_time: list[_Call]) -> list[_Call]:
    """Return the request that a harness named, if it named one; if that one failed, the one that the times suggest.

    Raises:
        WorkloadError: it is not one of the parent's.
    """
    if not said.has(name):
        return []
    found = [call for call in calls if call.node.name == said.text(name)]
    if not found and said.text(name) in failed:
        return by_time
    if not found:
        raise said.fail(f"{name} {said.text(name)!r} is not a request of the parent's session")
    return found


def _is_like(first: dict[str, Any] | None, start: bytes) -> bool:
    return first is not None and "event_type" in first and SCHEMA in start


FORMAT = Format(
    name="dynamo-trace",
    description="Dynamo's request traces (DYN_REQUEST_TRACE): request_end with replay hashes, sessions of agents, tool_end",
    tried="tried on dynamo-standard.jsonl and dynamo-agentic.jsonl in dynamo/replay/tests of ai-dynamo 1.6.1 (PyPI)",
    is_like=_is_like,
    read=_read,
    block_size=None,
    block_size_of=_block_size,
)
