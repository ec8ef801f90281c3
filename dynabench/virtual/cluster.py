"""The cluster in virtual time: arrivals, routers and engines on a simpy clock.

At one instant, completions come before arrivals, and arrivals before scheduling. A rank's step may leap over many
iterations. An arrival at that rank cuts the leap short, and a routing decision first catches up with the KV events of
the iterations that have ended.
"""

import math
import random
from collections.abc import Callable, Sequence
from functools import partial

from dynabench.deployment.engines import SimulatedPool, context_of, max_model_len_of, refusal_of
from dynabench.deployment.fleet import FleetConfig
from dynabench.deployment.overhead import Overhead
from dynabench.deployment.transfer import TransferConfig
from dynabench.kv_use import KvUse
from dynabench.virtual.clock import ARRIVAL, Clock
from dynabench.virtual.counter import Counter
from dynabench.virtual.fleet import Fleet, Hooks, Worker
from dynabench.virtual.grouping import Grouping
from dynabench.virtual.handover import Disaggregation, Handover
from dynabench.virtual.links import Links
from dynabench.virtual.losses import Losses
from dynabench.virtual.moves import Move, Moves
from dynabench.virtual.rank import Lockstep, Rank, number_of
from dynabench.virtual.routing import Routing
from dynabench.virtual.tiers import SourceColumns, Tiering
from dynabench.virtual.traffic import Traffic
from foundation.errors import UserError
from mocker import BlockChain, StepOutput, new_engine
from mocker import Sequence as EngineSequence
from mocker.events import TierEvent
from mocker.sequence import RUNNING
from mocker.timing.choose import SimulatedEngine
from mocker.timing.kv_size import KvSize
from reports.record.records import RequestLog
from serving.life import DisaggregationConfig
from serving.router import Decision, Prompt, PromptBlocks, Router
from serving.router.router import NoWorkersError
from workloads import Workload
from workloads.pacing import LoadConfig, Pacer

NOBODY = "it waited at the router, but no worker became available"


class StalledError(UserError):
    """The simulation ended with unfinished requests."""


class Cluster:
    """Workers behind routers that serve a workload."""

    def __init__(
        self,
        workload: Workload,
        pools: Sequence[SimulatedPool],
        router: Router,
        *,
        load: LoadConfig = LoadConfig(),  # noqa: B008 (frozen)
        overhead: Overhead = Overhead(),  # noqa: B008
        kv_event_delay_s: float = 0.0,
        choose: "Callable[[Cluster, int], int] | None" = None,
        apart: Disaggregation | None = None,
        links: Links | None = None,
        fleet: FleetConfig = FleetConfig(),  # noqa: B008
        moved_kv: KvSize | None = None,
        gpus: int | None = None,
        migration_limit: int = 3,
        rng: random.Random | None = None,
    ) -> None:
        """Build an idle cluster.

        Args:
            workload: the requests.
            pools: the workers; all use KV blocks of the same size.
            router: distributes the requests over the workers that decode.
            load: how the requests are sent.
            overhead: delays between a client and the engines.
            kv_event_delay_s: time until a KV event reaches the router (s).
            choose: chooses the slot for a request, by the request's number, instead of the router.
            apart: how requests get from workers that only prefill to workers that decode, if there are any.
            links: empty links that carry KV between ranks, and between ranks and storage (default: infinitely fast).
            fleet: how workers are started and stopped.
            moved_kv: the size of the KV that requests take along from a leaving worker (None: they take none).
            gpus: the number of GPUs (None: always enough).
            migration_limit: how often a request may continue on another worker after its own is gone.
            rng: draws start-up times.
        """
        self.clock = Clock()
        self.choose = choose
        self.ranks: list[Rank] = []
        """Every rank so far, by its number, which is its slot at the routers."""
        self.engines: list[SimulatedEngine] = []
        """The engine of each rank."""
        self.pacer = Pacer(workload, load)
        self.log = RequestLog(len(workload))
        self.num_finished = 0
        self.first_gap_rows: list[int] = []
        self.delays_s = 0.0
        """Total delay of all requests between their clients and the router."""
        self.workload = workload
        self.block_size = pools[0].engine.config.block_size
        self.overhead = overhead
        self._grouping = Grouping(workload.block_size, self.block_size)
        self._turn_s = -math.inf  # when the frontend handled the last request
        self._awaited_s = -1.0  # time of the scheduled arrival event
        self._held: dict[int, EngineSequence] = {}
        self._is_paced = load.is_closed or load.max_concurrency is not None or workload.has_dependencies
        self._warmup_s = load.warmup_s
        self.kv_uses = {pool.name: KvUse() for pool in pools}
        """How much of its KV each pool used."""
        engines = [pool.engine for pool in pools]
        self._sources = SourceColumns(engines, self.log)
        present = [pool.engine for pool in pools if pool.replicas]
        self._context = context_of(present)
        self.longest = max_model_len_of(present)
        """Tokens of the longest request that they take, prompt and output together, if there is a limit."""
        self.num_refused = 0
        """Requests that are too long for the engines."""
        self.traffic = Traffic(links or Links(TransferConfig(bandwidth_gb_s=0.0)), self.clock)
        wants_events = router.wants_events or (apart is not None and apart.router.wants_events)
        publish = self._on_tier_events if wants_events else None
        self.tiering = Tiering(self.traffic, self.clock, publish)
        self.routing = Routing(router, self.clock, kv_event_delay_s=kv_event_delay_s)
        roles = DisaggregationConfig() if apart is None else apart.config
        self.losses = Losses(self.clock, migration_limit, roles, dispatch=self._dispatch, fail=self._fail)
        """Handles requests whose worker is gone."""
        self.counter: Counter | None = None
        """Counts requests for a planner, if there is one."""
        self.handover: Handover | None = None
        """Brings requests from workers that prefill to workers that decode, if there are any."""
        if apart is not None:
            self.handover = Handover(
                apart,
                engines,
                self.ranks,
                self.routing,
                self.clock,
                self.traffic,
                self.log,
                self.losses,
                kv_event_delay_s=kv_event_delay_s,
                delay_s=overhead.handover_s,
                decode=self._decode,
                sequence=self._sequence,
                note=self._note,
                forget=self._forget,
            )
        self.moves = None if moved_kv is None else Moves(self.traffic, moved_kv)
        """Requests that leave a worker with their KV, if that is enabled."""
        hooks = Hooks(self._start_ranks, self._stop_routing, self._abandon, self._hand_over)
        self.fleet = Fleet(pools, fleet, self.clock, hooks, gpus=gpus, rng=rng or random.Random(0))

    @property
    def shared(self) -> tuple[object, ...]:
        """Objects that copies of the cluster can share."""
        return self.workload, self.workload.requests

    def run(self) -> None:
        """Run until every request is finished.

        Raises:
            StalledError: some requests never finish.
        """
        count = len(self.workload)
        self._await_arrivals()
        if self._warmup_s:
            self.clock.at(self._warmup_s, ARRIVAL, self._end_warmup)
        self.clock.run()
        while self._held and not self.routing.ranks:
            for number in list(self._held):
                self._forget(number)
                self._fail(number, NOBODY)
            self.clock.run()  # others may have waited for those to end
        if self.num_finished != count:
            if locked := [rank for rank in self.ranks if rank.engine.is_locked]:
                view = locked[0].engine.view()
                raise StalledError(
                    f"{count - self.num_finished:,} requests never finish: rank {locked[0].number} is deadlocked, as "
                    "vLLM would be. "
                    f"{view.num_loaded} sequences with loaded KV hold all of its {view.num_blocks:,} blocks, and "
                    "none can continue; expected more KV blocks (num_gpu_blocks), or fewer requests at once "
                    "(max_num_seqs)"
                )
            left = [sequence for rank in self.ranks for sequence in rank.engine.sequences()]
            running = [sequence for sequence in left if sequence.state == RUNNING]
            waiting = [sequence for sequence in left if sequence.state != RUNNING]
            raise StalledError(
                f"{count - self.num_finished} requests never finished; waiting: {waiting[:5]}, running: {running[:5]}"
            )

    def resume(self, until: float) -> None:
        """Continue until a given time."""
        self._await_arrivals()
        self.clock.run(until)

    def send_to(self, number: int, slot: int) -> None:
        """Send a request to a rank without asking the router."""
        prompt, chain = self._prepared(number)
        decision = self.routing.place(number, prompt, 0, only=slot)
        assert decision is not None, "only requests that may go to any worker can wait at the router"
        self._send(number, self._sequence(number, chain), decision)

    def _start_ranks(self, worker: Worker) -> list[Rank]:
        """Put the ranks of a worker on the clock and make each routable."""
        pool, engine = worker.pool, worker.pool.engine
        is_apart = engine.config.kv_role == "kv_producer" and self.handover is not None
        routing = self.handover.routing if is_apart and self.handover is not None else self.routing
        ranks = [self._rank(engine, routing.router) for _ in range(engine.config.dp_size)]
        for rank in ranks:
            self.traffic.links.add_rank(pool.gpus_per_rank, self.clock.now)
            self.tiering.connect(rank)
            rank.kv_use = self.kv_uses[pool.name]
            routing.add(rank)
            if not is_apart and (self.handover is not None or self.moves is not None):
                rank.on_loads = self._on_loads
        if engine.is_lockstep:
            Lockstep(self.clock, ranks)
        self.losses.on_worker()
        self._release_all()
        return ranks

    def _hand_over(self, rank: Rank) -> None:
        """Move the requests of a leaving rank to others: with their KV, or from the start if they have not begun.

        A request whose prompt is being computed, or whose KV has not arrived yet, follows once that is done.
        """
        if self.moves is None or rank.prefills or not self.routing.ranks:
            return
        rank.is_handing_over = True
        rank.engine.advance(self.clock.now)
        for sequence in rank.sequences:
            number = number_of(sequence)
            if sequence.decoding and sequence.first_token_s >= 0:
                self.losses.note(sequence, rank)
                rank.abort(sequence)
                prompt, chain = self._prepared(number)
                moved = self._sequence(number, chain)
                self.moves.begin(number, moved, rank)
                self._decode(number, prompt, moved)
            elif self.handover is None and not sequence.num_blocks and not sequence.is_remote_prefill:
                self.losses.note(sequence, rank)
                rank.abort(sequence)
                self._dispatch(number)

    def _on_kv_lost(self, number: int, move: Move, source: Rank) -> None:
        """Restart a moving request, because the rank with its KV is gone."""
        self._drop_move(number)
        if move.target is not None:
            move.target.abort(move.sequence)
            if move.is_under_way:
                move.target.arrive(move.sequence, 0)  # the KV that it waited for will never come
        if self.handover is not None:
            self.handover.on_kv_lost(number, source)
            return
        self._forget(number)
        self.losses.on_kv_lost(number, source)

    def _drop_move(self, number: int) -> None:
        if self.moves is not None:
            self.moves.drop(number)

    def _on_loads(self, sequences: list[EngineSequence]) -> None:
        """Continue with the sequences for which a rank has allocated blocks."""
        if self.moves is not None:
            sequences = self.moves.take(sequences)
        if sequences:
            assert self.handover is not None
            self.handover.on_loads(sequences)

    def _rank(self, engine: SimulatedEngine, router: Router) -> Rank:
        core = new_engine(
            engine.config,
            engine.timing,
            num_blocks=engine.num_blocks,
            host=engine.host,
            more=engine.more,
            kv_events=router.wants_events,
            ordered_events=False,
        )
        on_step = self._on_prefill_step if engine.config.kv_role == "kv_producer" else self._on_step
        number = len(self.ranks)
        rank = Rank(number, core, self.clock, on_step=on_step, on_second_token=self._note_second_token)
        self.ranks.append(rank)
        self.engines.append(engine)
        self.first_gap_rows.append(0)
        return rank

    def _stop_routing(self, rank: Rank) -> None:
        """Stop sending requests to a rank."""
        self.routing.remove(rank)
        if self.handover is not None:
            self.handover.routing.remove(rank)

    def _abandon(self, rank: Rank) -> None:
        """Let the requests of a rank that is gone continue elsewhere."""
        rank.stop()
        for number, move in [] if self.moves is None else self.moves.of(rank):
            self._on_kv_lost(number, move, rank)
        for sequence in rank.sequences if self.moves is not None else ():
            self._drop_move(number_of(sequence))
        if self.handover is not None:
            self.handover.on_gone(rank)
        else:
            for sequence in rank.sequences:
                self.losses.on_lost(sequence, rank)
        self._release_all()

    def _on_tier_events(self, slot: int, events: list[TierEvent]) -> None:
        """Report to the routers what entered or left a tier behind a rank's host memory."""
        self.routing.on_tier_events(slot, events)
        if self.handover is not None:
            self.handover.routing.on_tier_events(slot, events)

    def _on_step(self, rank: Rank, output: StepOutput) -> None:
        """Process the output of a rank's step."""
        if self.routing.sends_events_at_once and rank.engine.effects.events:
            self.routing.on_events(rank)
        if output.sampled or output.finished:
            self._on_output(rank, output)

    def _on_prefill_step(self, rank: Rank, output: StepOutput) -> None:
        """Process the output of a step of a rank that only prefills."""
        assert self.handover is not None
        self.handover.on_prefill_step(rank, output)

    def _on_output(self, rank: Rank, output: StepOutput) -> None:
        """Record first tokens and finished requests."""
        router, log, answer_s = self.routing.router, self.log, self.overhead.answer_s
        for sequence in output.sampled:
            router.on_first_token(sequence.id)
        if output.sampled:
            rank.note_first_tokens(output)
        for sequence in output.finished:
            number = number_of(sequence)
            router.on_finish(number)
            log.worker[number] = rank.number
            log.cached_tokens[number] = sequence.cached_tokens
            self._sources.note(number, sequence)
            log.preemptions[number] = sequence.num_preemptions
            log.finish_reason[number] = sequence.finish_reason
            log.admitted_s[number] = sequence.first_scheduled_s
            if self.losses.generated:
                self.losses.amend(sequence, output.end, log, rank.engine.log)
            if not sequence.is_failed:  # the token that came with the KV may be all that was requested
                first_s = sequence.first_token_s if sequence.first_token_s >= 0 else output.end
                log.first_token_s[number] = first_s + answer_s
            log.last_token_s[number] = output.end + answer_s
            log.second_token_s[number] += answer_s
            if self.handover is not None:
                self.handover.on_decoded(number, sequence, answer_s=answer_s)
            self.pacer.on_end(number, output.end + answer_s)
        if self.counter is not None:
            self.counter.on_output(output, log, self.workload.requests)
        self.num_finished += len(output.finished)
        if output.finished and self._is_paced:
            self._await_arrivals()
        if self._held:
            self._release()
        if rank.is_handing_over and output.sampled:
            self._hand_over(rank)

    def _note_second_token(self, sequence: EngineSequence, time: float) -> None:
        number = number_of(sequence)
        if math.isnan(self.log.second_token_s[number]):
            self.log.second_token_s[number] = time

    def _await_arrivals(self) -> None:
        """Schedule the next possible arrival, unless one is already scheduled."""
        next_s = self.pacer.next_s()
        if next_s is not None and not self.clock.now <= self._awaited_s <= next_s:
            self._awaited_s = next_s = max(next_s, self.clock.now)
            self.clock.at(next_s, ARRIVAL, self._arrive)

    def _arrive(self) -> None:
        now = self.clock.now
        self._awaited_s = -1.0
        for number, intended in self.pacer.due(now):
            self.log.intended_s[number] = intended
            if self.counter is not None:
                self.counter.on_arrival(self.workload.requests[number].input_length)
            passed = self._passed_on(number, now)
            if passed > now:
                self.delays_s += passed - now
                self.clock.at(passed, ARRIVAL, partial(self._dispatch, number))
            else:
                self._dispatch(number)
        self._await_arrivals()

    def _passed_on(self, number: int, now: float) -> float:
        """Return when a request that arrives now reaches the router (s)."""
        overhead = self.overhead
        turn = self._turn_s = max(now, self._turn_s + overhead.spacing_s)
        return turn + overhead.before(self.workload.requests[number].input_length)

    def _prepared(self, number: int) -> tuple[Prompt, BlockChain]:
        """Return a request's prompt for the router, including tokens generated so far, and its blocks."""
        request = self.workload.requests[number]
        chain = self._grouping.chain(request)
        blocks = PromptBlocks(chain.ids, chain.num_named, chain.blocks_per_id)
        num_tokens = request.input_length + self.losses.num_generated(number)
        return Prompt(num_tokens, blocks, request.session or None), chain

    def _sequence(self, number: int, chain: BlockChain) -> EngineSequence:
        """Return a request's sequence for the rank that answers it; one that ends by EOS has a limit beyond that."""
        request, num_generated = self.workload.requests[number], self.losses.num_generated(number)
        sequence = EngineSequence(
            number,
            num_prompt=request.input_length + num_generated,
            max_tokens=request.max_tokens(self._context) - num_generated,
            stop_after=request.output_length - num_generated if request.ends == "stop" else None,
            chain=chain,
            priority=request.priority,
            arrival=self.clock.now,
        )
        if num_generated:
            self.losses.go_on(sequence)
        return sequence

    def _dispatch(self, number: int) -> None:
        """Send a request on its way, for the first time or again."""
        if (reason := self.refusal(number)) is not None:
            self.num_refused += 1
            self._fail(number, f"HTTP 400: {reason}")
            return
        try:
            prompt, chain = self._prepared(number)
            if self.handover is not None:
                self.handover.begin(number, prompt, chain, self.workload.requests[number])
            elif self.choose is not None:
                self.routing.catch_up(prompt)
                self.send_to(number, self.choose(self, number))
            else:
                self._decode(number, prompt, self._sequence(number, chain))
        except NoWorkersError as error:
            self.losses.on_nobody(number, str(error))

    def refusal(self, number: int) -> str | None:
        """Return why the frontend refuses a request, None if it does not."""
        return None if self.longest is None else refusal_of(self.workload.requests[number], self.longest)

    def _fail(self, number: int, message: str) -> None:
        """End a request that cannot be answered."""
        self._drop_move(number)
        self.log.error[number] = message
        self.num_finished += 1
        self.pacer.on_end(number, self.clock.now)
        if self._is_paced:
            self._await_arrivals()

    def _decode(self, number: int, prompt: Prompt, sequence: EngineSequence, only: int | None = None) -> None:
        """Send a request to a rank that answers it, or let it wait at the router."""
        output_length = self.workload.requests[number].output_length
        is_local = self.handover is not None and not sequence.is_remote_prefill
        decision = self.routing.place(number, prompt, output_length, only, is_local=is_local)
        if decision is None:
            self._held[number] = sequence
        else:
            self._send(number, sequence, decision)

    def _release(self) -> None:
        """Send the requests that need not wait at the router any longer."""
        for number, decision in self.routing.release():
            self._send(number, self._held.pop(number), decision)

    def _forget(self, number: int) -> None:
        """Withdraw a request from the router."""
        self._held.pop(number, None)
        self.routing.forget(number)

    def _release_all(self) -> None:
        """Release requests that wait at any router, after a worker was added or removed."""
        if self._held:
            self._release()
        if self.handover is not None:
            self.handover.release()

    def _send(self, number: int, sequence: EngineSequence, decision: Decision) -> None:
        """Send a request to its rank."""
        if not sequence.is_remote_prefill:
            self._note(number, decision, self.routing.router)
        if self.handover is not None:
            self.handover.on_sent(number, sequence, decision.slot)
        rank = self.ranks[decision.slot]
        if self.moves is not None:
            self.moves.on_sent(number, rank)
        rank.add(sequence)
        if self.losses.generated and self.losses.num_generated(number) == 1:
            rank.await_second_token(sequence)

    def _note(self, number: int, decision: Decision, router: Router) -> None:
        """Record what a router knew when it placed a request."""
        log = self.log
        log.predicted_tokens[number] = decision.overlap_blocks * self.block_size
        if decision.overlaps:
            log.best_tokens[number] = max(decision.overlaps) * self.block_size
        log.queue_depth[number] = router.load(decision.slot).num_requests - 1

    def _end_warmup(self) -> None:
        """Start counting gaps between tokens; what was logged so far belongs to the warm-up."""
        for place, rank in enumerate(self.ranks):
            self.first_gap_rows[place] = rank.engine.split_log(self.clock.now)
