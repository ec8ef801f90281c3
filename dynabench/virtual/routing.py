"""Placing requests among simulated workers: the router core, fed by the engines themselves."""

from collections import deque
from collections.abc import Iterator, Sequence

from dynabench.virtual.clock import Clock
from dynabench.virtual.oracles import true_work
from dynabench.virtual.worker import Worker
from mocker import AllBlocksCleared, BlockStored
from mocker.events import KvEvent, TierEvent, TierRemoved, TierStored
from serving.router import Decision, Prompt, Router
from serving.router.index import PrefixIndex

FEW_WORKERS = 16


class Routing:
    """Places requests among the workers that one router knows, which it knows by their number in the cluster."""

    def __init__(self, router: Router, clock: Clock, *, kv_event_delay_s: float) -> None:
        self.router = router
        self.workers: list[Worker] = []
        self._clock = clock
        self._index = router.index if isinstance(router.index, PrefixIndex) else None
        self._caught_up_s = -1.0
        self._delay_s = 0.0 if router.is_oracle else kv_event_delay_s
        self.sends_events_at_once = self._delay_s > 0
        """Whether events of workers are to be passed on as they come, rather than be asked for before a decision: that gives
        fewer, larger batches among few workers."""
        self._in_transit: deque[tuple[float, int, list[KvEvent]]] = deque()
        self._output_lengths: dict[int, int] = {}  # of those that wait at the router
        self._by_number: dict[int, Worker] = {}

    def add(self, worker: Worker) -> None:
        """Send requests to a worker, too."""
        self.workers.append(worker)
        self._by_number[worker.number] = worker
        self.router.add_worker(worker.number)
        self.sends_events_at_once = self._delay_s > 0 or len(self.workers) > FEW_WORKERS
        for each in self.workers if len(self.workers) == FEW_WORKERS + 1 else [worker]:
            each.engine.has_end_at_stores = self.router.wants_events and self.sends_events_at_once

    def remove(self, worker: Worker) -> None:
        """Send no more requests to a worker, if any were, and forget what it has cached."""
        if self._by_number.pop(worker.number, None) is not None:
            self.workers.remove(worker)
            self.router.remove_worker(worker.number)

    def place(
        self, number: int, prompt: Prompt, output_length: int, only: int | None = None, *, is_local: bool = False
    ) -> Decision | None:
        """Choose a worker for a request, or take the one it must go to, and book it; None if it waits at the router.

        It is local if a decode worker computes its prompt, too.
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
        """Release what is booked of a request, or let it wait at the router no longer."""
        self._output_lengths.pop(number, None)
        self.router.on_finish(number)

    def release(self) -> Iterator[tuple[int, Decision]]:
        """Yield what waits at the router no longer; each is to be sent before the next, which is placed with that in mind."""
        router, now = self.router, self._clock.now
        while (held := router.next_held(now)) is not None:
            number, prompt = held
            assert isinstance(number, int)
            self._inform(prompt, self._output_lengths[number])
            if (decision := router.release(number, now)) is None:
                return
            del self._output_lengths[number]
            yield number, decision

    def peek(self, prompt: Prompt, output_length: int) -> Decision:
        """Return what `place` would choose for a request whose prompt is computed here; book nothing."""
        self._inform(prompt, output_length)
        return self.router.peek(prompt, self._clock.now)

    def _inform(self, prompt: Prompt, output_length: int, only: int | None = None) -> None:
        """Give the router what its policy asks for before it chooses a worker, or takes the one that it must."""
        router, now = self.router, self._clock.now
        self.catch_up(prompt)
        if router.policy.needs_state:
            for worker in self.workers:
                router.on_load(worker.number, worker.kv_usage, worker.num_waiting)
        if router.policy.needs_truth:
            candidates = [worker for worker in self.workers if only in (None, worker.number)]
            router.policy.on_truth([true_work(worker.engine, now) for worker in candidates], output_length)

    def catch_up(self, prompt: Prompt) -> None:
        """Take in the iterations that have ended inside leaps, at the workers where that can change a decision.

        Inside a leap only evictions matter to the router, so a worker without overlap has nothing to add; among few
        workers, asking all is cheaper than finding out which have any.
        """
        if self._index is None:
            return
        now, workers = self._clock.now, self.workers
        while self._in_transit and self._in_transit[0][0] <= now:
            _, number, events = self._in_transit.popleft()
            self._apply(number, events)
        if len(workers) <= FEW_WORKERS:
            if now == self._caught_up_s:
                return
            self._caught_up_s = now
        else:
            workers = [self._by_number[number] for number in self._index.overlaps(prompt.blocks)]
        for worker in workers:
            engine = worker.engine
            step = engine.step
            if step is not None and step.num_iterations > 1 and worker.caught_up_s != now:
                worker.caught_up_s = now
                engine.advance(now)
            if engine.has_events:
                self.on_events(worker)

    def on_events(self, worker: Worker) -> None:
        """Send a worker's KV events to the router."""
        self._send(worker.number, worker.engine.take_events())

    def on_tier_events(self, worker: int, events: Sequence[TierEvent]) -> None:
        """Send the router events of a tier behind host memory: a worker's own if it knows the worker, a shared store's always."""
        if self._index is not None:
            is_known = worker in self._by_number
            self._send(worker, [event for event in events if is_known or event.medium == "SHARED"])

    def _send(self, worker: int, events: list[KvEvent]) -> None:
        if self._delay_s:
            self._in_transit.append((self._clock.now + self._delay_s, worker, events))
        else:
            self._apply(worker, events)

    def _apply(self, worker: int, events: list[KvEvent]) -> None:
        """Enter KV events into the index; blocks that only their own request could ask for are left out."""
        index = self._index
        assert index is not None
        is_known = worker in self._by_number
        for event in events:
            assert not isinstance(event, AllBlocksCleared)
            chain = event.chain
            if isinstance(event, (TierStored, TierRemoved)):
                if not is_known and event.medium != "SHARED":
                    continue
                size = event.blocks_per_chunk
                start, stop = event.start * size, min(event.stop, chain.num_named // size) * size
                if start < stop:
                    change = index.tiers.store if isinstance(event, TierStored) else index.tiers.remove
                    change(worker, event.medium, chain.ids, start, stop, chain.blocks_per_id)
                continue
            if not is_known:
                continue  # it left while they were on their way
            stop = event.stop if event.stop < chain.num_named else chain.num_named
            if event.start < stop:
                if isinstance(event, BlockStored):
                    index.store_blocks(worker, chain.ids, event.start, stop, chain.blocks_per_id)
                else:
                    index.remove_blocks(worker, chain.ids, event.start, stop, chain.blocks_per_id)
