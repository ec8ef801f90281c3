"""Requests that wait for others by name, as agents' traces have them, in the terms of a workload.

on completion    a ──────── b          b waits for a, as in a workload
on dispatch      a ────────            b waits for what a waits for, and then for a's delay and its own;
                  └─ b ────            if a waits for nothing, b has a time of its own
"""

import graphlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from workloads.request import Request
from workloads.row import Row
from workloads.source import Source

DIFFERENT = "requests that wait for several others, each with its own delay: sent the shortest after the last of them"
NOT_BEFORE = "times of requests that wait for others, which are sent when those have ended"


class GraphWait(NamedTuple):
    """What a request waits for."""

    name: str
    delay_s: float
    is_for_dispatch: bool = False
    """Whether it waits for the other request to be sent, not for its end."""


@dataclass(slots=True)
class GraphNode:
    """A request with a name."""

    name: str
    row: Row
    request: Request
    """Without what it waits for; it is sent at its arrival time at the earliest."""
    waits: list[GraphWait] = field(default_factory=list)
    ends: dict[str, float] = field(default_factory=dict)
    """The requests after whose end it is sent, and how long after (s)."""
    start_s: float = 0.0
    """When it is sent, if it waits for none."""


def in_turn(nodes: Sequence[GraphNode], source: Source, *, is_recorded: bool) -> Iterator[Request]:
    """Yield the requests, each after those it waits for.

    If they were recorded, the delay after the last of them to end is the shortest, and requests that wait have no time
    of their own. What an author wrote may mean more, which is counted.

    Raises:
        WorkloadError: a name is not unique or not known, or requests wait for each other.
    """
    known: dict[str, GraphNode] = {}
    for node in nodes:
        if known.setdefault(node.name, node) is not node:
            raise node.row.fail(f"a second request named {node.name!r}")
    for node in nodes:
        if missing := next((wait.name for wait in node.waits if wait.name not in known), None):
            raise node.row.fail(f"waits for {missing!r}, which is not in the file")
    places: dict[str, int] = {}
    for name in _order(nodes, known):
        node = known[name]
        _resolve(node, known)
        if not is_recorded and len(set(node.ends.values())) > 1:
            source.count(DIFFERENT)
        if not is_recorded and node.ends and node.start_s > 0:
            source.count(NOT_BEFORE)
        after, delay_s = tuple(places[name] for name in node.ends), min(node.ends.values(), default=0.0)
        yield msgspec.structs.replace(node.request, arrival_s=node.start_s, after=after, delay_s=delay_s)
        places[name] = len(places)


def _order(nodes: Sequence[GraphNode], known: dict[str, GraphNode]) -> list[str]:
    sorter = graphlib.TopologicalSorter({node.name: [wait.name for wait in node.waits] for node in nodes})
    try:
        return list(sorter.static_order())
    except graphlib.CycleError as error:
        names = error.args[1]
        raise known[names[0]].row.fail(f"requests wait for each other: {', '.join(names[1:])}") from None


def _resolve(node: GraphNode, known: dict[str, GraphNode]) -> None:
    """Find out after whose end a request is sent, or when, once that is known of all others it names."""
    node.start_s = node.request.arrival_s
    for wait in node.waits:
        other = known[wait.name]
        ends = other.ends if wait.is_for_dispatch else {wait.name: 0.0}
        for name, delay_s in ends.items():
            node.ends[name] = max(node.ends.get(name, 0.0), delay_s + wait.delay_s)
        if not ends:
            node.start_s = max(node.start_s, other.start_s + wait.delay_s)
