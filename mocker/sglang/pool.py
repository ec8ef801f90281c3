"""The KV cache: pages that are free, that requests hold, and that the tree keeps."""

from mocker.contract import EngineStoppedError
from mocker.position import num_within
from mocker.sglang.config import SglangConfig
from mocker.sglang.node import Node
from mocker.sglang.request import Request
from mocker.sglang.tree import RadixTree


class Pool:
    """All pages of one engine."""

    def __init__(self, config: SglangConfig, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        self.page_size = config.page_size
        self.tree = RadixTree(config.radix_eviction_policy)
        self.num_holders = 0
        """Requests that hold KV."""
        self._has_tree = config.has_tree

    # With host memory

    @property
    def is_copying(self) -> bool:
        """Whether any copy between device and host is not known to have ended."""
        return False

    def poll(self) -> None:
        """Take note of the copies that have ended, at the start of a step."""

    def begin_stores(self) -> None:
        """Begin to copy to the host what is to be stored there."""

    def begin_loads(self) -> None:
        """Begin to copy to the device what was admitted."""

    def load_back(self, request: Request) -> None:
        """Load what a request finds on the host."""
        raise NotImplementedError

    # In tokens

    @property
    def num_tokens(self) -> int:
        """Tokens for which there is room in all."""
        return self.num_pages * self.page_size

    @property
    def free(self) -> int:
        """Tokens for which there is room at once."""
        return self.num_free * self.page_size

    @property
    def evictable(self) -> int:
        """Cached tokens that nobody uses."""
        return self.tree.num_evictable * self.page_size

    @property
    def available(self) -> int:
        """Both together."""
        return (self.num_free + self.tree.num_evictable) * self.page_size

    def ceil(self, num_tokens: int) -> int:
        """Round up to pages."""
        return -(-num_tokens // self.page_size) * self.page_size

    def floor(self, num_tokens: int) -> int:
        """Round down to pages."""
        return num_tokens // self.page_size * self.page_size

    # Cached prefixes

    def match(self, request: Request, num_tokens: int) -> None:
        """Look up a request's first tokens, and let what is cached be its prefix."""
        if self._has_tree:
            node = self.tree.match(request.chain, num_tokens // self.page_size)
            request.node, request.prefix = node, node.stop * self.page_size
        else:
            request.node, request.prefix = self.tree.root, 0

    def refresh(self, request: Request) -> None:
        """Look up a request only to make its prefix newer."""
        self.tree.match(request.chain, request.known // self.page_size)

    def lock(self, request: Request) -> None:
        """Keep a request's prefix."""
        self.tree.lock(self._node(request))

    def unlock(self, request: Request) -> None:
        """Undo one `lock`."""
        self.tree.unlock(self._node(request))

    @staticmethod
    def _node(request: Request) -> Node:
        assert request.node is not None, f"{request} was not looked up"
        return request.node

    # Pages

    def make_room(self, num_tokens: int) -> None:
        """Evict until there is room for so many tokens, or nothing more can be evicted."""
        while self.free < num_tokens and (num_pages := self.tree.evict()):
            self.num_free += num_pages

    def take(self, num_pages: int) -> None:
        """Give out free pages.

        Raises:
            EngineStoppedError: there are too few, because a prefill in progress always goes on.
        """
        if num_pages > self.num_free:
            raise EngineStoppedError(
                f"SGLang runs out of memory: {num_pages} pages of KV are needed, and {self.num_free} of {self.num_pages} are free"
            )
        self.num_free -= num_pages

    def extend(self, requests: list[Request]) -> None:
        """Give the requests of a prefill the pages for their chunks."""
        size = self.page_size
        num_new = sum([request.end - request.prefix for request in requests])
        self.make_room(num_new if size == 1 else num_new + size * len(requests))
        for request in requests:
            self.take((self.ceil(request.end) - self.ceil(request.prefix)) // size)
            request.committed = request.end
            request.is_retracted = False
            if not request.holds_kv:
                request.holds_kv = True
                self.num_holders += 1

    def num_needed(self, requests: list[Request]) -> int:
        """Return the tokens for which the next decode of these requests needs new pages."""
        size = self.page_size
        return size * sum([request.committed % size == 0 for request in requests])

    def fits_decode(self, requests: list[Request]) -> bool:
        """Make room for the next decode of these requests; return whether that succeeded."""
        num_needed = self.num_needed(requests)
        self.make_room(num_needed)
        return self.free >= num_needed

    def decode(self, requests: list[Request]) -> None:
        """Give each of these requests room for one token. It evicts as if all of them needed a page."""
        self.make_room(self.page_size * len(requests))
        self.take(self.num_needed(requests) // self.page_size)
        for request in requests:
            request.committed += 1

    def num_decodes(self, requests: list[Request], limit: int) -> int:
        """Return how often these requests can decode with what is available, at most `limit`."""
        most = self.num_free + self.tree.num_evictable
        if len(requests) * (limit // self.page_size + 1) <= most:
            return limit
        return num_within(lambda count: self._num_started(requests, count), most, limit)

    def decode_many(self, requests: list[Request], num_iterations: int) -> None:
        """Let these requests decode so many times. Where nothing has to be evicted, it is done at once."""
        while num_iterations > 0:
            spare = self.num_free - len(requests)
            count = num_iterations
            if self.tree.num_evictable and len(requests) * (count // self.page_size + 1) > spare:
                count = num_within(lambda count: self._num_started(requests, count - 1), spare, count)
            if count > 0:
                self.take(self._num_started(requests, count))
                for request in requests:
                    request.committed += count
            else:
                count = 1
                self.decode(requests)
            num_iterations -= count

    def _num_started(self, requests: list[Request], count: int) -> int:
        """Return how many pages these requests start if they decode so many times."""
        size = self.page_size
        if size == 1:
            return len(requests) * count
        return sum([(each.committed + count - 1) // size - (each.committed - 1) // size for each in requests])

    # Keeping and releasing

    def checkpoint(self, request: Request, num_tokens: int) -> None:
        """Cache the first tokens of a request, and let it use the tree's pages for them.

        The tree is cut where the prompt ends, so that the output can be evicted without it.
        """
        num_pages = num_tokens // self.page_size
        if not self._has_tree or num_tokens <= 0:
            return
        tree, chain, priority = self.tree, request.chain, request.priority or 0
        num_inserted, num_own = request.inserted // self.page_size, request.protected // self.page_size
        node, num_cached = tree.insert(chain, num_pages, num_inserted=num_inserted, priority=priority)
        self.num_free += max(num_cached - num_own, 0)
        request.inserted = max(request.inserted, num_pages * self.page_size)
        num_prompt = request.num_prompt // self.page_size
        if 0 < num_prompt < num_pages:
            tree.insert(chain, num_prompt, num_inserted=num_prompt, priority=priority + 1)
        self.unlock(request)
        tree.lock(node)
        request.node, request.protected = node, num_pages * self.page_size

    def release(self, request: Request, *, is_kept: bool) -> None:
        """Take a request's KV back, and cache it first if it is to be kept."""
        if is_kept:
            self.checkpoint(request, request.committed)
        self.num_free += (self.ceil(request.committed) - request.protected) // self.page_size
        self.unlock(request)
        request.holds_kv = False
        self.num_holders -= 1

    def clear(self) -> None:
        """Forget all cached KV; no request holds any."""
        if self._has_tree:
            self.tree.clear()
        self.num_free = self.num_pages
