"""Fluid flows over links of limited capacity, at max-min fair rates.

    flow --+
    flow --+--> path --> link, link, ...        a link is on several paths
    flow --+

All flows on a path have the same rate, so the path stores it. `sent` counts the bytes sent to each flow so far, and a
flow is done when `sent` reaches its `until`. The cost of finding the rates thus depends on the number of paths in use,
not of flows.
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
    """Bytes moved, up to the time at which its paths were last settled."""
    paths: "dict[Path, None]" = field(default_factory=dict)
    """The paths with moving flows."""
    num_moving: int = 0
    room: float = 0.0
    """Used while rates are computed: capacity that is not assigned yet ..."""
    num_open: int = 0
    """... and the number of flows without a rate."""


@dataclass(slots=True, eq=False)
class Path:
    """The links from one rank to another, and the flows that use them."""

    number: int
    links: list[Link]
    num_moving: int = 0
    rate: float = 0.0
    """The rate of each flow (bytes/s)."""
    sent: float = 0.0
    """Bytes sent to each flow since the path was last idle, as of `settled_s`."""
    settled_s: float = 0.0
    end_s: float = inf
    """When the first flow will have all its bytes; infinite until it is computed again."""
    untils: "list[tuple[float, int, Flow]]" = field(default_factory=list)
    """A heap; an entry is valid while it matches its flow's `until`."""

    @property
    def bandwidth(self) -> float:
        """The rate of a flow that is alone (bytes/s)."""
        return min(link.capacity for link in self.links)

    @property
    def num_left(self) -> float:
        """Bytes until the first flow has all its bytes."""
        while self.untils[0][0] != self.untils[0][2].until:
            heappop(self.untils)
        return max(self.untils[0][0] - self.sent, 0.0)

    def add(self, flow: "Flow", num_bytes: float) -> None:
        """Add bytes to a flow, after `settle`."""
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
        """Count the bytes moved until now."""
        if self.num_moving and now > self.settled_s:
            self._send(self.rate * (now - self.settled_s))
        self.settled_s = now

    def finish(self, now: float) -> "list[Flow]":
        """Return the moving flows that have all their bytes now, which is `end_s`."""
        self._send(self.num_left)
        self.sent = reached = self.untils[0][0]  # exactly: a sum may differ in the last digit
        self.settled_s = now
        finished = []
        while self.untils and self.untils[0][0] == reached:
            until, _, flow = heappop(self.untils)
            if flow.until == until:
                finished.append(flow)
                self.leave(flow)
        return finished

    def leave(self, flow: "Flow") -> None:
        """Stop sending to a flow, after `settle`."""
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
    """The transfer of one key."""

    key: Hashable
    number: int
    path: Path
    latency_s: float = 0.0
    until: float = inf
    """The path's `sent` at which the flow has all its bytes; infinite while the flow waits or is idle."""
    posted_s: float = -inf
    """When its last blocks are posted."""
    is_whole: bool = False
    """Whether no more bytes will be added."""

    @property
    def is_moving(self) -> bool:
        """Whether it uses its path."""
        return self.until < inf


def fair_rates(touched: Iterable[Link]) -> list[tuple[Path, float]]:
    """Return the rate of each flow (bytes/s), by path, for the paths over these links and all connected links.

    Max-min fairness by progressive filling: all rates rise together until a link is full. The flows on that link keep
    their rate, and the others continue to rise.
    """
    links = _connected(touched)
    if all(len(link.paths) == 1 for link in links):  # the common case: paths without shared links
        paths = dict.fromkeys(path for link in links for path in link.paths)
        return [(path, path.bandwidth / path.num_moving) for path in paths]
    return _fill(links)


def _connected(links: Iterable[Link]) -> list[Link]:
    """Return the links in use, and those that share flows with them, directly or through others."""
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
    # The level at which a link is full can only rise while other links fill up, so an entry is a lower bound.
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
