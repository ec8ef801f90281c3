"""A planner in virtual time: at its intervals it observes the simulated fleet, decides, and changes it."""

import math

from dynabench.planner.facts import facts_of
from dynabench.virtual.clock import ARRIVAL
from dynabench.virtual.cluster import Cluster
from dynabench.virtual.counter import Counter
from dynabench.virtual.rank import Rank
from mocker.work import work_of
from reports.fleet import Change
from serving.planner import Observation, Planner, PlannerConfig, PoolState, RankLoad, traffic_between


def load_of(rank: Rank, now: float) -> RankLoad:
    """Return the current load of a rank."""
    engine = rank.engine
    engine.advance(now)
    scheduler = engine.scheduler
    pool = scheduler.pool
    return RankLoad(
        num_running=len(scheduler.running),
        num_waiting=scheduler.num_waiting,
        kv_tokens=(pool.num_blocks - pool.num_free) * engine.config.block_size,
        **work_of(scheduler)._asdict(),
    )


class SimulatedPlanner:
    """A planner that controls a simulated cluster."""

    def __init__(self, config: PlannerConfig, cluster: Cluster) -> None:
        """Let a planner change a cluster from now until its last request has ended.

        Raises:
            ValueError: the planner does not exist, or does not suit the pools or settings.
        """
        self.planner = Planner(config, [facts_of(pool) for pool in cluster.fleet.pools.values()])
        self.changes: list[Change] = []
        self.num_decisions = 0
        self.notes: dict[str, int] = {}
        """The planner's notes, and how often each occurred."""
        self._cluster = cluster
        self._counter = cluster.counter = Counter()
        self._looked = cluster.clock.now, self._counter.counts
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
        for name, target in decision.orders.items():
            self.changes.append(Change(now, name, fleet.sizes[name], target.replicas, target.reason))
            fleet.resize(name, target.replicas)
        if cluster.clock.peek() < math.inf:  # otherwise nothing can ever happen, and the run should say so
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
                loads=tuple(load_of(rank, now) for worker in ready for rank in worker.ranks),
            )
        (before_s, before), self._looked = self._looked, (now, self._counter.counts)
        traffic = traffic_between(before, self._looked[1], now - before_s)
        return Observation(now=now, pools=pools, traffic=traffic)
