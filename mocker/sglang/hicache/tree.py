"""The radix tree with host memory: a node is on the device, on the host, or on both.

    root == 0..3 == 3..7 -- 7..9 -- 9..12        == on the device, -- only on the host; a path never comes back
                      '---- 7..8

    insert                      the path is on the device again, with the pages of the request
    so many hits on a node      it is copied to the host, after those above it (`write_through`: 1, `.._selective`: 2)
    evicted from the device     if it is on the host, it stays there; if not, it is gone, or copied first (`write_back`)
    evicted from the host       it is gone

Source: SGLang 0.5.23, `srt/mem_cache/unified_radix_cache.py` (`UnifiedRadixCache`) and `unified_cache/unified_tree_core.py`
(`UnifiedTreeCore`), with full attention only and without storage behind the host.
"""

from typing import Final

from mocker.chain import BlockChain
from mocker.events import BlockRemoved, BlockStored, TierRemoved, TierStored
from mocker.sglang.config import EvictionPolicy, WritePolicy
from mocker.sglang.hicache.copies import HostLock, Store
from mocker.sglang.hicache.leaves import DeviceLeaves, HostLeaves, is_device_leaf, is_host_leaf
from mocker.sglang.node import Node
from mocker.sglang.tree import RadixTree, shared_stop

NUM_HITS_TO_STORE: Final[dict[WritePolicy, int]] = {"write_through": 1, "write_through_selective": 2}


class HostTree(RadixTree):
    """Cached prefixes on device and host."""

    def __init__(self, eviction_policy: EvictionPolicy, write_policy: WritePolicy, num_host_pages: int) -> None:
        super().__init__(eviction_policy)
        self.num_host_pages = num_host_pages
        self.num_host_free = num_host_pages
        self.num_host_evicted = 0
        self.num_refused = 0
        """How often a node found no room on the host."""
        self.is_write_back = write_policy == "write_back"
        self.queued: list[Store] = []
        """Asked for, and not begun."""
        self.flushed: list[Store] = []
        """With `write_back`: begun and ended during an eviction, which waits for them."""
        self._num_hits_to_store = NUM_HITS_TO_STORE.get(write_policy, 0)
        self._leaves = DeviceLeaves(eviction_policy)
        self._host_leaves = HostLeaves(eviction_policy)
        self._stuck: list[Node] = []
        self._num_boundaries = 0
        self._doubles: dict[Node, None] = {}  # with write_back: on both, in the order in which they became so

    def _list(self, node: Node) -> None:
        """Note a node that may have become a candidate for eviction."""
        if is_device_leaf(node):
            self._leaves.list(node)
        elif is_host_leaf(node):
            self._host_leaves.list(node)

    # Insertion

    def insert(self, chain: BlockChain, num_pages: int, *, num_inserted: int, priority: int) -> tuple[Node, int]:
        """Cache the first pages of a chain on the device; return where they end, and how many were there already."""
        node, num_cached = self.root, 0
        while node.stop < num_pages and (child := node.children.get(chain.key(node.stop))) is not None:
            child.last_use = self._tick()
            shared = shared_stop(child, chain, num_pages)
            node = child if shared == child.stop else self._split(child, shared)
            node.priority = max(node.priority, priority)
            if node.on_device:
                num_cached = node.stop
            else:
                self._return(node)
            if node.stop > num_inserted:
                self._hit(node)
        if node.stop < num_pages:
            node = self._add_leaf(chain, node, num_pages, priority=priority)
            if num_pages > num_inserted:
                self._hit(node)
        return node, num_cached

    def _return(self, node: Node) -> None:
        """Let a node be on the device again."""
        node.on_device = True
        if node.num_locks == 0:
            self.num_evictable += node.num_pages
        self._list(node)
        self._note_double(node)
        if self.has_listener:
            self.events.append(BlockStored(node.chain, node.start, node.stop))

    def _hit(self, node: Node) -> None:
        """Count a hit, and copy the node to the host if it has had enough of them."""
        if self.is_write_back:
            return
        node.num_hits += 1
        if not node.on_host and node.num_hits >= self._num_hits_to_store:
            self._store_path(node)

    def _split(self, node: Node, page: int) -> Node:
        front = super()._split(node, page)
        front.on_device, front.on_host = node.on_device, node.on_host
        front.num_host_locks, front.is_loading = node.num_host_locks, node.is_loading
        front.host_boundary, node.host_boundary = node.host_boundary, 0
        front.store = store = node.store
        if isinstance(store, Store):
            place = store.pieces.index(node)
            store.pieces[place : place + 1] = [front, node]
        self._note_double(front)
        return front

    # Copies to the host

    def _store_path(self, node: Node) -> None:
        """Copy a node to the host, and first all above it that are not there, until there is no room."""
        path: list[Node] = []
        up: Node | None = node
        while up is not None and up.parent is not None and not up.on_host:
            path.append(up)
            up = up.parent
        for each in path[::-1]:
            if not self._take_host(each.num_pages):
                return
            each.on_host = True
            self.lock(each)
            each.store = store = Store(each)
            self.queued.append(store)

    def _take_host(self, num_pages: int) -> bool:
        """Take room on the host, if eviction makes enough."""
        needed = num_pages - self.num_host_free
        if needed > 0 and self._evict_from_host(needed) < needed:
            self.num_refused += 1
            return False
        self.num_host_free -= num_pages
        return True

    def end_store(self, store: Store) -> None:
        """Let a copy to the host be known to have ended."""
        self._publish(store)
        self.unlock(store.node)

    def _publish(self, store: Store) -> None:
        for piece in store.pieces:
            piece.store = None
            self._note_double(piece)
            if self.has_listener:
                self.events.append(TierStored("CPU", piece.chain, piece.start, piece.stop, 1))

    # Loads

    def device_end(self, node: Node) -> Node:
        """Return where the part of a path that is on the device ends."""
        while not node.on_device:
            assert node.parent is not None, "the root is on the device"
            node = node.parent
        return node

    def begin_load(self, node: Node) -> None:
        """Put all above a node, and itself, on the device again; they have pages there."""
        path: list[Node] = []
        while not node.on_device:
            path.append(node)
            assert node.parent is not None, "the root is on the device"
            node = node.parent
        for each in path[::-1]:
            each.on_device, each.is_loading = True, self.is_write_back
            if each.num_locks == 0:
                self.num_evictable += each.num_pages
            self._list(each)
            if self.has_listener:
                self.events.append(BlockStored(each.chain, each.start, each.stop))

    def end_load(self, node: Node) -> None:
        """Let a load down to this node be known to have ended."""
        while self.is_write_back and node.parent is not None:
            if node.is_loading:
                node.is_loading = False
                self._note_double(node)
            node = node.parent

    # Locks

    def lock(self, node: Node) -> None:
        """Keep a node, and all above it, from being evicted."""
        while node.parent is not None:
            if node.num_locks == 0 and node.on_device:
                self.num_evictable -= node.num_pages
            node.num_locks += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`."""
        while node.parent is not None:
            node.num_locks -= 1
            if node.num_locks == 0:
                if node.on_device:
                    self.num_evictable += node.num_pages
                self._list(node)
            node = node.parent

    def lock_on_host(self, node: Node) -> HostLock:
        """Keep a node on the host. What is split off before it stays, too."""
        if not node.host_boundary:
            self._num_boundaries += 1
            node.host_boundary = self._num_boundaries
        node.num_host_locks += 1
        return HostLock(node, node.host_boundary)

    def unlock_on_host(self, lock: HostLock) -> None:
        """Undo one `lock_on_host`."""
        node = lock.node
        while True:
            node.num_host_locks -= 1
            self._list(node)
            if node.host_boundary == lock.boundary:
                return
            assert node.parent is not None, "the first part of a locked node is above it"
            node = node.parent

    # Eviction from the device

    def evict(self) -> int:
        """Evict the leaf that the policy gives up first; return how many pages of the device it had, 0 if none can go.

        With `write_back`, one that can neither be copied nor dropped is left out until `end_eviction`.
        """
        while (leaf := self._leaves.take()) is not None:
            num_pages = leaf.num_pages
            if leaf.on_host or (self.is_write_back and self._store_at_once(leaf)):
                self._demote(leaf)
            elif not self.is_write_back:
                assert not leaf.children, "what is below a node that was never copied was never copied, either"
                self._delete(leaf)
            elif not self._drop(leaf):
                self._stuck.append(leaf)
                continue
            return num_pages
        return 0

    def end_eviction(self) -> None:
        """Let the leaves that could not go be candidates again."""
        for leaf in self._stuck:
            self._list(leaf)
        self._stuck = []

    def _store_at_once(self, leaf: Node) -> bool:
        if not self._take_host(leaf.num_pages):
            return False
        leaf.on_host = True
        store = Store(leaf)
        self._publish(store)
        self.flushed.append(store)
        return True

    def _demote(self, leaf: Node) -> None:
        """Let a leaf be on the host only."""
        leaf.on_device = False
        self.num_evictable -= leaf.num_pages
        if self.has_listener:
            self.events.append(BlockRemoved(leaf.chain, leaf.start, leaf.stop, is_tail_first=False))
        self._list(leaf)
        if leaf.parent is not None:
            self._list(leaf.parent)

    def _delete(self, leaf: Node) -> None:
        """Remove a leaf that is on the device only."""
        self.num_evictable -= leaf.num_pages
        if self.has_listener:
            self.events.append(BlockRemoved(leaf.chain, leaf.start, leaf.stop, is_tail_first=False))
        self._remove(leaf)

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None, "the root is never evicted"
        del parent.children[leaf.chain.key(leaf.start)]
        leaf.parent = None
        self._doubles.pop(leaf, None)
        self._list(parent)

    def _drop(self, leaf: Node) -> bool:
        """Remove a leaf for which the host has no room, with all below it on the host, unless any is in use."""
        if leaf.is_loading or leaf.num_locks or leaf.num_host_locks:
            return False
        below: list[Node] = []
        stack = list(leaf.children.values())
        while stack:
            node = stack.pop()
            if node.store is not None or node.is_loading or node.num_locks or node.num_host_locks:
                return False
            below.append(node)
            stack += node.children.values()
        for node in below[::-1]:
            self._free_on_host(node)
            self._remove(node)
        self._delete(leaf)
        return True

    # Eviction from the host

    def _evict_from_host(self, num_pages: int) -> int:
        """Evict from the host until there is so much more room, or nothing more can go; return how much more there is."""
        num_freed = self._free_doubles(num_pages) if self.is_write_back else 0
        while num_freed < num_pages and (leaf := self._host_leaves.take()) is not None:
            num_freed += leaf.num_pages
            self.num_host_evicted += leaf.num_pages
            self._free_on_host(leaf)
            self._remove(leaf)
        return num_freed

    def _free_on_host(self, node: Node) -> None:
        node.on_host = False
        self.num_host_free += node.num_pages
        if self.has_listener:
            self.events.append(TierRemoved("CPU", node.chain, node.start, node.stop, 1, is_tail_first=False))

    def _note_double(self, node: Node) -> None:
        """Note whether a node is on both sides, and no copy of it is in progress."""
        if not self.is_write_back:
            return
        if node.on_device and node.on_host and node.store is None and not node.is_loading:
            self._doubles.setdefault(node)
        else:
            self._doubles.pop(node, None)

    def _free_doubles(self, num_pages: int) -> int:
        """Free the host's copies of nodes that are on the device, too; last those that are about to leave the device."""
        num_freed = 0
        gone: list[Node] = []
        for spares_leaves in (True, False):
            for node in self._doubles:
                if num_freed >= num_pages:
                    break
                if not (node.on_device and node.on_host):
                    gone.append(node)
                elif not (spares_leaves and is_device_leaf(node)) and self._may_free_double(node):
                    num_freed += node.num_pages
                    self._free_on_host(node)
                    gone.append(node)
        for node in gone:
            self._doubles.pop(node, None)
        return num_freed

    @staticmethod
    def _may_free_double(node: Node) -> bool:
        return node.store is None and not node.is_loading and node.num_host_locks == 0

    def clear(self) -> None:
        """Forget everything; nothing is locked, and no copy is in progress."""
        super().clear()
        self._leaves = DeviceLeaves(self._policy)
        self._host_leaves = HostLeaves(self._policy)
        self.num_host_free = self.num_host_pages
        self._doubles = {}
        self._stuck = []
