"""The router: picks a worker for each request and keeps the books. The same object serves live and virtual time."""

import random
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from serving.router.books import WorkerBooks
from serving.router.config import RouterConfig
from serving.router.index import Index, PredictedIndex, PrefixIndex
from serving.router.policies import ROUTER_MODES, Candidates, Kv, Policy, choose


class Prompt(NamedTuple):
    """What routing needs of a request: its length and the chained ids of its full blocks."""

    num_tokens: int
    ids: Sequence[Hashable]
    num_blocks: int
    blocks_per_id: int = 1


class Decision(NamedTuple):
    """Where a request goes and what every candidate scored."""

    worker: int
    overlap_blocks: int
    workers: list[int]
    costs: Sequence[float]
    overlaps: list[int]

    @property
    def candidates(self) -> list[tuple[int, float, int]]:
        """(worker, cost, overlap blocks) of every candidate."""
        return list(zip(self.workers, self.costs, self.overlaps, strict=True))


class NoWorkersError(Exception):
    """There is no worker to route to."""


class Router:
    """Picks workers; `pick` books a request at once, `on_first_token` and `on_finish` release it."""

    def __init__(
        self, mode: str, config: RouterConfig, *, block_size: int, rng: random.Random, closed_events: bool = False
    ) -> None:
        """Build a router of a mode named in `ROUTER_MODES`.

        Raises:
            ValueError: there is no such mode.
        """
        if mode not in ROUTER_MODES:
            raise ValueError(f"unknown router mode {mode!r}; expected one of {', '.join(ROUTER_MODES)}")
        kind = ROUTER_MODES[mode]
        self.policy: Policy = kind(config.kv_overlap_score_weight) if kind is Kv else kind()  # type: ignore[call-arg]
        self.mode = mode
        self.wants_events = self.policy.needs_load and config.use_kv_events and config.kv_overlap_score_weight > 0
        self.index: Index | None = None
        if self.wants_events:
            self.index = PrefixIndex(closed_events=closed_events)
        elif self.policy.needs_load and config.kv_overlap_score_weight > 0:
            self.index = PredictedIndex(config.router_ttl_s)
        self._temperature = config.router_temperature
        self._block_size = block_size
        self._rng = rng
        self._books: dict[int, WorkerBooks] = {}
        self._workers: list[int] = []
        self._booked: dict[Hashable, tuple[int, Prompt, int]] = {}

    def add_worker(self, worker: int) -> None:
        """Route to a worker from now on; workers are small numbers."""
        self._books[worker] = WorkerBooks()
        self._workers = sorted(self._books)

    def remove_worker(self, worker: int) -> None:
        """Forget a worker, its cache and its bookings."""
        if self._books.pop(worker, None) is None:
            return
        self._workers = sorted(self._books)
        self._booked = {id: booking for id, booking in self._booked.items() if booking[0] != worker}
        if self.index is not None:
            self.index.drop(worker)

    def pick(self, request_id: Hashable, prompt: Prompt, now: float) -> Decision:
        """Choose a worker for a request and book it there.

        Raises:
            NoWorkersError: there is none.
        """
        workers = self._workers
        if not workers:
            raise NoWorkersError("no worker is known to the router")
        num_tokens, ids, num_blocks, blocks_per_id = prompt
        books = [self._books[worker] for worker in workers]
        has_tail = num_tokens > num_blocks * self._block_size
        if self.policy.needs_load:
            found = self.index.overlaps(ids, num_blocks, blocks_per_id, now) if self.index is not None else {}
            overlaps = [found.get(worker, 0) for worker in workers]
            size = self._block_size
            total = num_blocks + has_tail
            candidates = Candidates(
                overlaps,
                [
                    book.prefill_tokens + num_tokens - blocks * size
                    for book, blocks in zip(books, overlaps, strict=True)
                ],
                [book.decode_blocks + total - book.num_active_blocks(ids, num_blocks, blocks_per_id) for book in books],
                [book.num_requests for book in books],
                size,
            )
        else:
            overlaps = [0] * len(workers)
            candidates = Candidates(
                overlaps, overlaps, overlaps, [book.num_requests for book in books], self._block_size
            )
        costs = self.policy.costs(candidates)
        place = choose(costs, self._temperature, self._rng)
        worker, overlap = workers[place], overlaps[place]
        prefill_tokens = num_tokens - overlap * self._block_size
        if self.policy.needs_load:
            books[place].add(ids, num_blocks, blocks_per_id, has_tail=has_tail, prefill_tokens=prefill_tokens)
            if self.index is not None:
                self.index.routed(worker, ids, num_blocks, blocks_per_id, now)
        else:
            books[place].num_requests += 1
        self._booked[request_id] = (worker, prompt, prefill_tokens)
        return Decision(worker, overlap, workers, costs, overlaps)

    def on_first_token(self, request_id: Hashable) -> None:
        """Release the prefill part of a booking; a second call, or an unknown request, changes nothing."""
        booking = self._booked.get(request_id)
        if booking is not None and booking[2]:
            worker, prompt, prefill_tokens = booking
            if self.policy.needs_load:
                self._books[worker].prefill_tokens -= prefill_tokens
            self._booked[request_id] = (worker, prompt, 0)

    def on_finish(self, request_id: Hashable) -> None:
        """Release a booking, on whichever way the request ended; unknown requests change nothing."""
        self.on_first_token(request_id)
        booking = self._booked.pop(request_id, None)
        if booking is None:
            return
        worker, (num_tokens, ids, num_blocks, blocks_per_id), _ = booking
        if self.policy.needs_load:
            has_tail = num_tokens > num_blocks * self._block_size
            self._books[worker].remove(ids, num_blocks, blocks_per_id, has_tail=has_tail)
        else:
            self._books[worker].num_requests -= 1

    def load(self, worker: int) -> WorkerBooks:
        """Return the books of a worker."""
        return self._books[worker]
