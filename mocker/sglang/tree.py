"""The radix tree: which prefixes are cached.

    root -- pages 0..3 --+-- pages 3..7 -- pages 7..9     a node is a range of pages of a chain; a path is a prefix
                         +-- pages 3..5

A node that a request uses is locked, with all nodes above it. Each use has a time of its own, counted by the tree.
"""

from mocker.chain import BlockChain
from mocker.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from mocker.sglang.config import EvictionPolicy
from mocker.sglang.eviction import Leaves
from mocker.sglang.node import Node


class RadixTree:
    """Cached prefixes as a tree of page ranges."""

    def __init__(self, eviction_policy: EvictionPolicy) -> None:
        self.num_evictable = 0
        """Pages of unlocked nodes."""
        self.has_listener = True
        self.events: list[KvEvent] = []
        self._policy = eviction_policy
        self._clock = 0.0
        self.root = Node(NOWHERE, 0, 0, None, priority=0)
        self._leaves = Leaves(eviction_policy)

    def _tick(self) -> float:
        self._clock += 1.0
        return self._clock

    def match(self, chain: BlockChain, num_pages: int) -> Node:
        """Return the node at which the cached part of a chain's first pages ends, split there, and refresh its path."""
        node = self.root
        if num_pages <= 0:
            return node
        while node.stop < num_pages and (child := node.children.get(chain.key(node.stop))) is not None:
            shared = shared_stop(child, chain, num_pages)
            if shared < child.stop:
                node = self._split(child, shared)
                break
            node = child
        self._refresh(node)
        return node

    def _refresh(self, node: Node) -> None:
        """Make a path newer than anything else, from the root down to this node."""
        time = float(self._tick())
        up: Node | None = node
        while up is not None:
            up.last_use = time
            time -= 1e-5
            up = up.parent

    def insert(self, chain: BlockChain, num_pages: int, *, num_inserted: int, priority: int) -> tuple[Node, int]:
        """Cache the first pages of a chain; return where they end, and how many were cached already.

        Nodes count as hit if they end after the `num_inserted` pages that the same request has inserted before.
        """
        node = self.root
        while node.stop < num_pages and (child := node.children.get(chain.key(node.stop))) is not None:
            child.last_use = self._tick()
            shared = shared_stop(child, chain, num_pages)
            node = child if shared == child.stop else self._split(child, shared)
            node.priority = max(node.priority, priority)
            node.num_hits += node.stop > num_inserted
        num_cached = node.stop
        if num_cached < num_pages:
            node = self._add_leaf(chain, node, num_pages, priority=priority)
            node.num_hits = int(num_pages > num_inserted)
        return node, num_cached

    def _add_leaf(self, chain: BlockChain, parent: Node, stop: int, *, priority: int) -> Node:
        leaf = Node(chain, parent.stop, stop, parent, priority=priority)
        leaf.last_use = self._tick()
        leaf.created = self._tick()
        parent.children[chain.key(leaf.start)] = leaf
        self.num_evictable += leaf.num_pages
        self._leaves.list(leaf)
        if self.has_listener:
            self.events.append(BlockStored(chain, leaf.start, stop))
        return leaf

    def _split(self, node: Node, page: int) -> Node:
        """Cut a node at a page; return the new node before it. The rest looks newer, as if it had been used."""
        parent = node.parent
        assert parent is not None, "the root has no pages"
        front = Node(node.chain, node.start, page, parent, priority=node.priority)
        front.last_use = self._tick()
        front.created, front.num_locks, front.num_hits = node.created, node.num_locks, node.num_hits
        parent.children[node.chain.key(node.start)] = front
        front.children[node.chain.key(page)] = node
        node.start, node.parent = page, front
        node.last_use = self._tick()
        return front

    # Locks

    def lock(self, node: Node) -> None:
        """Keep a node, and all above it, from being evicted."""
        while node.parent is not None:
            if node.num_locks == 0:
                self.num_evictable -= node.num_pages
            node.num_locks += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`."""
        while node.parent is not None:
            node.num_locks -= 1
            if node.num_locks == 0:
                self.num_evictable += node.num_pages
                if not node.children:
                    self._leaves.list(node)
            node = node.parent

    # Eviction

    def evict(self) -> int:
        """Evict the leaf that the policy gives up first; return how many pages it had, 0 if all are locked."""
        leaf = self._leaves.take()
        if leaf is None:
            return 0
        parent = leaf.parent
        assert parent is not None, "the root is never evicted"
        del parent.children[leaf.chain.key(leaf.start)]
        leaf.parent = None
        if parent.is_evictable:
            self._leaves.list(parent)
        self.num_evictable -= leaf.num_pages
        if self.has_listener:
            self.events.append(BlockRemoved(leaf.chain, leaf.start, leaf.stop, is_tail_first=False))
        return leaf.num_pages

    def clear(self) -> None:
        """Forget everything; nothing is locked."""
        self.root = Node(NOWHERE, 0, 0, None, priority=0)
        self._leaves = Leaves(self._policy)
        self.num_evictable = 0
        if self.has_listener:
            self.events.append(AllBlocksCleared())


NOWHERE = BlockChain(())


def shared_stop(node: Node, chain: BlockChain, limit: int) -> int:
    """Return the page before which a node's pages are those of a chain, at most `limit`; its first page is."""
    other = node.chain
    stop = min(node.stop, limit)
    if other is chain:
        return stop
    ids, other_ids = chain.ids, other.ids
    low, high = chain.index_of(node.start), min(chain.index_of(stop - 1), other.index_of(stop - 1))
    if ids[high] != other_ids[high]:  # ids are chained, so the last equal one can be bisected
        while high - low > 1:
            middle = (low + high) // 2
            if ids[middle] == other_ids[middle]:
                low = middle
            else:
                high = middle
        high = low
    return min(stop, _end(chain, high, stop), _end(other, high, stop))


def _end(chain: BlockChain, index: int, limit: int) -> int:
    """Return the page after those that an id of a chain covers, or the limit if that is its last."""
    return chain.first_block(index + 1) if index + 1 < len(chain.ids) else limit


def depth_first(root: Node, weights: dict[Node, int]) -> list[Node]:
    """Return all nodes, each after those below it, branches with more weight first."""
    total = dict(weights)
    for node in _post_order(root):
        if node.children:
            total[node] = total.get(node, 0) + sum([total.get(child, 0) for child in node.children.values()])
    return _post_order(root, total)


def _post_order(root: Node, weights: dict[Node, int] | None = None) -> list[Node]:
    found: list[Node] = []
    stack = [root]
    while stack:  # in pre-order, last branch first, which reversed is post-order
        node = stack.pop()
        found.append(node)
        children = list(node.children.values())
        if weights is not None:
            children.sort(key=lambda child: -weights.get(child, 0))
        stack += children
    found.reverse()
    return found
