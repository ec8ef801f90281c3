"""Which leaf of the radix tree is evicted first."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Final

from mocker.sglang.config import EvictionPolicy
from mocker.sglang.node import Node

Rank = tuple[float, float]
NUM_HITS_TO_STAY: Final = 2
"""With slru, leaves with fewer hits go first."""


def by_last_use(node: Node) -> Rank:
    """Rank the least recently used first."""
    return node.last_use, 0.0


def by_hits(node: Node) -> Rank:
    """Rank the least often hit first."""
    return node.num_hits, node.last_use


def by_creation(node: Node) -> Rank:
    """Rank the oldest first."""
    return node.created, 0.0


def by_late_creation(node: Node) -> Rank:
    """Rank the youngest first."""
    return -node.created, 0.0


def by_late_use(node: Node) -> Rank:
    """Rank the most recently used first."""
    return -node.last_use, 0.0


def by_segment(node: Node) -> Rank:
    """Rank those that were hit only once first."""
    return int(node.num_hits >= NUM_HITS_TO_STAY), node.last_use


def by_priority(node: Node) -> Rank:
    """Rank the least important first."""
    return node.priority, node.last_use


RANKS: dict[EvictionPolicy, Callable[[Node], Rank]] = {
    "lru": by_last_use,
    "lfu": by_hits,
    "fifo": by_creation,
    "filo": by_late_creation,
    "mru": by_late_use,
    "slru": by_segment,
    "priority": by_priority,
}


class Leaves:
    """The candidates for eviction, the first by rank at the front.

    A candidate stays listed while it is used, and its rank may change meanwhile. Ranks only rise, except with mru, so it
    is enough to look again at the candidate in front: it goes back if its rank has risen, and leaves the list if it is in
    use. It is listed again when it is no longer used.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._rank = RANKS[policy]
        self._is_falling = policy == "mru"
        self._heap: list[tuple[Rank, int, Node]] = []
        self._num_listed = 0

    def list(self, node: Node) -> None:
        """Add a leaf that nobody uses."""
        if not node.is_listed:
            node.is_listed = True
            self._push(node)

    def _push(self, node: Node) -> None:
        self._num_listed += 1
        heappush(self._heap, (self._rank(node), self._num_listed, node))

    def take(self) -> Node | None:
        """Remove and return the first candidate that nobody uses."""
        if self._is_falling:
            self._rank_again()
        heap = self._heap
        while heap:
            rank, _, node = heappop(heap)
            if not self._may_go(node):
                self._forget(node)
            elif self._rank(node) != rank:
                self._push(node)
            else:
                self._forget(node)
                return node
        return None

    def _may_go(self, node: Node) -> bool:
        return node.is_evictable

    def _forget(self, node: Node) -> None:
        node.is_listed = False

    def _rank_again(self) -> None:
        nodes = [node for _, _, node in self._heap]
        self._heap = []
        for node in nodes:
            self._push(node)
