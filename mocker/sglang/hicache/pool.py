"""The KV cache with host memory behind it (HiCache).

    at the start of a step    stores that are queued begin; what is known to have ended is unlocked (`poll`)
    a request is admitted     what it finds on the host gets pages of the device, and is locked (`load_back`)
    a prefill is closed       the loads of all that were admitted begin, as one copy (`begin_loads`)
    a result is processed     stores that are queued begin, as one copy (`begin_stores`)

Who copies takes the copies that began with `take_copies`, and reports each with `end_copy`.
"""

from collections import deque
from typing import Final

from mocker.position import num_within
from mocker.sglang.config import SglangConfig
from mocker.sglang.hicache.copies import Load, NodeCopy
from mocker.sglang.hicache.tree import HostTree
from mocker.sglang.pool import Pool
from mocker.sglang.request import Request
from mocker.tiers.copies import NO_WORK, Work

MIN_LOADED_TOKENS: Final = 10
"""Fewer are computed instead."""


class HostPool(Pool):
    """All pages of one engine, on its device and on the host."""

    def __init__(self, config: SglangConfig, num_pages: int, num_host_pages: int) -> None:
        super().__init__(config, num_pages)
        self.hosted = HostTree(config.radix_eviction_policy, config.hicache_write_policy, num_host_pages)
        self.tree = self.hosted
        self._stores: deque[NodeCopy] = deque()
        self._loads: deque[NodeCopy] = deque()
        self._queued: list[Load] = []
        self._num_copies = 0
        self._work = Work()

    @property
    def is_copying(self) -> bool:
        """Whether any copy is queued, or not known to have ended."""
        return bool(self._stores or self._loads or self._queued or self.hosted.queued)

    # Copies

    def poll(self) -> None:
        """Begin the stores that are queued, and unlock what was copied."""
        self.begin_stores()
        while self._stores and self._stores[0].is_over:
            for store in self._stores.popleft().stores:
                self.hosted.end_store(store)
        while self._loads and self._loads[0].is_over:
            for load in self._loads.popleft().loads:
                self.hosted.unlock(load.node)
                self.hosted.unlock_on_host(load.host_lock)
                self.hosted.end_load(load.node)

    def begin_stores(self) -> None:
        """Begin the stores that are queued, as one copy."""
        tree = self.hosted
        if tree.queued:
            copy = self._copy(NodeCopy(self._num_copies, tree.queued, []))
            tree.queued = []
            self._stores.append(copy)
            self._work.ready.append(copy)

    def begin_loads(self) -> None:
        """Begin the loads that are queued, as one copy."""
        if self._queued:
            copy = self._copy(NodeCopy(self._num_copies, [], self._queued))
            self._queued = []
            self._loads.append(copy)
            self._work.loads.append(copy)

    def _copy(self, copy: NodeCopy) -> NodeCopy:
        self._num_copies += 1
        return copy

    def take_copies(self) -> Work:
        """Return the copies that began since the last call."""
        tree = self.hosted
        for store in tree.flushed:  # SGLang waits for each before it begins the next
            copy = self._copy(NodeCopy(self._num_copies, [store], []))
            self._work.stores.append(copy)
            self._work.flushed[copy] = None
        if not self._work:
            return NO_WORK
        tree.flushed = []
        work, self._work = self._work, Work()
        return work

    def end_copy(self, copy: NodeCopy) -> None:
        """Report that a copy has ended; that counts at the next `poll`."""
        copy.is_over = True

    def end_oldest(self, *, is_store: bool) -> None:
        """Report that the oldest copy of a direction has ended, if there is one."""
        for copy in self._stores if is_store else self._loads:
            if not copy.is_over:
                copy.is_over = True
                return

    # Prefixes on the host

    def match(self, request: Request, num_tokens: int) -> None:
        """Look up a request's first tokens; its prefix is what of them is on the device."""
        end = self.tree.match(request.chain, num_tokens // self.page_size)
        node = self.hosted.device_end(end)
        request.node, request.prefix = node, node.stop * self.page_size
        request.host_node, request.num_on_host = end, (end.stop - node.stop) * self.page_size

    def load_back(self, request: Request) -> None:
        """Load what a request finds on the host, if that is worth it and there is room; its prefix is longer then.

        Its prefix is locked, and so is the longer one.
        """
        tree, node, start = self.hosted, request.host_node, request.node
        assert node is not None and start is not None, f"{request} was not looked up"
        num_pages = request.num_on_host // self.page_size
        if num_pages * self.page_size < MIN_LOADED_TOKENS:
            return
        host_lock = tree.lock_on_host(node)
        tree.lock(node)
        self.make_room(num_pages * self.page_size)
        tree.unlock(node)
        if self.num_free < num_pages:
            tree.unlock_on_host(host_lock)
            return
        self.take(num_pages)
        tree.begin_load(node)
        tree.lock(node)
        self._queued.append(Load(node, num_pages, host_lock))
        tree.lock(node)
        tree.unlock(start)
        request.node, request.num_loaded = node, request.num_on_host
        request.prefix += request.num_on_host
        request.protected = request.prefix

    # Pages

    def make_room(self, num_tokens: int) -> None:
        """Evict until there is room for so many tokens, or nothing more can be evicted."""
        super().make_room(num_tokens)
        self.hosted.end_eviction()

    def num_decodes(self, requests: list[Request], limit: int) -> int:
        """Return how often these requests can decode; with `write_back`, before anything is evicted, which takes time."""
        if not self.hosted.is_write_back:
            return super().num_decodes(requests, limit)
        spare = self.num_free - len(requests)
        return num_within(lambda count: self._num_started(requests, count), spare, limit) if spare > 0 else 0

    def clear(self) -> None:
        """Forget all cached KV; no request holds any, and no copy is in progress."""
        super().clear()
        self._work = Work()
