"""The cluster in virtual time: arrivals, router and engines on a simpy clock.

At one instant completions come before arrivals, and arrivals before scheduling. A worker's step may
leap over many iterations; an arrival at that worker cuts it, and a routing decision first takes in the KV events
of the iterations that have ended.
"""

import math
from collections import deque
from collections.abc import Callable
from functools import partial

from dynabench.deployment.engines import context_of
from dynabench.deployment.overhead import Overhead
from dynabench.virtual.clock import ARRIVAL, Clock
from dynabench.virtual.oracles import true_work
from dynabench.virtual.worker import Lockstep, Worker
from mocker import AllBlocksCleared, BlockChain, BlockStored, Engine, Sequence, StepOutput
from mocker.events import KvEvent
from mocker.timing.choose import SimulatedEngine
from reports.records import RequestLog
from serving.router import Decision, Prompt, PromptBlocks, Router
from serving.router.index import PrefixIndex
from workloads import Request, Workload, WorkloadError
from workloads.pacing import LoadConfig, Pacer

FEW_WORKERS = 16


class StalledError(RuntimeError):
    """The simulation ended with unfinished requests."""


class Cluster:
    """Workers behind a router, fed with a workload."""

    def __init__(
        self,
        workload: Workload,
        engines: list[SimulatedEngine],
        router: Router,
        *,
        load: LoadConfig = LoadConfig(),  # noqa: B008 (frozen)
        overhead: Overhead = Overhead(),  # noqa: B008
        kv_event_delay_s: float = 0.0,
        choose: "Callable[[Cluster, int], int] | None" = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        """Build an idle cluster.

        Args:
            workload: what is sent.
            engines: that of each worker; their KV blocks are of one size.
            router: spreads the requests.
            load: how they are sent.
            overhead: what lies between a client and the engines.
            kv_event_delay_s: time until a KV event reaches the router (s).
            choose: names the worker of a request by its number, instead of the router.
            on_progress: is told how many requests have ended.
        """
        self.clock = Clock()
        self.router = router
        self.choose = choose
        self.workers: list[Worker] = []
        for engine in engines:
            self._add_worker(engine)
        self.pacer = Pacer(workload, load)
        self.log = RequestLog(len(workload))
        self.num_finished = 0
        self.first_gap_rows = [0] * len(self.workers)
        self.delays_s = 0.0
        """What all requests together spent between their clients and the router."""
        self._workload = workload
        self._overhead = overhead
        self._block_size = engines[0].config.block_size
        self._grouping = _Grouping(workload.block_size, self._block_size)
        self._on_progress = on_progress
        self._turn_s = -math.inf  # when the frontend turned to the last request
        self._awaited_s = -1.0  # of the arrivals' next appointment
        self._held: dict[int, Sequence] = {}
        self._is_paced = load.is_closed or load.max_concurrency is not None or workload.has_dependencies
        self._warmup_s = load.warmup_s
        self._context = context_of(engines)
        self._index = router.index if isinstance(router.index, PrefixIndex) else None
        self._caught_up_s = -1.0
        self._delay_s = 0.0 if router.is_oracle else kv_event_delay_s
        # With few workers, events wait in their engine until a decision asks for them: fewer, larger batches.
        self._sends_events_at_once = self._delay_s > 0 or len(self.workers) > FEW_WORKERS
        self._in_transit: deque[tuple[float, int, list[KvEvent]]] = deque()

    @property
    def shared(self) -> tuple[object, ...]:
        """What copies of the cluster need not copy."""
        return self._workload, self._workload.requests

    def run(self) -> None:
        """Run until every request is finished.

        Raises:
            StalledError: some never do.
        """
        count = len(self._workload)
        self._await_arrivals()
        if self._warmup_s:
            self.clock.at(self._warmup_s, ARRIVAL, self._end_warmup)
        self.clock.run()
        if self.num_finished != count:
            waiting = [s for worker in self.workers for s in worker.engine.scheduler.waiting]
            running = [s for worker in self.workers for s in worker.engine.scheduler.running]
            raise StalledError(
                f"{count - self.num_finished} requests never finished; waiting: {waiting[:5]}, running: {running[:5]}"
            )

    def resume(self, until: float) -> None:
        """Run on until a time."""
        self._await_arrivals()
        self.clock.run(until)

    def send_to(self, number: int, worker: int) -> None:
        """Send a request to a worker, whatever the router thinks."""
        prompt, sequence = self._prepared(number)
        self._send(number, sequence, self.router.pick(number, prompt, self.clock.now, only=worker))

    def _add_worker(self, engine: SimulatedEngine) -> None:
        """Put the ranks of a worker on the clock, each routed to by itself."""
        first = len(self.workers)
        for number in range(first, first + engine.config.dp_size):
            core = Engine(
                engine.config,
                engine.timing,
                num_blocks=engine.num_blocks,
                kv_events=self.router.wants_events,
                ordered_events=False,
            )
            self.workers.append(Worker(number, core, self.clock, on_step=self._on_step))
            self.router.add_worker(number)
        if engine.is_lockstep:
            Lockstep(self.clock, self.workers[first:])

    def _on_step(self, worker: Worker, output: StepOutput) -> None:
        """Take in what a worker's step brought."""
        if self._sends_events_at_once and worker.engine.has_events:
            self._on_events(worker)
        if output.sampled or output.finished:
            self._on_output(worker, output)

    def _on_output(self, worker: Worker, output: StepOutput) -> None:
        """Record first tokens and finishes."""
        router, log, answer_s = self.router, self.log, self._overhead.answer_s
        for sequence in output.sampled:
            router.on_first_token(sequence.id)
        for sequence in output.finished:
            number = sequence.id
            assert isinstance(number, int)
            router.on_finish(number)
            log.worker[number] = worker.number
            log.cached_tokens[number] = sequence.cached_tokens
            log.preemptions[number] = sequence.num_preemptions
            log.finish_reason[number] = sequence.finish_reason
            log.admitted_s[number] = sequence.first_scheduled_s
            log.first_token_s[number] = sequence.first_token_s + answer_s
            log.last_token_s[number] = output.end + answer_s
            self.pacer.on_end(number, output.end + answer_s)
        self.num_finished += len(output.finished)
        if output.finished and self._on_progress is not None:
            self._on_progress(self.num_finished)
        if output.finished and self._is_paced:
            self._await_arrivals()
        if self._held:
            self._release()

    def _await_arrivals(self) -> None:
        """Make an appointment with the next request that can come, unless there is one already."""
        next_s = self.pacer.next_s()
        if next_s is not None and not self.clock.now <= self._awaited_s <= next_s:
            self._awaited_s = next_s = max(next_s, self.clock.now)
            self.clock.at(next_s, ARRIVAL, self._arrive)

    def _arrive(self) -> None:
        now = self.clock.now
        self._awaited_s = -1.0
        while self._in_transit and self._in_transit[0][0] <= now:
            _, worker, events = self._in_transit.popleft()
            self._apply(worker, events)
        for number, intended in self.pacer.due(now):
            self.log.intended_s[number] = intended
            passed = self._passed_on(number, now)
            if passed > now:
                self.delays_s += passed - now
                self.clock.at(passed, ARRIVAL, partial(self._dispatch, number))
            else:
                self._dispatch(number)
        self._await_arrivals()

    def _passed_on(self, number: int, now: float) -> float:
        """Return when the router gets a request that comes now (s)."""
        overhead = self._overhead
        turn = self._turn_s = max(now, self._turn_s + overhead.spacing_s)
        return turn + overhead.before(self._workload.requests[number].input_length)

    def _prepared(self, number: int) -> tuple[Prompt, Sequence]:
        """Return a request as the router and as an engine take it; an answer that ends by EOS has a limit beyond that."""
        request = self._workload.requests[number]
        chain = self._grouping.chain(request)
        blocks = PromptBlocks(chain.ids, chain.num_named, chain.blocks_per_id)
        prompt = Prompt(request.input_length, blocks, request.session or None)
        sequence = Sequence(
            number,
            num_prompt=request.input_length,
            max_tokens=request.max_tokens(self._context),
            stop_after=request.output_length if request.ends == "stop" else None,
            chain=chain,
            arrival=self.clock.now,
        )
        return prompt, sequence

    def _dispatch(self, number: int) -> None:
        now = self.clock.now
        prompt, sequence = self._prepared(number)
        if self._index is not None:
            self._catch_up(prompt, now)
        if self.router.policy.needs_state:
            for worker in self.workers:
                self.router.on_load(worker.number, worker.kv_usage, len(worker.engine.scheduler.waiting))
        if self.choose is not None:
            self.send_to(number, self.choose(self, number))
            return
        if self.router.policy.needs_truth:
            work = [true_work(worker.engine, now) for worker in self.workers]
            self.router.policy.on_truth(work, self._workload.requests[number].output_length)
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
        worker, log = decision.worker, self.log
        log.predicted_tokens[number] = decision.overlap_blocks * self._block_size
        if decision.overlaps:
            log.best_tokens[number] = max(decision.overlaps) * self._block_size
        log.queue_depth[number] = self.router.load(worker).num_requests - 1
        self.workers[worker].add(sequence)

    def _end_warmup(self) -> None:
        """Begin to count gaps between tokens: what was logged until now belongs to the warm-up."""
        for place, worker in enumerate(self.workers):
            self.first_gap_rows[place] = worker.engine.split_log(self.clock.now)

    def _on_events(self, worker: Worker) -> None:
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
            found = self._index.overlaps(prompt.blocks)
            workers = [self.workers[number] for number in found]
        for worker in workers:
            engine = worker.engine
            step = engine.step
            if step is not None and step.num_iterations > 1 and worker.caught_up_s != now:
                worker.caught_up_s = now
                engine.advance(now)
            if engine.has_events:
                self._on_events(worker)

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
                    index.store_blocks(worker, chain.ids, event.start, stop, chain.blocks_per_id)
                else:
                    index.remove_blocks(worker, chain.ids, event.start, stop, chain.blocks_per_id)


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
