"""Place requests among simulated ranks with the router core, which gets its events from the engines themselves."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from dynabench.virtual.clock import Clock
from dynabench.virtual.oracles import true_work
from dynabench.virtual.rank import Rank
from mocker import AllBlocksCleared, BlockStored
from mocker.events import (
    GroupRemoved,
    GroupStored,
    KvEvent,
    TierEvent,
    TierRemoved,
    TierStored,
    for_routers,
    shared_keys,
)
from serving.engines.mock.layer_groups import layer_group
from serving.router import Prompt, Router, RoutingDecision
from serving.router.index import PrefixIndex

FEW_RANKS: Final = 16


class Routing:
    """Places requests among the ranks that one router knows; the slot of each is its number in the cluster."""

    def __init__(self, router: Router, clock: Clock, *, kv_event_delay_s: float) -> None:
        self.router = router
        self.ranks: list[Rank] = []
        self._clock = clock
        self._index = router.index if isinstance(router.index, PrefixIndex) else None
        self._reads_more = router.policy.needs_state or router.policy.needs_truth
        self._caught_up_s = -1.0
        self._delay_s = 0.0 if router.is_oracle else kv_event_delay_s
        self.sends_events_at_once = self._delay_s > 0
        """Whether ranks push their events as they occur. Otherwise the router pulls them before a decision, which makes
        fewer, larger batches if there are few ranks."""
        self._in_transit: deque[tuple[float, int, list[KvEvent]]] = deque()
        self._output_lengths: dict[int, int] = {}  # for requests that wait at the router
        self._by_slot: dict[int, Rank] = {}

    def add(self, rank: Rank) -> None:
        """Start sending requests to a rank."""
        self.ranks.append(rank)
        self._by_slot[rank.number] = rank
        self.router.add_rank(rank.number)
        self.sends_events_at_once = self._delay_s > 0 or len(self.ranks) > FEW_RANKS
        for each in self.ranks if len(self.ranks) == FEW_RANKS + 1 else [rank]:
            each.engine.ends_at_stores = self.router.wants_events and self.sends_events_at_once

    def remove(self, rank: Rank) -> None:
        """Stop sending requests to a rank and forget what it has cached; do nothing if it is unknown."""
        if self._by_slot.pop(rank.number, None) is not None:
            self.ranks.remove(rank)
            self.router.remove_rank(rank.number)

    def place(
        self, number: int, prompt: Prompt, output_length: int, only: int | None = None, *, is_local: bool = False
    ) -> RoutingDecision | None:
        """Choose a rank for a request, or take `only`, and book it; return None if the request waits at the router.

        `is_local` means that a decode rank computes the prompt, too.
        """
        router, now = self.router, self._clock.now
        self._inform(prompt, output_length, only)
        if only is not None:
            return router.pick(number, prompt, now, only=only, is_local=is_local)
        decision = router.place(number, prompt, now)
        if decision is None:
            self._output_lengths[number] = output_length
        return decision

    def forget(self, number: int) -> None:
        """Release a request's bookings, or remove it from the router's queue."""
        self._output_lengths.pop(number, None)
        self.router.on_finish(number)

    @property
    def held(self) -> list[int]:
        """The requests that wait at the router."""
        return [number for number in self.router.held if isinstance(number, int)]

    def release(self) -> Iterator[tuple[int, RoutingDecision]]:
        """Yield requests that need not wait longer; send each before taking the next, which is placed accordingly."""
        router, now = self.router, self._clock.now
        while (held := router.next_held(now)) is not None:
            number, prompt = held
            assert isinstance(number, int)
            self._inform(prompt, self._output_lengths[number])
            if (decision := router.release(number, now)) is None:
                return
            del self._output_lengths[number]
            yield number, decision

    def peek(self, prompt: Prompt, output_length: int) -> RoutingDecision:
        """Return what `place` would choose for a request whose prompt is computed here; book nothing."""
        self._inform(prompt, output_length)
        return self.router.peek(prompt, self._clock.now)

    def _inform(self, prompt: Prompt, output_length: int, only: int | None = None) -> None:
        """Give the router the data that its policy needs to choose a rank."""
        router, now = self.router, self._clock.now
        self.catch_up(prompt)
        if router.policy.needs_state:
            for rank in self.ranks:
                router.on_load(rank.number, rank.kv_usage, rank.num_waiting)
        if router.policy.needs_truth:
            candidates = [rank for rank in self.ranks if only in (None, rank.number)]
            router.policy.on_truth([true_work(rank.engine, now) for rank in candidates], output_length)

    def catch_up(self, prompt: Prompt) -> None:
        """Process the iterations that have ended inside leaps, at the ranks where that can change a decision.

        Inside a leap only evictions matter to the router, so a rank without overlap can be skipped, and one that has
        blank blocks enough, unless the mode reads more than caches. Among few ranks, asking all is cheaper than finding
        out which have any overlap.
        """
        if self._index is None:
            return
        now, ranks = self._clock.now, self.ranks
        while self._in_transit and self._in_transit[0][0] <= now:
            _, slot, events = self._in_transit.popleft()
            self._apply(slot, events)
        if len(ranks) <= FEW_RANKS:
            if now == self._caught_up_s:
                return
            self._caught_up_s = now
        else:
            ranks = [self._by_slot[slot] for slot in self._index.starts(prompt.blocks)]
        for rank in ranks:
            engine = rank.engine
            if rank.caught_up_s != now and (self._reads_more or engine.may_evict):
                rank.caught_up_s = now
                engine.advance(now)
            if engine.outbox.events:
                self.on_events(rank)

    def on_events(self, rank: Rank) -> None:
        """Send a rank's KV events to the router."""
        self._send(rank.number, rank.engine.outbox.take_events())

    def on_tier_events(self, slot: int, events: Sequence[TierEvent]) -> None:
        """Send the router events of a tier behind host memory: a known rank's own, or those of a shared store."""
        if self._index is not None:
            is_known = slot in self._by_slot
            self._send(slot, [event for event in events if is_known or event.medium == "SHARED"])

    def _send(self, slot: int, events: list[KvEvent]) -> None:
        if self._delay_s:
            self._in_transit.append((self._clock.now + self._delay_s, slot, events))
        else:
            self._apply(slot, events)

    def _apply(self, slot: int, events: list[KvEvent]) -> None:
        """Enter KV events into the index, except blocks that only their own request could match."""
        index = self._index
        assert index is not None
        is_known = slot in self._by_slot
        for event in events:
            assert not isinstance(event, AllBlocksCleared)
            chain = event.chain
            if isinstance(event, (TierStored, TierRemoved)):
                if is_known or event.medium == "SHARED":
                    _apply_to_tiers(index, slot, event)
                continue
            if not is_known:
                continue  # it left while the events were on their way
            start, stop = event.start, event.stop
            is_stored = isinstance(event, BlockStored)
            if isinstance(event, OF_GROUPS):
                if not event.group.keeps_all:
                    _apply_to_group(index, slot, event)
                    continue
                start, stop = for_routers(event)
                is_stored = isinstance(event, GroupStored)
            stop = stop if stop < chain.num_named else chain.num_named
            if start < stop:
                if is_stored:
                    index.store_blocks(slot, chain.ids, start, stop, chain.blocks_per_id)
                else:
                    index.remove_blocks(slot, chain.ids, start, stop, chain.blocks_per_id)


OF_GROUPS = (GroupStored, GroupRemoved)


def _apply_to_group(index: PrefixIndex, slot: int, event: GroupStored | GroupRemoved) -> None:
    """Enter what layers that keep only a part stored or evicted, in whole blocks."""
    groups, names = index.layer_groups, shared_keys(event)
    if isinstance(event, GroupStored):
        groups.store(slot, layer_group(event.group), names)
    else:
        groups.remove(slot, event.group.number, names)


def _apply_to_tiers(index: PrefixIndex, slot: int, event: TierEvent) -> None:
    """Enter what a tier stored or evicted, in whole chunks."""
    chain, size = event.chain, event.blocks_per_chunk
    start, stop = event.start * size, min(event.stop, chain.num_named // size) * size
    if start < stop:
        change = index.tiers.store if isinstance(event, TierStored) else index.tiers.remove
        change(slot, event.medium, chain.ids, start, stop, chain.blocks_per_id)


class Routers(NamedTuple):
    """Who chooses the ranks."""

    decode: Routing
    """Those that answer."""
    prefill: Routing | None
    """Those that only compute prompts, if there are any."""
