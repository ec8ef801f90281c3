"""A planner in virtual time: at its intervals it observes the simulated fleet, decides, and changes it."""

import math
from collections.abc import Sequence

from dynabench.planner.facts import pool_facts
from dynabench.virtual.clock import ARRIVAL
from dynabench.virtual.cluster import Cluster
from dynabench.virtual.counter import Counter
from dynabench.virtual.rank import Rank
from dynabench.virtual.repeats import Repeats
from reports.record.fleet import FleetChange
from serving.planner import Observation, Planner, PlannerConfig, PoolState, RankLoad, traffic_between


def load_of(rank: Rank, now: float) -> RankLoad:
    """Return the current load of a rank."""
    engine = rank.engine
    engine.advance(now)
    view = engine.view()
    return RankLoad(
        num_running=view.num_running,
        num_waiting=view.num_waiting,
        kv_tokens=view.num_used_blocks * engine.config.block_size,
        **engine.backlog()._asdict(),
    )


class SimulatedPlanner:
    """A planner that controls a simulated cluster."""

    def __init__(self, config: PlannerConfig, cluster: Cluster) -> None:
        """Let a planner change a cluster from now until its last request has ended.

        Raises:
            ValueError: the planner does not exist, or does not suit the pools or settings.
        """
        self.planner = Planner(config, [pool_facts(pool) for pool in cluster.fleet.pools.values()])
        self.changes: list[FleetChange] = []
        self.num_decisions = 0
        self.notes: dict[str, int] = {}
        """The planner's notes, and how often each occurred."""
        self._cluster = cluster
        self._counter = cluster.arrivals.counter = Counter()
        self._counts = self._counter.counts
        self._repeats = Repeats(self.planner.rest, self.planner.interval_s)
        self._started_s = cluster.clock.now
        self._look_at(1)

    def _look_at(self, number: int) -> None:
        """Take the look of this number next."""
        self._number = number
        self._cluster.clock.at(self._time_of(number), ARRIVAL, self._look)

    def _time_of(self, number: int) -> float:
        return self._started_s + number * self.planner.interval_s

    def _look(self) -> None:
        cluster = self._cluster
        if cluster.num_ended == len(cluster.log):
            return
        seen = self._observe()
        decision = self.planner.decide(seen)
        self._count(1, decision.notes)
        self._repeats.add(seen, decision)
        fleet, now = cluster.fleet, cluster.clock.now
        for name, target in decision.orders.items():
            self.changes.append(FleetChange(now, name, fleet.sizes[name], target.replicas, target.reason))
            fleet.resize(name, target.replicas)
        next_s = cluster.clock.peek()
        if next_s == math.inf:  # nothing can ever happen, and the run should say so
            return
        cycles = self._repeats.cycles(next_s)
        self._count(cycles * self._repeats.looks, self._repeats.notes, times=cycles)
        self._look_at(self._number + 1 + cycles * self._repeats.looks)

    def _count(self, num_decisions: int, notes: Sequence[str], *, times: int = 1) -> None:
        """Count decisions, and notes that each occurred so many times."""
        self.num_decisions += num_decisions
        for note in notes if times else ():
            self.notes[note] = self.notes.get(note, 0) + times

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
        before, self._counts = self._counts, self._counter.counts
        traffic = traffic_between(before, self._counts, now - self._time_of(self._number - 1))
        return Observation(now=now, pools=pools, traffic=traffic)
