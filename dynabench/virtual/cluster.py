"""The cluster in virtual time: arrivals, router and engines on a simpy clock.

At one instant completions come before arrivals, and arrivals before scheduling. A worker's step may
leap over many iterations; an arrival at that worker cuts it, and a routing decision first takes in the KV events
of the iterations that have ended.
"""

import math
from collections import deque
from collections.abc import Callable
from functools import partial
from heapq import heappush
from typing import Any

import simpy

from dynabench.virtual.lockstep import Lockstep
from dynabench.virtual.oracles import best_by_rollout, true_work
from dynabench.virtual.overhead import Overhead
from mocker import AllBlocksCleared, BlockChain, BlockStored, Engine, EngineConfig, Sequence
from mocker.engine import NO_LIMIT
from mocker.events import KvEvent
from reports.records import RequestLog
from serving.router import Decision, Prompt, Router
from serving.router.index import PrefixIndex
from serving.router.predicting_policies import OracleLoad, OracleRollout
from workloads import Request, Workload, WorkloadError
from workloads.pacing import LoadConfig, Pacer

FEW_WORKERS = 16
COMPLETION, ARRIVAL, SCHEDULING = 0, 1, 2


class StalledError(RuntimeError):
    """The simulation ended with unfinished requests."""


class Appointment(simpy.Event):
    """An event that calls back at its time and carries nothing."""

    _ok = True
    _value = None

    def __init__(self, callback: Callable[[Any], None]) -> None:
        self.callbacks = [callback]


class Clock(simpy.Environment):
    """A simpy environment with appointments at absolute times, so that sums of delays do not round."""

    def at(self, time: float, priority: int, callback: Callable[[Any], None]) -> None:
        """Call back at a time; of equal times, the lower priority number comes first."""
        heappush(self._queue, (time, priority, next(self._eid), Appointment(callback)))  # type: ignore[misc]


class Worker:
    """One engine on the clock."""

    def __init__(self, number: int, engine: Engine, cluster: "Cluster") -> None:
        self.number = number
        self.engine = engine
        self._cluster = cluster
        self._clock = cluster.clock
        self.caught_up_s = -1.0
        """When the router last took in this worker's leap."""
        self.lockstep: Lockstep | None = None
        """The ranks it takes its steps with."""
        self._wake_at = -1.0  # the appointment that counts; others are left over from cut leaps
        self._is_starting = False

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks in use."""
        return 1 - self.engine.num_free_blocks / self.engine.config.num_usable_blocks

    def add(self, sequence: Sequence) -> None:
        """Take a request."""
        self.engine.add(sequence)
        if self.lockstep is not None:
            self.lockstep.wake()
            return
        step = self.engine.step
        if step is None:
            self._start_soon()
        elif step.cut(self._clock.now):
            self._wake_at = step.end
            self._clock.at(step.end, COMPLETION, self._complete)

    def _start_soon(self) -> None:
        if not self._is_starting:
            self._is_starting = True
            self._clock.at(self._clock.now, SCHEDULING, self._start)

    def _start(self, _: object = None) -> None:
        self._is_starting = False
        step = self.engine.schedule(self._clock.now, max_iterations=NO_LIMIT)
        if step is not None:
            self._wake_at = step.end
            self._clock.at(step.end, COMPLETION, self._complete)

    def _complete(self, _: object) -> None:
        now = self._clock.now
        if now != self._wake_at or self.engine.step is None:
            return
        self.finish_step()
        if self._clock.peek() > now:
            self._start()
        else:
            self._start_soon()

    def finish_step(self) -> None:
        """End the step in flight and pass on what it brought."""
        output = self.engine.complete()
        if self._cluster.sends_events_at_once and self.engine.has_events:
            self._cluster.on_events(self)
        if output.sampled or output.finished:
            self._cluster.on_output(self, output.sampled, output.finished, output.end)


class Cluster:
    """Workers behind a router, fed with a workload."""

    def __init__(
        self,
        workload: Workload,
        *,
        engine: EngineConfig,
        router: Router,
        num_workers: int,
        load: LoadConfig = LoadConfig(),  # noqa: B008 (frozen)
        overhead: Overhead = Overhead(),  # noqa: B008
        kv_event_delay_s: float = 0.0,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        self.clock = Clock()
        self.router = router
        self._workload = workload
        self._delay_s = kv_event_delay_s = 0.0 if router.is_oracle else kv_event_delay_s
        self._index = router.index if isinstance(router.index, PrefixIndex) else None
        self._on_progress = on_progress
        self._overhead = overhead
        self._answer_s = overhead.answer_s
        self._is_delayed = overhead.before(1) > 0 or overhead.spacing_s > 0
        self._turn_s = -math.inf
        """When the frontend turned to the last request."""
        self.delays_s = 0.0
        """What all requests together spent between their clients and the router."""
        self._block_size = engine.block_size
        self._grouping = _Grouping(workload.block_size, engine.block_size)
        events = router.wants_events
        self.workers = [
            Worker(number, Engine(engine, kv_events=events, ordered_events=False), self)
            for number in range(num_workers * engine.dp_size)
        ]
        if engine.enable_expert_parallel and engine.dp_size > 1:
            for first in range(0, len(self.workers), engine.dp_size):
                ranks = self.workers[first : first + engine.dp_size]
                lockstep = Lockstep(self.clock, ranks)
                for worker in ranks:
                    worker.lockstep = lockstep
        for worker in self.workers:
            router.add_worker(worker.number)
        self.pacer = Pacer(workload, load)
        self.log = RequestLog(len(workload))
        self.num_finished = 0
        self._awaited_s = -1.0  # of the arrivals' next appointment
        self._held: dict[int, Sequence] = {}
        self.is_rollout = isinstance(router.policy, OracleRollout)
        self.shared = (workload, workload.requests)
        """What copies need not copy."""
        self._is_paced = load.is_closed or load.max_concurrency is not None or workload.has_dependencies
        self._warmup_s = load.warmup_s
        self.first_gap_rows = [0] * len(self.workers)
        self._caught_up_s = -1.0
        # With few workers, events wait in their engine until a decision asks for them: fewer, larger batches.
        self.sends_events_at_once = kv_event_delay_s > 0 or num_workers * engine.dp_size > FEW_WORKERS
        self._in_transit: deque[tuple[float, int, list[KvEvent]]] = deque()

    def run(self) -> None:
        """Run until every request is finished.

        Raises:
            StalledError: some never do.
        """
        requests = self._workload.requests
        self._await_arrivals()
        if self._warmup_s:
            self.clock.at(self._warmup_s, ARRIVAL, self._end_warmup)
        self.clock.run()
        if self.num_finished != len(requests):
            waiting = [s for worker in self.workers for s in worker.engine.scheduler.waiting]
            running = [s for worker in self.workers for s in worker.engine.scheduler.running]
            raise StalledError(
                f"{len(requests) - self.num_finished} requests never finished; waiting: {waiting[:5]}, running: {running[:5]}"
            )

    def resume(self, until: float) -> None:
        """Run on until a time."""
        self._await_arrivals()
        self.clock.run(until)

    def send_to(self, number: int, worker: int) -> None:
        """Send a request to a worker, whatever the router thinks."""
        prompt, sequence = self._prepared(number)
        self._send(number, sequence, self.router.pick(number, prompt, self.clock.now, only=worker))

    def on_output(self, worker: Worker, sampled: list[Sequence], finished: list[Sequence], now: float) -> None:
        """Record first tokens and finishes."""
        router, log = self.router, self.log
        for sequence in sampled:
            router.on_first_token(sequence.id)
        for sequence in finished:
            number = sequence.id
            assert isinstance(number, int)
            router.on_finish(number)
            log.worker[number] = worker.number
            log.cached_tokens[number] = sequence.cached_tokens
            log.preemptions[number] = sequence.num_preemptions
            log.admitted_s[number] = sequence.first_scheduled_s
            log.first_token_s[number] = sequence.first_token_s + self._answer_s
            log.last_token_s[number] = now + self._answer_s
            self.pacer.on_end(number, now + self._answer_s)
        self.num_finished += len(finished)
        if finished and self._on_progress is not None:
            self._on_progress(self.num_finished)
        if finished and self._is_paced:
            self._await_arrivals()
        if self._held:
            self._release()

    def _await_arrivals(self) -> None:
        """Make an appointment with the next request that can come, unless there is one already."""
        next_s = self.pacer.next_s()
        if next_s is not None and not self.clock.now <= self._awaited_s <= next_s:
            self._awaited_s = next_s = max(next_s, self.clock.now)
            self.clock.at(next_s, ARRIVAL, self._arrive)

    def _arrive(self, _: object) -> None:
        now = self.clock.now
        self._awaited_s = -1.0
        while self._in_transit and self._in_transit[0][0] <= now:
            _, worker, events = self._in_transit.popleft()
            self._apply(worker, events)
        for number, intended in self.pacer.due(now):
            self.log.intended_s[number] = intended
            if self._is_delayed:
                turn = self._turn_s = max(now, self._turn_s + self._overhead.spacing_s)
                passed = turn + self._overhead.before(self._workload.requests[number].input_length)
                self.delays_s += passed - now
                self.clock.at(passed, ARRIVAL, partial(self._dispatch, number))
            else:
                self._dispatch(number)
        self._await_arrivals()

    def _prepared(self, number: int) -> tuple[Prompt, Sequence]:
        """Return a request as the router and as an engine take it."""
        request = self._workload.requests[number]
        chain = self._grouping.chain(request)
        prompt = Prompt(request.input_length, chain.ids, chain.num_named, chain.blocks_per_id, request.session or None)
        sequence = Sequence(
            number,
            num_prompt=request.input_length,
            max_tokens=request.output_length,
            chain=chain,
            arrival=self.clock.now,
        )
        return prompt, sequence

    def _dispatch(self, number: int, _: object = None) -> None:
        now = self.clock.now
        prompt, sequence = self._prepared(number)
        if self._index is not None:
            self._catch_up(prompt, now)
        if self.router.policy.needs_state:
            for worker in self.workers:
                self.router.on_load(worker.number, worker.kv_usage, len(worker.engine.scheduler.waiting))
        if self.is_rollout:
            self.send_to(number, best_by_rollout(self, number))
            return
        if isinstance(self.router.policy, OracleLoad):
            self.router.policy.truth = [true_work(worker.engine, now) for worker in self.workers]
            self.router.policy.output_length = self._workload.requests[number].output_length
        decision = self.router.place(number, prompt, now)
        if decision is None:
            self._held[number] = sequence
        else:
            self._send(number, sequence, decision)

    def _release(self) -> None:
        """Send what the router held and holds no longer."""
        for number, decision in self.router.release(self.clock.now):
            assert isinstance(number, int)
            self._send(number, self._held.pop(number), decision)

    def _send(self, number: int, sequence: Sequence, decision: Decision) -> None:
        worker = decision.worker
        log = self.log
        log.predicted_tokens[number] = decision.overlap_blocks * self._block_size
        if decision.overlaps:
            log.best_tokens[number] = max(decision.overlaps) * self._block_size
        log.queue_depth[number] = self.router.load(worker).num_requests - 1
        self.workers[worker].add(sequence)

    def _end_warmup(self, _: object) -> None:
        """Begin to count gaps between tokens: what was logged until now belongs to the warm-up."""
        for place, worker in enumerate(self.workers):
            self.first_gap_rows[place] = worker.engine.split_log(self.clock.now)

    def on_events(self, worker: Worker) -> None:
        """Send a worker's KV events to the router."""
        events = worker.engine.take_events()
        if self._delay_s:
            self._in_transit.append((self.clock.now + self._delay_s, worker.number, events))
        else:
            self._apply(worker.number, events)

    def _catch_up(self, prompt: Prompt, now: float) -> None:
        """Take in the iterations that have ended inside leaps, at the workers where that can change this decision.

        Inside a leap only evictions matter to the router, so a worker without overlap has nothing to add; among few
        workers, asking all is cheaper than finding out which have any.
        """
        assert self._index is not None
        if len(self.workers) <= FEW_WORKERS:
            if now == self._caught_up_s:
                return
            self._caught_up_s = now
            workers = self.workers
        else:
            found = self._index.overlaps(prompt.ids, prompt.num_blocks, prompt.blocks_per_id)
            workers = [self.workers[number] for number in found]
        for worker in workers:
            engine = worker.engine
            step = engine.step
            if step is not None and step.num_iterations > 1 and worker.caught_up_s != now:
                worker.caught_up_s = now
                engine.advance(now)
            if engine.has_events:
                self.on_events(worker)

    def _apply(self, worker: int, events: list[KvEvent]) -> None:
        """Enter KV events into the index; blocks that only their own request could ask for are left out."""
        index = self._index
        assert index is not None
        for event in events:
            assert not isinstance(event, AllBlocksCleared)
            chain = event.chain
            stop = event.stop if event.stop < chain.num_named else chain.num_named
            if event.start < stop:
                if isinstance(event, BlockStored):
                    index.store(worker, chain.ids, start=event.start, stop=stop, blocks_per_id=chain.blocks_per_id)
                else:
                    index.remove(worker, chain.ids, start=event.start, stop=stop, blocks_per_id=chain.blocks_per_id)


class _Grouping:
    """Translates a workload's block ids to the engine's block size."""

    def __init__(self, trace_block: int, engine_block: int) -> None:
        if trace_block % engine_block and engine_block % trace_block:
            raise WorkloadError(
                f"block_size {engine_block} neither divides the workload's blocks of {trace_block} tokens nor is a multiple"
            )
        self._size = engine_block
        self._split = max(trace_block // engine_block, 1)
        self._join = max(engine_block // trace_block, 1)

    def chain(self, request: Request) -> BlockChain:
        """Name the blocks of a request's prompt; full ones are shared, the rest is its own."""
        ids = request.hash_ids
        if self._join > 1:  # ids are chained, so the last of a group stands for all of it
            ids = ids[self._join - 1 :: self._join]
        return BlockChain(ids, request.input_length // self._size, blocks_per_id=self._split)
