"""Transfers between ranks that share links, modelled as fluid flows, without packets, blocks or a clock.

    rank 0 --egress--> [node --> [rack -->   -->] rack -->] node --ingress--> rank 3

Only the rank itself reaches its own storage, over no other link. Ranks reach shared storage over their ingress and
egress.

A transfer first waits for its latency, without using a link. Then it moves at its max-min fair rate: no flow can be
faster without slowing down a flow that is as slow or slower (`flows.py`). Rates change only when a flow begins or ends,
and only for flows that share links with it, directly or through others.

    start --> waits --> moves --> ended         a transfer of known size
                        moves <--> idle         an extended one; idle while it has sent all its bytes

The driver schedules an event at `next_s()`, again after each call that changes something, and calls `advance` for the
transfers that have ended. Of those that end at the same instant, the one that started first comes first.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from mocker.network.config import TransferConfig
from mocker.network.flows import Flow, Link, Path, fair_rates

Key = Hashable
"""Identifies a transfer."""


class Use(NamedTuple):
    """The shares of a port's capacity to send and to receive that were used."""

    egress: float
    ingress: float


class Utilisation(NamedTuple):
    """The utilisation of all ranks' links, by rank number, and of nodes and racks if their links are limited."""

    ranks: list[Use]
    nodes: list[Use]
    racks: list[Use]
    storages: list[Use]
    """In the order in which storage was added; egress counts reads."""


class Links:
    """The links of ranks, and the transfers in progress on them."""

    def __init__(self, config: TransferConfig) -> None:
        self._config = config
        self._places: list[_Place] = []
        self._nodes: list[_Port] = []
        self._racks: list[_Port] = []
        self._storages: list[tuple[_Port, int | None]] = []  # with their owners
        self._num_gpus_left = 0  # on the last node
        self._paths: dict[tuple[int, int], Path] = {}
        self._flows: dict[Key, Flow] = {}
        self._posted: list[tuple[float, int, Flow, float, bool]] = []  # bytes that will begin to move
        self._ends: list[tuple[float, int, Path]] = []  # an entry is valid while it matches its path's `end_s`
        self._ended: list[tuple[float, int, Key]] = []  # not yet returned
        self._num_started = 0
        self._num_posted = 0

    def add_rank(self, num_gpus: int, now: float = 0.0) -> None:
        """Add a rank; ranks are numbered in the order of these calls."""
        config = self._config
        if num_gpus > self._num_gpus_left:
            node_size = config.gpus_per_node or num_gpus
            num_nodes = -(-num_gpus // node_size)
            if len(self._nodes) % (config.nodes_per_rack or math.inf) == 0:
                self._racks.append(_Port.of(config.rack_bandwidth_gb_s, now))
            self._nodes.append(_Port.of(config.node_bandwidth_gb_s, now, times=num_nodes))
            self._num_gpus_left = num_nodes * node_size
        self._num_gpus_left -= num_gpus
        port = _Port(Link(config.gpu_bandwidth * num_gpus), Link(config.gpu_bandwidth * num_gpus), now)
        self._places.append(_Place(port, self._nodes[-1], self._racks[-1]))

    def add_storage(self, bandwidth: float, owner: int | None = None, now: float = 0.0) -> int:
        """Add storage with a bandwidth (bytes/s) each way, shared if no rank owns it; return its number, below 0."""
        self._storages.append((_Port(Link(bandwidth), Link(bandwidth), now), owner))
        return -len(self._storages)

    @property
    def is_limited(self) -> bool:
        """Whether the links of ranks are limited."""
        return self._config.gpu_bandwidth < math.inf

    def bandwidth(self, source: int, target: int) -> float:
        """Return the rate of a transfer between two ranks that is alone (bytes/s)."""
        return self._path(source, target).bandwidth

    def start(
        self,
        key: Key,
        now: float,
        *,
        source: int,
        target: int,
        num_bytes: float,
        num_blocks: int = 0,
        is_last: bool = True,
        num_bytes_ahead: float = 0.0,
        latency_s: float | None = None,
    ) -> None:
        """Begin a transfer.

        Args:
            key: identifies it until it has ended or is dropped.
            now: the time (s).
            source: the rank that sends.
            target: the rank that receives.
            num_bytes: the bytes to send now.
            num_blocks: the blocks to post before the first byte, at `block_us` each.
            is_last: whether these are all bytes; otherwise `extend` sends more.
            num_bytes_ahead: bytes that were sent earlier, such as layers during the prefill; they only count in
                `utilisation`, from now on.
            latency_s: fixed cost before the first byte (default: the latency of transfers between ranks).
        """
        assert key not in self._flows, f"transfer {key} is already in progress"
        path = self._path(source, target)
        latency_s = self._config.latency_s if latency_s is None else latency_s
        self._flows[key] = Flow(key, self._num_started, path, latency_s)
        self._num_started += 1
        for link in path.links:
            link.moved += num_bytes_ahead
        self.extend(key, now, num_bytes=num_bytes, num_blocks=num_blocks, is_last=is_last)

    def extend(self, key: Key, now: float, *, num_bytes: float, num_blocks: int = 0, is_last: bool = False) -> None:
        """Add bytes to a transfer in progress; latencies overlap, but blocks are posted one after the other."""
        flow = self._flows[key]
        flow.posted_s = max(now, flow.posted_s) + num_blocks * self._config.block_s
        begin = flow.posted_s + flow.latency_s
        heappush(self._posted, (begin, self._num_posted, flow, num_bytes, is_last))
        self._num_posted += 1
        self._settle(now)

    def drop(self, key: Key, now: float) -> float:
        """End a transfer early; if it has ended but was not returned yet, forget it.

        Returns:
            the bytes that were left to send; infinity if none had moved yet.
        """
        self._settle(now)
        self._ended = [entry for entry in self._ended if entry[2] != key]
        flow = self._flows.pop(key, None)
        if flow is None:
            return 0.0
        if not flow.is_moving:
            return math.inf
        flow.path.settle(now)
        left = flow.until - flow.path.sent
        flow.path.leave(flow)
        self._share(flow.path.links, now)
        return left

    def next_s(self) -> float | None:
        """Return the time of the next event (s): bytes begin to move, a transfer ends, or an unreturned one ended."""
        next_s = min(self._ended)[0] if self._ended else self._next_event()
        return None if next_s == math.inf else next_s

    def advance(self, now: float) -> list[Key]:
        """Return the transfers that have ended by now, in order."""
        self._settle(now)
        ended = sorted(entry for entry in self._ended if entry[0] <= now)
        self._ended = [entry for entry in self._ended if entry[0] > now]
        return [key for _, _, key in ended]

    def utilisation(self, now: float) -> Utilisation:
        """Return the utilisation of each link from when it was added until now."""
        self._settle(now)
        for path in self._paths.values():
            path.settle(now)
        config = self._config
        return Utilisation(
            [place.rank.use(now) for place in self._places],
            [port.use(now) for port in self._nodes] if config.node_bandwidth_gb_s else [],
            [port.use(now) for port in self._racks] if config.rack_bandwidth_gb_s else [],
            [port.use(now) for port, _ in self._storages],
        )

    def _path(self, source: int, target: int) -> Path:
        """Return the path between two ranks; it leaves out the links of a node or rack that both are in."""
        path = self._paths.get((source, target))
        if path is not None:
            return path
        if min(source, target) < 0:
            path = self._paths[source, target] = Path(len(self._paths), self._to_storage(source, target))
            return path
        here, there = self._places[source], self._places[target]
        links = [here.rank.egress, there.rank.ingress]
        if self._config.node_bandwidth_gb_s and here.node is not there.node:
            links += [here.node.egress, there.node.ingress]
        if self._config.rack_bandwidth_gb_s and here.rack is not there.rack:
            links += [here.rack.egress, there.rack.ingress]
        path = self._paths[source, target] = Path(len(self._paths), links)
        return path

    def _to_storage(self, source: int, target: int) -> list[Link]:
        """Return the links between a rank and storage."""
        is_read = source < 0
        storage, owner = self._storages[-1 - min(source, target)]
        ports = [] if owner is not None else [self._places[max(source, target)].rank]
        if self._config.node_bandwidth_gb_s and ports:
            ports.append(self._places[max(source, target)].node)
        if self._config.rack_bandwidth_gb_s and ports:
            ports.append(self._places[max(source, target)].rack)
        return [storage.egress if is_read else storage.ingress, *[p.ingress if is_read else p.egress for p in ports]]

    def _next_event(self) -> float:
        ends, posted = self._ends, self._posted
        while ends and ends[0][0] != ends[0][2].end_s:
            heappop(ends)
        return min(ends[0][0] if ends else math.inf, posted[0][0] if posted else math.inf)

    def _settle(self, now: float) -> None:
        """Process all events until now, each at its time."""
        while (time := self._next_event()) <= now:
            touched = self._end_flows(time)
            touched += self._begin_flows(time)
            self._share(touched, time)

    def _end_flows(self, time: float) -> list[Link]:
        """Remove transfers whose bytes are sent by now; return their links."""
        touched: list[Link] = []
        while self._ends and self._ends[0][0] == time:
            _, _, path = heappop(self._ends)
            if path.end_s == time:
                touched += path.links
                for flow in path.finish(time):
                    self._end(flow, time)
        return touched

    def _begin_flows(self, time: float) -> list[Link]:
        """Add transfers whose bytes begin to move now; return their links."""
        touched: list[Link] = []
        while self._posted and self._posted[0][0] == time:
            _, _, flow, num_bytes, is_last = heappop(self._posted)
            if self._flows.get(flow.key) is not flow:
                continue  # the transfer was dropped
            flow.is_whole = is_last
            if num_bytes:
                flow.path.settle(time)
                flow.path.add(flow, num_bytes)
                touched += flow.path.links
            elif not flow.is_moving:
                self._end(flow, time)
        return touched

    def _end(self, flow: Flow, time: float) -> None:
        if flow.is_whole:
            del self._flows[flow.key]
            self._ended.append((time, flow.number, flow.key))

    def _share(self, touched: list[Link], now: float) -> None:
        """Recompute the rates on links on which a flow has begun or ended."""
        for path, rate in fair_rates(touched):
            if rate != path.rate or path.end_s == math.inf:
                path.settle(now)
                path.rate, path.end_s = rate, now + path.num_left / rate
                heappush(self._ends, (path.end_s, path.number, path))


@dataclass(slots=True, eq=False)
class _Port:
    """Both directions of the links of a rank, a node or a rack."""

    egress: Link
    ingress: Link
    since_s: float

    @classmethod
    def of(cls, gb_s: float | None, now: float, *, times: int = 1) -> "_Port":
        capacity = math.inf if gb_s is None else gb_s * 1e9 * times
        return cls(Link(capacity), Link(capacity), now)

    def use(self, now: float) -> Use:
        """Return the shares of its capacity that were used."""
        if now <= self.since_s:
            return Use(0.0, 0.0)
        could = self.egress.capacity * (now - self.since_s)
        return Use(self.egress.moved / could, self.ingress.moved / could)


class _Place(NamedTuple):
    """The location of a rank."""

    rank: _Port
    node: _Port
    rack: _Port
