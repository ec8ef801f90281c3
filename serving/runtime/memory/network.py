"""What the nodes of a memory network share: who listens, what is connected, and which ways are blocked.

    network = Network(random.Random(7))
    worker = network.node("worker")
    asyncio.create_task(main(), context=worker.context())    # in main: RuntimeConfig(discovery_backend="memory")
    network.cut(["worker"], ["discovery"])                   # its lease runs out
    network.heal()

It is driven by the running event loop alone. By default it is perfect and immediate; faults are set and called by
whoever drives it. A paused node is stopped on a virtual loop only (`dynabench/rehearsal/virtual_time/loop.py`): on others,
its messages wait, but its code runs.
"""

import random
from collections.abc import Callable, Iterable
from itertools import product
from typing import Protocol

from serving.runtime.memory.broker import Broker
from serving.runtime.memory.node import Link, Node
from serving.runtime.memory.store import Store

DISCOVERY = "discovery"
"""The node of the server for discovery."""

BROKER = "broker"
"""The node of the server for requests and events, where there is one."""

HIGH_WATER = 10_000
"""Events on their way to one subscriber; beyond that, it misses some."""

Delay = Callable[[str, str, random.Random], float]
"""Returns how long a message takes from one node to another (s); it may draw that."""


def immediate(sender: str, receiver: str, rng: random.Random) -> float:
    """Return 0."""
    return 0.0


class Wire(Protocol):
    """A connection between two nodes."""

    @property
    def ends(self) -> tuple[Node, Node]:
        """The nodes."""
        ...

    def reset(self) -> None:
        """Break; what is on its way is lost."""
        ...

    def end(self, node: Node, *, is_lost: bool) -> None:
        """A node has died; if its machine is lost, nobody hangs up for it."""
        ...


class Listener(Protocol):
    """Who can be reached at an address."""

    node: Node


class Network:
    """See the module."""

    def __init__(self, rng: random.Random, *, delay: Delay = immediate, has_broker: bool = False) -> None:
        """Begin without nodes.

        Args:
            rng: draws delays and which events are lost or repeated.
            delay: of each message; those between two ends of a connection stay in order.
            has_broker: whether requests and events go over a server, as with NATS, instead of directly, as over sockets
                and ZeroMQ.
        """
        self.rng = rng
        self.delay = delay
        self.event_loss = 0.0
        """The share of events that a subscriber misses, as if its connection broke; with a broker, not of durable ones."""
        self.event_repeats = 0.0
        """With a broker: the share of durable events that are sent twice, as their acknowledgement was lost."""
        self.bit_flips = 0.0
        """The share of segments of TCP in which a bit is wrong when they are read, unnoticed by checksums below them."""
        self.high_water = HIGH_WATER
        self.nodes: dict[str, Node] = {}
        """The last node of each name, dead or alive."""
        self.listeners: dict[str, Listener] = {}
        """By address."""
        self.wires: dict[Wire, None] = {}
        self._cuts: set[tuple[str, str]] = set()
        self._blocked: dict[Link, None] = {}
        self.discovery = Store(self.node(DISCOVERY))
        self.broker = Broker(self.node(BROKER)) if has_broker else None

    def node(self, name: str) -> Node:
        """Start a process on the machine of this name, on which none runs.

        Raises:
            ValueError: one does.
        """
        if name in self.nodes and not self.nodes[name].is_dead:
            raise ValueError(f"a node {name} is running; kill it first, or choose another name")
        node = self.nodes[name] = Node(name, self, Node(name, self))
        return node

    def listen(self, address: str, listener: Listener) -> None:
        """Let others reach a process at an address, unless it is dead."""
        if not listener.node.is_dead:
            self.listeners[address] = listener

    def cut(self, senders: Iterable[str], receivers: Iterable[str]) -> None:
        """Lose the way from these nodes to those, silently: messages wait, and are sent again once it is healed."""
        self._cuts.update(product(senders, receivers))

    def partition(self, group: Iterable[str], others: Iterable[str]) -> None:
        """Cut the ways between two groups of nodes, both ways."""
        group, others = list(group), list(others)
        self.cut(group, others)
        self.cut(others, group)

    def mend(self, senders: Iterable[str], receivers: Iterable[str]) -> None:
        """Restore the way from these nodes to those."""
        self._cuts.difference_update(product(senders, receivers))
        self.wake()

    def heal(self) -> None:
        """Restore all ways."""
        self._cuts.clear()
        self.wake()

    def reset(self, one: str, other: str) -> None:
        """Break all connections between two nodes; both sides notice."""
        for wire in list(self.wires):
            if {node.name for node in wire.ends} == {one, other}:
                wire.reset()

    def pause(self, node: Node) -> None:
        """Stop a process: nothing it would do happens, and messages to it wait."""
        node.is_paused = True

    def resume(self, node: Node) -> None:
        """Let a stopped process continue."""
        node.is_paused = False
        self.wake()

    def kill(self, node: Node, *, is_lost: bool = False) -> None:
        """End a process without its doing: its memory is gone.

        Its kernel hangs up for it, unless the whole machine is lost: then others hear nothing, until a process on the
        same machine has started. In both cases its lease runs out later.
        """
        for wire in list(self.wires):
            if node in wire.ends:
                wire.end(node, is_lost=is_lost)
        node.is_dead, node.is_paused = True, False
        node.kernel.is_dead = is_lost
        for address in [address for address, listener in self.listeners.items() if listener.node is node]:
            del self.listeners[address]
        self.wake()

    def delay_s(self, sender: str, receiver: str) -> float:
        """Draw how long a message takes (s)."""
        return self.delay(sender, receiver, self.rng)

    def is_cut(self, hops: Iterable[tuple[str, str]]) -> bool:
        """Return whether a way is cut."""
        return bool(self._cuts) and not self._cuts.isdisjoint(hops)

    def is_lucky(self, share: float) -> bool:
        """Draw whether something happens that does for this share; draw nothing if it never does."""
        return share > 0 and self.rng.random() < share

    def flipped(self, segment: bytes) -> bytes:
        """Return what arrives of a segment: the same, but for one bit of a few."""
        if not segment or not self.is_lucky(self.bit_flips):
            return segment
        place, bit = divmod(self.rng.randrange(8 * len(segment)), 8)
        return segment[:place] + bytes([segment[place] ^ 1 << bit]) + segment[place + 1 :]

    def wait(self, link: Link) -> None:
        """Schedule a link again once something is restored."""
        self._blocked[link] = None

    def wake(self) -> None:
        """Schedule what was blocked, as something was restored."""
        blocked, self._blocked = self._blocked, {}
        for link in blocked:
            link.schedule()
