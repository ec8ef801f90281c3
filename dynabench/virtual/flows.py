"""Flows of a fluid over links of limited capacity, at max-min fair rates.

    flow --+
    flow --+--> path --> link, link, ...        a link is on several paths
    flow --+

All flows on a path have one rate, so it is kept there: `sent` is what each of them was sent so far, and a flow is done when
that reaches its `until`. What a rate costs to find depends on the paths in use, then, not on the flows.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from math import inf


@dataclass(slots=True, eq=False)
class Link:
    """One direction of a port."""

    capacity: float
    """Bytes/s; may be infinite."""
    moved: float = 0.0
    """Bytes, up to when its paths were last settled."""
    paths: "dict[Path, None]" = field(default_factory=dict)
    """Those with flows that move."""
    num_moving: int = 0
    room: float = 0.0
    """While rates are found: capacity that is not given away yet ..."""
    num_open: int = 0
    """... and the flows without a rate."""


@dataclass(slots=True, eq=False)
class Path:
    """The links from one rank to another, and the flows that move there."""

    number: int
    links: list[Link]
    num_moving: int = 0
    rate: float = 0.0
    """Of each flow (bytes/s)."""
    sent: float = 0.0
    """What each flow was sent since the path was last idle (bytes), as of `settled_s`."""
    settled_s: float = 0.0
    end_s: float = inf
    """When a flow has been sent all it was given; infinite until it is found again."""
    untils: "list[tuple[float, int, Flow]]" = field(default_factory=list)
    """A heap; an entry counts if it is still its flow's `until`."""

    @property
    def bandwidth(self) -> float:
        """What a flow gets while it is alone (bytes/s)."""
        return min(link.capacity for link in self.links)

    @property
    def num_left(self) -> float:
        """Bytes until a flow has been sent all it was given."""
        while self.untils[0][0] != self.untils[0][2].until:
            heappop(self.untils)
        return max(self.untils[0][0] - self.sent, 0.0)

    def add(self, flow: "Flow", num_bytes: float) -> None:
        """Give a flow bytes, after `settle`."""
        if flow.is_moving:
            flow.until += num_bytes
        else:
            if not self.num_moving:
                for link in self.links:
                    link.paths[self] = None
            flow.until = self.sent + num_bytes
            self._count(1)
        self.end_s = inf
        heappush(self.untils, (flow.until, flow.number, flow))

    def settle(self, now: float) -> None:
        """Count what moved."""
        if self.num_moving and now > self.settled_s:
            self._send(self.rate * (now - self.settled_s))
        self.settled_s = now

    def finish(self, now: float) -> "list[Flow]":
        """Return the flows, of those moving, that have been sent all they were given by now, which is `end_s`."""
        self._send(self.num_left)
        self.sent = reached = self.untils[0][0]  # exactly: a sum may be a digit short
        self.settled_s = now
        finished = []
        while self.untils and self.untils[0][0] == reached:
            until, _, flow = heappop(self.untils)
            if flow.until == until:
                finished.append(flow)
                self.leave(flow)
        return finished

    def leave(self, flow: "Flow") -> None:
        """Send a flow no more, after `settle`."""
        flow.until = inf
        self.end_s = inf
        self._count(-1)
        if not self.num_moving:
            self.untils.clear()
            self.sent = self.rate = 0.0  # so that sums do not lose digits
            for link in self.links:
                del link.paths[self]

    def _count(self, change: int) -> None:
        self.num_moving += change
        for link in self.links:
            link.num_moving += change

    def _send(self, num_bytes: float) -> None:
        self.sent += num_bytes
        for link in self.links:
            link.moved += num_bytes * self.num_moving


@dataclass(slots=True, eq=False)
class Flow:
    """What is sent under one key."""

    key: Hashable
    number: int
    path: Path
    latency_s: float = 0.0
    until: float = inf
    """What its path sends of each flow until it was sent all it was given (bytes); infinite while it waits or is idle."""
    posted_s: float = -inf
    """When its last blocks are posted."""
    is_whole: bool = False
    """Whether nothing more will be given."""

    @property
    def is_moving(self) -> bool:
        """Whether it uses its path."""
        return self.until < inf


def fair_rates(touched: Iterable[Link]) -> list[tuple[Path, float]]:
    """Return what each flow on a path gets (bytes/s), of the paths over these links and those that they share links with.

    Max-min fairness by progressive filling: all rates rise together until a link is full; its flows keep theirs, and the
    others rise on.
    """
    links = _connected(touched)
    if all(len(link.paths) == 1 for link in links):  # the common case: paths that share with none
        paths = dict.fromkeys(path for link in links for path in link.paths)
        return [(path, path.bandwidth / path.num_moving) for path in paths]
    return _fill(links)


def _connected(links: Iterable[Link]) -> list[Link]:
    """Return those links that are in use, and those that share flows with them, directly or through others."""
    found = {link: None for link in links if link.num_moving}
    queue = list(found)
    for link in queue:
        for path in link.paths:
            for other in path.links:
                if other not in found:
                    found[other] = None
                    queue.append(other)
    return queue


def _fill(links: list[Link]) -> list[tuple[Path, float]]:
    for link in links:
        link.room, link.num_open = link.capacity, link.num_moving
    # Where a link fills up only rises, as others fill up: an entry is a lower bound.
    fills = [(link.capacity / link.num_moving, place, link) for place, link in enumerate(links)]
    heapify(fills)
    rates: dict[Path, float] = {}
    while fills:
        bound, place, full = fills[0]
        if not full.num_open:
            heappop(fills)
            continue
        rate = full.room / full.num_open
        if rate > bound:
            heapreplace(fills, (rate, place, full))
            continue
        for path in full.paths:
            if path not in rates:
                rates[path] = rate
                for link in path.links:
                    link.num_open -= path.num_moving
                    if rate < inf:
                        link.room -= rate * path.num_moving
    return list(rates.items())
