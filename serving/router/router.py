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


class AllBusyError(Exception):
    """Every worker reports more KV blocks in use than `busy_threshold` allows."""


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
        self._predicted: PredictedIndex | None = None  # of workers that report no events, where others do
        self._silent: set[int] = set()
        self._busy_threshold = config.busy_threshold
        self._busy: set[int] = set()
        self._ttl_s = config.router_ttl_s
        self._temperature = config.router_temperature
        self._block_size = block_size
        self._rng = rng
        self._books: dict[int, WorkerBooks] = {}
        self._workers: list[int] = []
        self._booked: dict[Hashable, tuple[int, Prompt, int]] = {}

    def add_worker(self, worker: int, *, has_events: bool = True) -> None:
        """Route to a worker from now on; workers are small numbers. What one without events holds is predicted."""
        self._books[worker] = WorkerBooks()
        self._workers = sorted(self._books)
        if self.wants_events and not has_events:
            self._silent.add(worker)
            self._predicted = self._predicted or PredictedIndex(self._ttl_s)

    def remove_worker(self, worker: int) -> None:
        """Forget a worker, its cache and its bookings."""
        if self._books.pop(worker, None) is None:
            return
        self._workers = sorted(self._books)
        self._booked = {id: booking for id, booking in self._booked.items() if booking[0] != worker}
        self._busy.discard(worker)
        if worker in self._silent and self._predicted is not None:
            self._silent.discard(worker)
            self._predicted.drop(worker)
        elif self.index is not None:
            self.index.drop(worker)

    def on_load(self, worker: int, kv_usage: float) -> None:
        """Take note of a worker's share of KV blocks in use."""
        if self._busy_threshold is not None and kv_usage > self._busy_threshold:
            self._busy.add(worker)
        else:
            self._busy.discard(worker)

    def pick(
        self,
        request_id: Hashable,
        prompt: Prompt,
        now: float,
        only: int | None = None,
        avoid: frozenset[int] = frozenset(),
    ) -> Decision:
        """Choose a worker for a request, or take the one it must go to (`only`), and book it there.

        Workers to `avoid`, which have failed this request before, are chosen only if there is no other.

        Raises:
            NoWorkersError: there is none.
            AllBusyError: all are busy.
        """
        workers = self._workers if only is None else [worker for worker in self._workers if worker == only]
        if not workers:
            raise NoWorkersError("no worker is known to the router")
        if self._busy:
            workers = [worker for worker in workers if worker not in self._busy]
            if not workers:
                raise AllBusyError("all workers are busy")
        if avoid:
            workers = [worker for worker in workers if worker not in avoid] or workers
        num_tokens, ids, num_blocks, blocks_per_id = prompt
        books = [self._books[worker] for worker in workers]
        has_tail = num_tokens > num_blocks * self._block_size
        if self.policy.needs_load:
            found = self.index.overlaps(ids, num_blocks, blocks_per_id, now) if self.index is not None else {}
            if self._predicted is not None:
                found |= self._predicted.overlaps(ids, num_blocks, blocks_per_id, now)
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
        self.book(request_id, worker, prompt, prefill_tokens)
        if self.policy.needs_load:
            index = self._predicted if worker in self._silent else self.index
            if index is not None:
                index.routed(worker, ids, num_blocks, blocks_per_id, now)
        return Decision(worker, overlap, workers, costs, overlaps)

    def book(self, request_id: Hashable, worker: int, prompt: Prompt, prefill_tokens: int) -> None:
        """Enter a request in a worker's books: one of ours, or one that another router sent there."""
        books = self._books[worker]
        if self.policy.needs_load:
            num_tokens, ids, num_blocks, blocks_per_id = prompt
            has_tail = num_tokens > num_blocks * self._block_size
            books.add(ids, num_blocks, blocks_per_id, has_tail=has_tail, prefill_tokens=prefill_tokens)
        else:
            books.num_requests += 1
        self._booked[request_id] = (worker, prompt, prefill_tokens)

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
