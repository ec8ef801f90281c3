"""The order in which waiting requests are tried. It is kept until the next pass.

    fcfs                      as they came; retracted and preempted ones came again
    lof                       the largest limit on output first
    lpm                       the longest cached prefix first
    dfs-weight                along the tree, branches with more waiting requests first
    hrrn                      the longest wait for its work first, both in tokens of prompts
    shortest-prefill-first    the least work first

Requests that share their first 32 tokens with an earlier one, and find little in the cache, are deferred: the earlier one
should put these tokens there.
"""

from collections.abc import Hashable
from typing import Final

from mocker.sglang.config import SglangConfig
from mocker.sglang.node import Node
from mocker.sglang.pool import Pool
from mocker.sglang.request import Request
from mocker.sglang.retraction import urgency
from mocker.sglang.tree import depth_first

MAX_MATCHED_WAITING: Final = 128
"""With more waiting requests, lpm and hrrn do not look them up; and so many at most are refreshed."""
NUM_PASSES_PER_REFRESH: Final = 32
NUM_HEAD_TOKENS: Final = 32
FIRST: Final = float("-inf")
LAST: Final = float("inf")


class Policies:
    """Sorts the waiting queue at each pass."""

    def __init__(self, config: SglangConfig, pool: Pool) -> None:
        self._config = config
        self._policy = config.policy
        self._pool = pool
        self._num_passes = 0
        self._refreshes = config.radix_eviction_policy == "lru" and not config.disable_radix_cache

    def sort(self, waiting: list[Request], num_processed: int) -> list[Request]:
        """Return the queue in order; the tokens of prompts that were computed so far make requests older."""
        policy = self._policy
        if policy == "lpm" or policy == "hrrn":
            if len(waiting) > MAX_MATCHED_WAITING:
                return self._refreshed(waiting)
            deferred = self._look_up(waiting)
            if policy == "lpm":
                return sorted(waiting, key=lambda request: LAST if request in deferred else -float(request.matched))
            return sorted(waiting, key=lambda request: response_key(request, deferred, num_processed))
        if policy == "dfs-weight":
            self._look_up(waiting)
            return self._along_tree(waiting)
        if policy == "shortest-prefill-first":
            deferred = self._look_up(waiting)
            return sorted(waiting, key=lambda request: (request in deferred, work(request), request.entry))
        if policy == "lof":
            return self._refreshed(self._by_limit(waiting))
        if self._config.enable_priority_scheduling:
            waiting = sorted(waiting, key=lambda request: (urgency(request, self._config), request.entry))
        return self._refreshed(waiting)

    def _by_limit(self, waiting: list[Request]) -> list[Request]:
        if self._config.enable_priority_scheduling:
            return sorted(waiting, key=lambda request: (urgency(request, self._config), -request.max_new))
        return sorted(waiting, key=lambda request: -request.max_new)

    def _refreshed(self, waiting: list[Request]) -> list[Request]:
        """Make the prefixes of waiting requests newer from time to time, the first request's newest."""
        if self._refreshes and waiting:
            if self._num_passes % NUM_PASSES_PER_REFRESH == 0:
                for request in reversed(waiting[:MAX_MATCHED_WAITING]):
                    self._pool.refresh(request)
            self._num_passes += 1
        return waiting

    def _look_up(self, waiting: list[Request]) -> set[Request]:
        """Look up all requests, and return those to defer."""
        deferred: set[Request] = set()
        heads: set[Hashable] = set()
        for request in waiting:
            self._pool.match(request, request.known)
            request.matched = min(request.prefix + request.num_on_host, request.most_matched)
            if request.prefix <= NUM_HEAD_TOKENS and (head := head_of(request, self._pool.page_size)) is not None:
                if head in heads:
                    deferred.add(request)
                heads.add(head)
        return deferred

    def _along_tree(self, waiting: list[Request]) -> list[Request]:
        found: dict[Node, list[Request]] = {}
        for request in waiting:
            assert request.node is not None, f"{request} was not looked up"
            found.setdefault(request.node, []).append(request)
        order = depth_first(self._pool.tree.root, {node: len(requests) for node, requests in found.items()})
        return [request for node in order for request in found.get(node, ())]

    def chunk_limit(self, chunked: Request, waiting: list[Request], chunk: int) -> int | None:
        """Return how much of its rest a prefill in progress may compute, so that shorter ones have room; None: as usual."""
        size = self._pool.page_size
        if self._policy != "shortest-prefill-first" or chunk < 2 * size:
            return None
        left, reserved = chunked.known - chunked.prefix, 0
        for request in waiting:
            charge = self._pool.ceil(work(request))
            if work(request) >= left or reserved + charge > chunk - size:
                break
            reserved += charge
        return self._pool.floor(chunk - reserved) if reserved else None


def work(request: Request) -> int:
    """Return how many tokens a waiting request still has to compute."""
    return max(1, request.known - request.matched)


def response_key(request: Request, deferred: set[Request], num_processed: int) -> tuple[float, str]:
    """Return the key of a request by its response ratio, then by its name; numbers are in order, as if all had 12 digits."""
    name = request.id if isinstance(request.id, str) else f"{request.id:012}"
    if request in deferred:
        return LAST, name
    left = request.num_prompt - request.matched
    if left <= 0:
        return FIRST, name
    return -(max(0, num_processed - request.processed_at_entry) / left), name


def head_of(request: Request, page_size: int) -> Hashable:
    """Name the first 32 tokens of a request; None if it has fewer.

    Where pages are not whole parts of them, a caller names them, or else the first page stands for them.
    """
    if request.known < NUM_HEAD_TOKENS:
        return None
    if request.head is not None:
        return request.head
    num_pages = max(NUM_HEAD_TOKENS // page_size, 1)
    return request.chain.key(num_pages - 1) if request.known >= num_pages * page_size else None
