"""Transfers between ranks that share links, as flows of a fluid: no packets, no blocks, no clock.

    rank 0 --egress--> [node --> [rack -->   -->] rack -->] node --ingress--> rank 3

A rank's own storage is reached by itself alone, over no other link; storage that ranks share, over their ingress and egress.

A transfer first waits for its latency, without using a link. Then it moves at the rate that max-min fairness gives it: no
flow can be faster without making one slower that is as slow or slower (`flows.py`). Rates change only when a flow begins
or ends, and only of flows that share links with it, directly or through others.

    start --> waits --> moves --> ended         a transfer that is known whole
                        moves <--> idle         one that is extended; idle while all that it was given is sent

The driver keeps an appointment at `next_s()`, makes it again after each call that changes something, and asks `advance`
what has ended. Of transfers that end at one instant, the one that started first comes first.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from dynabench.deployment.transfer import TransferConfig
from dynabench.virtual.flows import Flow, Link, Path, fair_rates

Key = Hashable
"""What names a transfer."""


class Use(NamedTuple):
    """Shares of what could have been sent and received that were."""

    egress: float
    ingress: float


class Utilisation(NamedTuple):
    """What was used of the links of all ranks, by their numbers, and of nodes and racks if these are limited."""

    ranks: list[Use]
    nodes: list[Use]
    racks: list[Use]
    storages: list[Use]
    """In the order in which they were connected; egress is what was read."""


class Links:
    """The links of ranks, and the transfers under way on them."""

    def __init__(self, config: TransferConfig) -> None:
        self._config = config
        self._places: list[_Place] = []
        self._nodes: list[_Port] = []
        self._racks: list[_Port] = []
        self._storages: list[tuple[_Port, int | None]] = []  # and whose they are
        self._num_gpus_left = 0  # on the last node
        self._paths: dict[tuple[int, int], Path] = {}
        self._flows: dict[Key, Flow] = {}
        self._posted: list[tuple[float, int, Flow, float, bool]] = []  # bytes that will begin to move
        self._ends: list[tuple[float, int, Path]] = []  # an entry counts if it is still its path's `end_s`
        self._ended: list[tuple[float, int, Key]] = []  # not yet asked for
        self._num_started = 0
        self._num_posted = 0

    def add_rank(self, num_gpus: int, now: float = 0.0) -> None:
        """Connect a rank; they are numbered as they come."""
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
        """Connect storage that is read and written at so many bytes/s, a rank's own or of all; return its number, below 0."""
        self._storages.append((_Port(Link(bandwidth), Link(bandwidth), now), owner))
        return -len(self._storages)

    @property
    def is_limited(self) -> bool:
        """Whether what a rank sends and receives is."""
        return self._config.gpu_bandwidth < math.inf

    def bandwidth(self, source: int, target: int) -> float:
        """Return what a transfer between two ranks gets while it is alone (bytes/s)."""
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
            key: names it until it has ended or is dropped.
            now: the time (s).
            source: the rank that sends.
            target: the rank that receives.
            num_bytes: what is sent now.
            num_blocks: what is posted before the first byte, at `block_us` each.
            is_last: whether that is all; otherwise `extend` sends more.
            num_bytes_ahead: what was sent before, as layers are during the prefill; it only counts in `utilisation`, from now on.
            latency_s: fixed cost before the first byte (default: that of transfers between ranks).
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
        """Send more with a transfer under way; latencies overlap, but blocks are posted one after the other."""
        flow = self._flows[key]
        flow.posted_s = max(now, flow.posted_s) + num_blocks * self._config.block_s
        begin = flow.posted_s + flow.latency_s
        heappush(self._posted, (begin, self._num_posted, flow, num_bytes, is_last))
        self._num_posted += 1
        self._settle(now)

    def drop(self, key: Key, now: float) -> float:
        """End a transfer before its time; what has ended but was not asked for is forgotten.

        Returns:
            the bytes that it was still to send; infinity if it waited for its first.
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
        """Return when something happens next (s): bytes begin to move, or are all sent; or when what was not asked for did."""
        next_s = min(self._ended)[0] if self._ended else self._next_event()
        return None if next_s == math.inf else next_s

    def advance(self, now: float) -> list[Key]:
        """Return the transfers that have ended by now, in order."""
        self._settle(now)
        ended = sorted(entry for entry in self._ended if entry[0] <= now)
        self._ended = [entry for entry in self._ended if entry[0] > now]
        return [key for _, _, key in ended]

    def utilisation(self, now: float) -> Utilisation:
        """Return what was used of each link from when it was connected until now."""
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
        """Return the path from rank to rank; links of a node or rack that both are in are not on it."""
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
        """Let happen what does until now, each at its time."""
        while (time := self._next_event()) <= now:
            touched = self._end_flows(time)
            touched += self._begin_flows(time)
            self._share(touched, time)

    def _end_flows(self, time: float) -> list[Link]:
        """Take off the links what is sent by now; return these links."""
        touched: list[Link] = []
        while self._ends and self._ends[0][0] == time:
            _, _, path = heappop(self._ends)
            if path.end_s == time:
                touched += path.links
                for flow in path.finish(time):
                    self._end(flow, time)
        return touched

    def _begin_flows(self, time: float) -> list[Link]:
        """Put on the links what begins to move now; return these links."""
        touched: list[Link] = []
        while self._posted and self._posted[0][0] == time:
            _, _, flow, num_bytes, is_last = heappop(self._posted)
            if self._flows.get(flow.key) is not flow:
                continue  # dropped
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
        """Share out the links again on which a flow has begun or ended."""
        for path, rate in fair_rates(touched):
            if rate != path.rate or path.end_s == math.inf:
                path.settle(now)
                path.rate, path.end_s = rate, now + path.num_left / rate
                heappush(self._ends, (path.end_s, path.number, path))


@dataclass(slots=True, eq=False)
class _Port:
    """Both directions of a rank, a node or a rack."""

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
    """Where a rank is."""

    rank: _Port
    node: _Port
    rack: _Port
