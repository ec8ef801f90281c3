"""Copies of nodes between device and host memory.

asked for      queued        in flight                        over               known
by insert  --> `Store` --+
                         +--> one copy for all that are  --> `is_over` --> at the start of the next step,
by a load  --> `Load` ---+    queued when SGLang flushes                    in order: locks go

A store begins when the KV that it copies is computed.
"""

from mocker.sglang.node import Node
from mocker.tiers.copies import Copy


class Store:
    """A node that is copied to the host, and locked until that is known to have ended."""

    __slots__ = ("node", "pieces")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.pieces = [node]
        """The nodes that it has been split into since, the first page first."""


class HostLock:
    """What keeps a node from being evicted from the host, and all that is split off before it."""

    __slots__ = ("boundary", "node")

    def __init__(self, node: Node, boundary: int) -> None:
        self.node = node
        self.boundary = boundary


class Load:
    """Nodes that are copied to the device, down to this one, which is locked in both places until that is known to have ended."""

    __slots__ = ("host_lock", "node", "num_pages")

    def __init__(self, node: Node, num_pages: int, host_lock: HostLock) -> None:
        self.node = node
        self.num_pages = num_pages
        self.host_lock = host_lock


class NodeCopy(Copy):
    """One copy in a direction, of all nodes that were queued."""

    __slots__ = ("is_over", "loads", "stores")

    def __init__(self, number: int, stores: list[Store], loads: list[Load]) -> None:
        num_pages = sum([piece.num_pages for store in stores for piece in store.pieces])
        num_pages += sum([load.num_pages for load in loads])
        super().__init__(number, num_pages, is_store=bool(stores))
        self.stores = stores
        self.loads = loads
        self.is_over = False
