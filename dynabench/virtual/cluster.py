"""The cluster in virtual time: arrivals, routers and engines on a simpy clock.

At one instant, completions come before arrivals, and arrivals before scheduling. A rank's step may leap over many
iterations. An arrival at that rank cuts the leap short, and a routing decision first catches up with the KV events of
the iterations that have ended.
"""

import random

from dynabench.arm import Run
from dynabench.deployment.engines import SimulatedPool, pools_of
from dynabench.kv_use import KvUse
from dynabench.virtual.arrivals import Arrivals
from dynabench.virtual.clock import ARRIVAL, Clock
from dynabench.virtual.fleet import Fleet, Worker
from dynabench.virtual.flights import Flights
from dynabench.virtual.gaps import Gaps
from dynabench.virtual.means import mean_overhead, read_kv_size, router_of
from dynabench.virtual.prompts import Prompts
from dynabench.virtual.rank import Lockstep, Rank
from dynabench.virtual.routing import Routers, Routing
from dynabench.virtual.stamps import Stamps
from dynabench.virtual.tiers import Tiering
from dynabench.virtual.transfers import Transfers
from foundation.errors import UserError
from mocker import new_engine
from mocker.contract import EngineStoppedError, NeverAdmittedError
from mocker.events import TierEvent
from mocker.installed.scheduler import NewScheduler
from mocker.network.links import Links
from mocker.network.traffic import Traffic
from mocker.sequence import RUNNING
from mocker.step_log import StepLog
from mocker.timing.choose import SimulatedEngine
from reports.record.records import RequestLog
from serving.life import DisaggregationConfig
from serving.life.terms import Terms
from workloads import Workload


class StalledError(UserError):
    """The simulation ended with unfinished requests."""


class Cluster:
    """Workers behind routers that serve a workload."""

    def __init__(
        self,
        run: Run,
        workload: Workload,
        *,
        installed: NewScheduler | None = None,
        logs: list[StepLog] | None = None,
    ) -> None:
        deployment, load = run.deployment, run.settings.load
        pools, is_apart = pools_of(deployment), deployment.is_disaggregated
        engines = [pool.engine for pool in pools for _ in range(pool.replicas)]
        self.clock = Clock()
        self.workload = workload
        self.log = RequestLog(len(workload))
        self.overhead = mean_overhead(deployment)
        self.ranks: list[Rank] = []
        """Every rank so far, by its number, which is its slot at the routers."""
        self.engines: list[SimulatedEngine] = []
        """The engine of each rank."""
        self.gaps = Gaps(self.ranks, self.engines)
        self.kv_uses = {pool.name: KvUse() for pool in pools}
        """How much of its KV each pool used."""
        self.prompts = Prompts(workload, pools)
        self.block_size = self.prompts.block_size
        self.routing, *others = [
            Routing(router_of(run, engines, role), self.clock, kv_event_delay_s=deployment.router.kv_event_delay_s)
            for role in (("decode", "prefill") if is_apart else ("aggregated",))
        ]
        self.prefills: Routing | None = next(iter(others), None)
        """Chooses the ranks that only compute prompts, if there are any."""
        self.traffic = Traffic(Links(deployment.transfer), self.clock)
        wants_events = any(routing.router.wants_events for routing in (self.routing, *others))
        self.tiering = Tiering(self.traffic, self.clock, self._on_tier_events if wants_events else None)
        self.transfers = Transfers(
            deployment.links, read_kv_size(deployment), self.traffic, self.clock, block_size=self.block_size
        )
        self.arrivals = Arrivals(workload, load, self.overhead, self.clock, self.log)
        terms = Terms(
            limit=max(pool.worker.migration_limit for pool in deployment.pools),
            config=deployment.sharing if is_apart else DisaggregationConfig(),
            handover_s=self.overhead.handover_s,
            needs_blocks_first=bool(others) and others[0].router.may_hold,
        )
        self.flights = Flights(
            terms,
            self.clock,
            Routers(self.routing, self.prefills),
            self.ranks,
            prompts=self.prompts,
            transfers=self.transfers,
            arrivals=self.arrivals,
            stamps=Stamps(
                self.log,
                [pool.engine for pool in pools],
                is_apart=is_apart,
                block_size=self.block_size,
                answer_s=self.overhead.answer_s,
                tidy=self._tidy,
            ),
        )
        self.arrivals.begin = self.flights.begin
        self._is_apart = is_apart
        self._hands_over = deployment.fleet.drain_policy == "hand-over"
        self._warmup_s = load.warmup_s
        self._seed = run.seed
        self._installed = installed
        self._logs = logs
        rng = random.Random(f"fleet {run.seed}")
        self.fleet = Fleet(pools, deployment.fleet, self.clock, self, gpus=deployment.gpus, rng=rng)

    @property
    def shared(self) -> tuple[object, ...]:
        """Objects that copies of the cluster can share."""
        return self.workload, self.workload.requests

    @property
    def num_ended(self) -> int:
        """Requests that have ended."""
        return self.flights.num_ended

    def run(self) -> None:
        """Run until every request is finished.

        Raises:
            StalledError: some requests never finish.
        """
        self.arrivals.await_next()
        if self._warmup_s:
            self.clock.at(self._warmup_s, ARRIVAL, self._end_warmup)
        try:
            self.clock.run()
            while self.flights.give_up_held():
                self.clock.run()  # others may have waited for those to end
        except NeverAdmittedError as error:
            count = len(self.workload) - self.num_ended
            raise StalledError(f"{count:,} requests never finish, as with the real engine: {error}") from error
        except EngineStoppedError as error:
            raise StalledError(f"an engine stops, as the real one would: {error}") from error
        if self.num_ended != len(self.workload):
            self._explain_stall(len(self.workload) - self.num_ended)

    def _explain_stall(self, count: int) -> None:
        if stuck := [rank for rank in self.ranks if rank.engine.is_stuck]:
            view = stuck[0].engine.view()
            raise StalledError(
                f"{count:,} requests never finish: rank {stuck[0].number} is deadlocked, as vLLM would be. "
                f"{view.num_loaded} sequences with loaded KV hold all of its {view.num_blocks:,} blocks, and none can continue; "
                "expected more KV blocks (num_gpu_blocks), or fewer requests at once (max_num_seqs)"
            )
        left = [sequence for rank in self.ranks for sequence in rank.engine.sequences()]
        running = [sequence for sequence in left if sequence.state == RUNNING]
        waiting = [sequence for sequence in left if sequence.state != RUNNING]
        raise StalledError(f"{count} requests never finished; waiting: {waiting[:5]}, running: {running[:5]}")

    def resume(self, until: float) -> None:
        """Continue until a given time."""
        self.arrivals.await_next()
        self.clock.run(until)

    def start_ranks(self, worker: Worker) -> list[Rank]:
        """Put the ranks of a worker on the clock and make each routable."""
        pool, engine = worker.pool, worker.pool.engine
        ranks = [self._start_rank(pool) for _ in range(engine.num_engines)]
        if engine.is_lockstep:
            Lockstep(self.clock, ranks)
        self.flights.on_worker()
        return ranks

    def _start_rank(self, pool: SimulatedPool) -> Rank:
        simulated = pool.engine
        is_for_prefills = simulated.config.kv_role == "kv_producer" and self.prefills is not None
        routing = self.prefills if is_for_prefills and self.prefills is not None else self.routing
        engine = new_engine(
            simulated.settings,
            simulated.timing,
            num_blocks=simulated.num_blocks,
            num_ranks=simulated.num_ranks,
            host=simulated.host,
            layout=simulated.layout,
            adapters=simulated.adapters,
            kv_events=routing.router.wants_events,
            ordered_events=False,
            acceptance=simulated.acceptance,
            stage_shares=simulated.stage_shares,
            encoding_s=simulated.encoding_s,
            seed=self._seed,
            installed=self._installed,
            steps=self._new_log(),
        )
        rank = Rank(len(self.ranks), engine, self.clock, self.flights)
        rank.kv_use = self.kv_uses[pool.name]
        rank.reads_kv = not is_for_prefills and (self._is_apart or self._hands_over)
        self.ranks.append(rank)
        self.engines.append(simulated)
        self.traffic.links.add_rank(pool.gpus_per_rank, self.clock.now)
        self.tiering.connect(rank)
        routing.add(rank)
        return rank

    def _new_log(self) -> StepLog | None:
        if self._logs is None:
            return None
        self._logs.append(StepLog(lambda: self.clock.now))
        return self._logs[-1]

    def stop_routing(self, rank: Rank) -> None:
        """Stop sending requests to a rank."""
        self.routing.remove(rank)
        if self.prefills is not None:
            self.prefills.remove(rank)

    def abandon(self, rank: Rank) -> None:
        """Let the requests of a rank that is gone continue elsewhere."""
        rank.stop()
        self.flights.on_gone(rank)

    def hand_over(self, rank: Rank) -> None:
        """Move the requests of a leaving rank elsewhere, with their KV."""
        self.flights.hand_over(rank)

    def _on_tier_events(self, slot: int, events: list[TierEvent]) -> None:
        """Report to the routers what entered or left a tier behind a rank's host memory."""
        self.routing.on_tier_events(slot, events)
        if self.prefills is not None:
            self.prefills.on_tier_events(slot, events)

    def _tidy(self) -> None:
        """Keep no more in memory than what is in flight needs."""
        self.gaps.look()
        self.log.let_go()
        self.workload.columns.let_go()

    def _end_warmup(self) -> None:
        """Start counting gaps between tokens; what was logged so far belongs to the warm-up."""
        self.gaps.begin(self.clock.now)
