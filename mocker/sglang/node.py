"""A node of the radix tree."""

from collections.abc import Hashable

from mocker.chain import BlockChain


class Node:
    """Pages `start` to `stop` of a chain, cached."""

    __slots__ = (
        "chain",
        "children",
        "created",
        "host_boundary",
        "is_listed",
        "is_listed_on_host",
        "is_loading",
        "last_use",
        "num_hits",
        "num_host_locks",
        "num_locks",
        "on_device",
        "on_host",
        "parent",
        "priority",
        "start",
        "stop",
        "store",
    )

    def __init__(self, chain: BlockChain, start: int, stop: int, parent: "Node | None", *, priority: int) -> None:
        self.chain = chain
        self.start = start
        self.stop = stop
        self.parent = parent  # None: the root, or evicted
        self.children: dict[Hashable, Node] = {}  # by the name of their first page
        self.num_locks = 0
        self.num_hits = 0
        self.priority = priority
        self.created = 0.0
        self.last_use = 0.0
        self.is_listed = False  # among the candidates for eviction
        # With host memory (`mocker/sglang/hicache/`):
        self.on_device = True
        self.on_host = False
        self.num_host_locks = 0
        self.host_boundary = 0  # the host lock whose nodes begin with this one; 0: none
        self.is_listed_on_host = False
        self.is_loading = False  # with write_back, until its load is known to have ended
        self.store: object = None  # the copy to the host that is not known to have ended

    @property
    def num_pages(self) -> int:
        """Count its pages."""
        return self.stop - self.start

    @property
    def is_evictable(self) -> bool:
        """Whether it is a leaf that nobody uses."""
        return not self.children and self.num_locks == 0 and self.parent is not None

    def __repr__(self) -> str:
        return f"Node({self.start}:{self.stop}, locks={self.num_locks}, children={len(self.children)})"
