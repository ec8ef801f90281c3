"""The router: picks a rank for each request and keeps the books. The same object serves live and virtual time.

Requests are routed to ranks: a worker, which is a process, has one or more. A router knows each by a small number, its
slot.

What it counts depends on the stage for which its ranks are, as in NVIDIA Dynamo:

    stage        prompt tokens to compute   what ranks have cached     blocks of requests in flight
    aggregated   counted                    followed                   counted, shared ones once
    prefill      counted                    followed                   not counted: they leave with the prompt
    decode       of local prompts           for local prompts          counted, each request's whole

A decode rank receives most prompts already computed. A prompt is local if the rank computes it itself.
"""

import random
from collections.abc import Hashable, Sequence
from itertools import compress
from typing import Final, Literal

from serving.router.adapters import KnownAdapters
from serving.router.blocks import PromptBlocks
from serving.router.board import FEW_RANKS, MANY_RANKS, Board
from serving.router.books import RankBooks
from serving.router.caches import Caches, more
from serving.router.candidates import NO_STATE, Candidates, Prompt, RankState
from serving.router.capacity import RankCapacity
from serving.router.config import RouterConfig
from serving.router.decision import NOBODY, AllBusyError, AllFullError, NoWorkersError, RoutingDecision
from serving.router.index import Index, PredictedIndex, PrefixIndex
from serving.router.policies.modes import Mode
from serving.router.policies.policy import Policy, choose, within_bound
from serving.router.tiers import BeyondGpu

Stage = Literal["aggregated", "prefill", "decode"]
NOTHING_ON_GPU: Final[dict[int, int]] = {}


def choices_of(stage: Stage, seed: int) -> random.Random:
    """Return the random choices of a stage's router: the same live and in virtual time, but others for each stage."""
    return random.Random(f"{'prefill ' if stage == 'prefill' else ''}router {seed}")


class Router:
    """Picks ranks; `pick` books a request at once, `on_first_token` and `on_finish` release it."""

    def __init__(
        self,
        mode: str,
        config: RouterConfig,
        *,
        block_size: int,
        rng: random.Random,
        closed_events: bool = False,
        stage: Stage = "aggregated",
        follows_events: bool = False,
        many_ranks: int = MANY_RANKS,
    ) -> None:
        """Build a router with a mode, as `Mode` parses it.

        Args:
            mode: how it chooses.
            config: its settings.
            block_size: tokens in a block.
            rng: its source of random numbers.
            closed_events: see `PrefixIndex`.
            stage: the stage of a request that its ranks serve.
            follows_events: whether a router of decode ranks follows their caches, for local prompts;
                the other two stages do if their mode needs it.
            many_ranks: from how many ranks on they are scored all at once, which changes no result.

        Raises:
            ValueError: there is no such mode.
        """
        self._mode = parsed = Mode.parse(mode)
        self.mode = mode
        self.policy: Policy = parsed.policy(config, rng)
        self.stage = stage
        self._has_overlap = follows_events if stage == "decode" else self.policy.needs_overlap
        # Besides the policy, conditional disaggregation asks for the load of a stage's ranks.
        self._has_load = self.policy.needs_load or stage != "aggregated"
        self.wants_events = self._has_overlap and (config.use_kv_events or parsed.is_oracle)
        self._caches: Caches | None = None
        if self._has_overlap:
            ttl_s = config.router_ttl_s
            index = PrefixIndex(closed_events=closed_events) if self.wants_events else PredictedIndex(ttl_s)
            self._caches = Caches(index, ttl_s=ttl_s, predict_s=parsed.predict)
        self._adapters = KnownAdapters(int(parsed.adapter))
        self._busy_threshold = config.busy_threshold
        self._busy: set[int] = set()
        self._max_queue_depth = config.max_queue_depth
        self._capacities: dict[int, RankCapacity] = {}  # of ranks that report what they run, if there is a limit
        self._full: set[int] = set()  # those of them that are full
        self._temperature = config.router_temperature if parsed.temp is None else parsed.temp
        self._tolerance = parsed.eps / 100
        self._may_know = not (self._temperature or self._tolerance) and _is_known_without_costs(type(self.policy))
        has_order = self._may_know and self.policy.standing(RankBooks(), block_size) is not None
        self._standing = self.policy.standing if has_order else None
        self._block_size = block_size
        self._rng = rng
        self._books: dict[int, RankBooks] = {}
        self._polled: dict[int, tuple[RankBooks, RankState]] = {}  # with stale(MS): the books and reports at that time
        self._polled_s = float("-inf")
        self._states: dict[int, RankState] = {}
        self._slots: list[int] = []
        self._many_ranks = many_ranks
        self._enough_ranks = min(many_ranks, FEW_RANKS) if has_order else many_ranks
        self._board: Board | None = None  # if there are many ranks, from the first decision on
        self._booked: dict[Hashable, tuple[int, Prompt, int]] = {}
        self._held: dict[Hashable, tuple[float, Prompt]] = {}  # held since, in order

    @property
    def index(self) -> Index | None:
        """Which rank has which prefix, if it matters to the mode."""
        return None if self._caches is None else self._caches.index

    def add_rank(self, slot: int, *, has_events: bool = True) -> None:
        """Route to a rank from now on, in a free slot. The cache of a rank without events is predicted."""
        self._books[slot] = RankBooks()
        self._slots, self._board = sorted(self._books), None
        if self._caches is not None and not has_events:
            self._caches.add_silent(slot)

    def remove_rank(self, slot: int) -> None:
        """Forget a rank, its cache and its bookings."""
        if self._books.pop(slot, None) is None:
            return
        self._slots, self._board = sorted(self._books), None
        self._booked = {id: booking for id, booking in self._booked.items() if booking[0] != slot}
        self._busy.discard(slot)
        self._capacities.pop(slot, None)
        self._full.discard(slot)
        self._adapters.drop(slot)
        if self._caches is not None:
            self._caches.drop(slot)
        self._polled.pop(slot, None)
        self._states.pop(slot, None)

    def on_load(
        self,
        slot: int,
        kv_usage: float,
        num_waiting: int = 0,
        *,
        num_running: int = 0,
        max_num_seqs: int = 0,
        now: float = 0.0,
    ) -> None:
        """Record a rank's share of KV blocks in use, its queue and its batch (`max_num_seqs` 0: unknown)."""
        self._states[slot] = RankState(kv_usage, num_waiting)
        if self._busy_threshold is not None and kv_usage > self._busy_threshold:
            self._busy.add(slot)
        else:
            self._busy.discard(slot)
        if max_num_seqs and self._max_queue_depth is not None:
            capacity = self._capacities.setdefault(slot, RankCapacity())
            capacity.on_report(num_running, num_waiting, max_num_seqs, kv_usage=kv_usage, now=now)
            self._note_full(slot)

    def pick(
        self,
        request_id: Hashable,
        prompt: Prompt,
        now: float,
        only: int | None = None,
        avoid: frozenset[int] = frozenset(),
        is_refusable: bool = True,
        *,
        is_local: bool = False,
        wants_costs: bool = False,
    ) -> RoutingDecision:
        """Choose a rank for a request, or use the one it must go to (`only`), and book it there.

        Ranks to `avoid`, which have failed this request before, are chosen only if there is no other. A request that
        was accepted before is not refusable: it goes to a full rank if there is no other. A local request's prompt is
        computed by its decode rank; this does not matter to routers of other stages. The decision has the cost of every
        candidate if it is wanted, or was needed.

        Raises:
            NoWorkersError: there is none.
            AllBusyError: all are busy.
            AllFullError: all are full, and the request is refusable.
        """
        is_remote = self.stage == "decode" and not is_local
        candidates = self._candidates(self._eligible(only, avoid, is_refusable), prompt, now, is_remote=is_remote)
        costs, place = self._score(candidates, wants_costs=wants_costs)
        return self._take(request_id, candidates, costs, place, now, is_remote=is_remote)

    def peek(self, prompt: Prompt, now: float) -> RoutingDecision:
        """Return what `pick` would choose for a (local) prompt; book nothing, and do not affect the next choice.

        Raises:
            NoWorkersError, AllBusyError, AllFullError: as `pick`.
        """
        drawn, polled = self._rng.getstate(), (self._polled_s, self._polled)
        candidates = self._candidates(self._eligible(), prompt, now)
        costs, place = self._score(candidates)
        self._rng.setstate(drawn)
        self._polled_s, self._polled = polled
        return self._decision(candidates, costs, place)

    def _eligible(
        self, only: int | None = None, avoid: frozenset[int] = frozenset(), is_refusable: bool = True
    ) -> list[int]:
        """Return the ranks that a request may go to, or raise what `pick` raises."""
        slots = self._slots if only is None else [only] if only in self._books else []
        if not slots:
            raise NoWorkersError(NOBODY)
        if self._busy:
            slots = [slot for slot in slots if slot not in self._busy]
            if not slots:
                raise AllBusyError("all workers are busy")
        if avoid:
            slots = [slot for slot in slots if slot not in avoid] or slots
        if self._full:
            roomy = [slot for slot in slots if slot not in self._full]
            if not roomy and is_refusable:
                raise AllFullError("all workers are full")
            slots = roomy or slots
        return slots

    def _note_full(self, slot: int) -> None:
        """Note whether a rank is full now; only one that reports what it runs can be."""
        capacity, depth = self._capacities.get(slot), self._max_queue_depth
        if capacity is not None and depth is not None and capacity.is_full(self._books[slot].num_requests, depth):
            self._full.add(slot)
        else:
            self._full.discard(slot)

    @property
    def may_hold(self) -> bool:
        """Whether `place` may let requests wait here."""
        return self._mode.is_held

    def place(self, request_id: Hashable, prompt: Prompt, now: float) -> RoutingDecision | None:
        """Choose a rank as `pick` does; with the addition late(H), None if the request waits at the router for now.

        Whenever a request has its first token or ends, or a rank joins or leaves, the caller must call `next_held` and
        `release` until that returns None.

        Raises:
            NoWorkersError: there is no rank.
        """
        if not self._mode.is_held:
            return self.pick(request_id, prompt, now)
        decision = None if self._held else self._place_now(request_id, prompt, now)
        if decision is None:
            self._held[request_id] = (now, prompt)
        return decision

    def next_held(self, now: float) -> tuple[Hashable, Prompt] | None:
        """Return the next of the requests that wait here: by arrival or, with wspt(A), by least cost.

        None if no request waits, or there is no rank to wait for.
        """
        if not (self._held and self._slots):
            return None
        request_id = next(iter(self._held))
        if self._mode.wspt is not None:
            request_id = min(self._held, key=lambda held: self._urgency(held, now))
        return request_id, self._held[request_id][1]

    def release(self, request_id: Hashable, now: float) -> RoutingDecision | None:
        """Place a request that waits here, unless it must keep waiting."""
        decision = self._place_now(request_id, self._held[request_id][1], now)
        if decision is not None:
            del self._held[request_id]
        return decision

    def _urgency(self, request_id: Hashable, now: float) -> float:
        arrived, prompt = self._held[request_id]
        missing = min(self._candidates(self._slots, prompt, now).missing_tokens)
        return missing - (self._mode.wspt or 0.0) * (now - arrived) * 1000

    def _place_now(self, request_id: Hashable, prompt: Prompt, now: float) -> RoutingDecision | None:
        """Place a request unless the queue at its best rank is too long.

        Raises:
            NoWorkersError: there is none.
        """
        if not self._slots:
            raise NoWorkersError(NOBODY)
        is_remote = self.stage == "decode"
        candidates = self._candidates(self._slots, prompt, now, is_remote=is_remote)
        costs, place = self._score(candidates)
        if self._books[candidates.slots[place]].prefill_tokens >= self._mode.late:
            return None
        return self._take(request_id, candidates, costs, place, now, is_remote=is_remote)

    def _candidates(self, slots: list[int], prompt: Prompt, now: float, *, is_remote: bool = False) -> Candidates:
        """Gather what the policy may ask for; if a prompt is computed elsewhere, none of it counts as cached."""
        books, reported = self._books, self._states
        if self._mode.stale:
            books, reported = self._as_polled(now)
        if self._mode.bound:
            slots = list(compress(slots, within_bound([books[slot].num_requests for slot in slots], self._mode.bound)))
        if prompt.adapter:
            slots = self._adapters.preferred(slots, prompt.adapter, books)
        board = self._board_of_many(len(slots))
        on_gpu, beyond = NOTHING_ON_GPU, None
        if self._caches is not None and not is_remote:
            on_gpu, beyond = self._overlaps(self._caches, prompt, books, slots, now)
        return Candidates(
            slots,
            [books[slot] for slot in slots] if board is None else board.columns(slots),
            on_gpu,
            prompt,
            self._block_size,
            now=now,
            states=reported,
            beyond_gpu=beyond,
            weights=self.policy.tier_weights,
        )

    def _as_polled(self, now: float) -> tuple[dict[int, RankBooks], dict[int, RankState]]:
        """Return books and reports as they were when last polled; those of ranks that have come since, as they are."""
        if now - self._polled_s >= self._mode.stale / 1000:
            self._polled_s = now
            self._polled = {
                slot: (book.snapshot(), self._states.get(slot, NO_STATE)) for slot, book in self._books.items()
            }
        books = self._books | {slot: book for slot, (book, _) in self._polled.items()}
        return books, self._states | {slot: state for slot, (_, state) in self._polled.items()}

    def _board_of_many(self, num_candidates: int) -> Board | None:
        """Return the books as arrays, if that is faster; not of what was polled."""
        least = self._enough_ranks if num_candidates == len(self._books) else self._many_ranks
        if num_candidates < least or self._mode.stale:
            return None
        if self._board is None:
            self._board = Board(self._books, self._standing, self._block_size)
            for slot, prompt, _ in self._booked.values() if self._has_load else ():
                self._board.add(slot, prompt.blocks)
        return self._board

    def _overlaps(
        self, caches: Caches, prompt: Prompt, books: dict[int, RankBooks], slots: list[int], now: float
    ) -> tuple[dict[int, int], dict[int, BeyondGpu] | None]:
        """Return the blocks of a prompt that ranks have on their GPUs, and those that they can fetch after them."""
        if not self.policy.shares_in_flight:
            found = caches.on_gpu(blocks := prompt.blocks, now)
        else:
            found = caches.on_gpu(blocks := prompt.savable_blocks(self._block_size), now)
            if self._board is not None:
                found = more(found, self._board.active_blocks(blocks))
            else:
                found = more(found, {slot: books[slot].num_active_blocks(blocks) for slot in slots})
        return found, caches.beyond_gpu(blocks, found, slots)

    def _score(self, candidates: Candidates, *, wants_costs: bool = False) -> tuple[Sequence[float], int]:
        """Return the cost of each candidate, none if the choice is clear without, and the index of the chosen one."""
        if self._may_know and candidates.are_many and not wants_costs:
            place = self.policy.known(candidates)
            if place is not None:
                return (), place
        costs = self.policy.costs(candidates)
        if len(costs) != len(candidates):  # a user's mode may be wrong
            raise ValueError(f"the router mode returned {len(costs)} costs for {len(candidates)} workers")
        return costs, choose(costs, self._temperature, self._rng, self._tolerance)

    def _take(
        self,
        request_id: Hashable,
        candidates: Candidates,
        costs: Sequence[float],
        place: int,
        now: float,
        *,
        is_remote: bool,
    ) -> RoutingDecision:
        """Book a request where it was placed."""
        decision, prompt = self._decision(candidates, costs, place), candidates.prompt
        slot = decision.slot
        self.policy.routed(candidates, place)
        if prompt.adapter:
            self._adapters.sent(slot, prompt.adapter)
        if is_remote:
            self.book(request_id, slot, prompt, 0)
            self.on_first_token(request_id)  # it only decodes here, and counts as decoding from the start
        else:
            self.book(request_id, slot, prompt, decision.prefill_tokens)
        if self._caches is not None:
            self._caches.routed(slot, prompt.blocks, now)
        return decision

    def _decision(self, candidates: Candidates, costs: Sequence[float], place: int) -> RoutingDecision:
        slot = candidates.slots[place]
        cached = candidates.cached(slot)
        return RoutingDecision(
            slot,
            candidates.num_found(slot),
            cached.on_gpu,
            candidates.prompt.num_tokens - round(cached.matched * self._block_size),
            candidates.best_blocks if self._has_overlap else None,
            candidates,
            costs,
        )

    def book(self, request_id: Hashable, slot: int, prompt: Prompt, prefill_tokens: int) -> None:
        """Enter a request in a rank's books: our own, or one that another router sent there."""
        books = self._books[slot]
        if self.stage != "aggregated":
            prompt = self._as_held(request_id, prompt)
        if self._has_load:
            has_tail, tokens = prompt.has_tail(self._block_size), prompt.num_tokens
            books.add(prompt.blocks, has_tail=has_tail, prompt_tokens=tokens, prefill_tokens=prefill_tokens)
            if self._board is not None:
                self._board.add(slot, prompt.blocks)
        else:
            books.num_requests += 1
            if self._board is not None:
                self._board.note(slot)
        self._booked[request_id] = (slot, prompt, prefill_tokens)
        if self._capacities:
            self._note_full(slot)

    def _as_held(self, request_id: Hashable, prompt: Prompt) -> Prompt:
        """Return the blocks that a request holds at a rank of its stage: none that last, or only blocks of its own."""
        if self.stage == "prefill":
            return Prompt(0, PromptBlocks.of(()))
        num_blocks = prompt.blocks.num_blocks
        own = PromptBlocks(((request_id,),), num_blocks, num_blocks) if num_blocks else PromptBlocks.of(())
        return Prompt(prompt.num_tokens, own)

    def on_first_token(self, request_id: Hashable) -> None:
        """Release the prefill part of a booking; a second call, or an unknown request, changes nothing."""
        booking = self._booked.get(request_id)
        if booking is not None and booking[2] >= 0:
            slot, prompt, prefill_tokens = booking
            if self._has_load:
                books = self._books[slot]
                books.prefill_tokens -= prefill_tokens
                books.num_decoding += 1
                books.context_tokens += prompt.num_tokens
                if self._board is not None:
                    self._board.note(slot)
            self._booked[request_id] = (slot, prompt, -1)

    def on_finish(self, request_id: Hashable) -> None:
        """Release a booking, or stop holding a request, whichever way it ended; unknown requests change nothing."""
        booking = self._booked.get(request_id)
        if booking is None:
            self._held.pop(request_id, None)
            return
        slot, prompt, prefill_tokens = booking
        if prefill_tokens < 0 and (capacity := self._capacities.get(slot)) is not None:
            capacity.on_end()
        self.on_first_token(request_id)
        del self._booked[request_id]
        if self._has_load:
            books = self._books[slot]
            books.num_decoding -= 1
            books.context_tokens -= prompt.num_tokens
            has_tail = prompt.has_tail(self._block_size)
            books.remove(prompt.blocks, has_tail=has_tail, prompt_tokens=prompt.num_tokens)
            if self._board is not None:
                self._board.remove(slot, prompt.blocks)
        else:
            self._books[slot].num_requests -= 1
            if self._board is not None:
                self._board.note(slot)
        if self._capacities:
            self._note_full(slot)

    @property
    def is_oracle(self) -> bool:
        """Whether it must be given information that no live router has."""
        return self._mode.is_oracle

    @property
    def held(self) -> list[Hashable]:
        """The requests that wait at the router."""
        return list(self._held)

    @property
    def num_held(self) -> int:
        """The number of requests that wait at the router."""
        return len(self._held)

    def load(self, slot: int) -> RankBooks:
        """Return the books of a rank."""
        return self._books[slot]


def _is_known_without_costs(kind: type[Policy]) -> bool:
    """Return whether a mode's `known` goes with its costs: a mode derived from another one may change only those."""
    for each in kind.__mro__:
        if "known" in vars(each) or "standing" in vars(each):
            return each is not Policy
        if "costs" in vars(each) or "cost" in vars(each):
            return False
    return False
