"""The planner's hands in virtual time: what it sees of a simulated fleet at its intervals, and what it decides carried out."""

import math

from dynabench.deployment.engines import SimulatedPool
from dynabench.deployment.step_times import SimulatedStepTimes
from dynabench.virtual.clock import ARRIVAL
from dynabench.virtual.cluster import Cluster
from dynabench.virtual.window import Window
from dynabench.virtual.worker import Worker
from reports.fleet import Change
from serving.planner import Observation, Planner, PlannerConfig, PoolFacts, PoolState, RankLoad


def facts_of(pool: SimulatedPool) -> PoolFacts:
    """Return what does not change about a pool."""
    config = pool.engine.config
    return PoolFacts(
        name=pool.name,
        role=pool.role,
        gpus_per_worker=pool.gpus_per_worker,
        num_ranks=config.dp_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_kv_tokens=pool.engine.num_usable_tokens,
        max_model_len=config.max_model_len,
        startup_s=pool.startup_s,
        times=SimulatedStepTimes(pool.engine.timing),
    )


def load_of(worker: Worker, now: float) -> RankLoad:
    """Return what a rank has to do now."""
    engine = worker.engine
    engine.advance(now)
    scheduler = engine.scheduler
    to_compute = decode_kv = queued_decode_kv = 0
    for sequence in scheduler.running:
        if sequence.decoding:
            decode_kv += scheduler.num_tokens(sequence)
        else:
            to_compute += max(sequence.num_known - sequence.num_computed, 0)
    waiting = [*scheduler.holding, *scheduler.queued()]
    for sequence in waiting:
        if sequence.is_remote_prefill or sequence.is_token_shipped or sequence.num_preemptions:
            queued_decode_kv += sequence.num_known
        else:
            to_compute += max(sequence.num_known - sequence.num_computed, 0)
    pool = scheduler.pool
    return RankLoad(
        num_running=len(scheduler.running),
        num_waiting=len(waiting),
        kv_tokens=(pool.num_blocks - pool.num_free) * engine.config.block_size,
        queued_prefill_tokens=to_compute,
        decode_kv_tokens=decode_kv,
        queued_decode_kv_tokens=queued_decode_kv,
    )


class Planning:
    """A planner at work on a simulated cluster."""

    def __init__(self, config: PlannerConfig, cluster: Cluster) -> None:
        """Let a planner change a cluster from now on, until its last request has ended.

        Raises:
            ValueError: there is no such planner, or the pools or settings are not enough for it.
        """
        self.planner = Planner(config, [facts_of(pool) for pool in cluster.fleet.pools.values()])
        self.changes: list[Change] = []
        self.num_decisions = 0
        self.notes: dict[str, int] = {}
        """What the planner noted, and how often."""
        self._cluster = cluster
        self._looked_s = cluster.clock.now
        self._window = cluster.window = Window()
        self._look_again()

    def _look_again(self) -> None:
        clock = self._cluster.clock
        clock.at(clock.now + self.planner.interval_s, ARRIVAL, self._look)

    def _look(self) -> None:
        cluster = self._cluster
        if cluster.num_finished == len(cluster.log):
            return
        decision = self.planner.decide(self._observe())
        self.num_decisions += 1
        for note in decision.notes:
            self.notes[note] = self.notes.get(note, 0) + 1
        fleet, now = cluster.fleet, cluster.clock.now
        targets = {name: t for name, t in decision.targets.items() if t.replicas != fleet.sizes[name]}
        for name, target in sorted(targets.items(), key=lambda item: item[1].replicas - fleet.sizes[item[0]]):
            self.changes.append(Change(now, name, fleet.sizes[name], target.replicas, target.reason))
            fleet.resize(name, target.replicas)  # those that shrink first: their GPUs may be needed
        if cluster.clock.peek() < math.inf:  # else nothing can ever happen, and the run is to say so
            self._look_again()

    def _observe(self) -> Observation:
        fleet, now = self._cluster.fleet, self._cluster.clock.now
        pools = {}
        for name in fleet.pools:
            ready = fleet.of(name, "ready")
            pools[name] = PoolState(
                num_ready=len(ready),
                num_starting=len(fleet.of(name, "pending", "starting")),
                num_draining=len(fleet.of(name, "draining")),
                loads=tuple(load_of(rank, now) for member in ready for rank in member.ranks),
            )
        traffic = self._window.take(now - self._looked_s)
        self._looked_s = now
        return Observation(now=now, pools=pools, traffic=traffic)
