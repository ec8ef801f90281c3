"""Pools whose workers start, fail, hang, drain and share a load, for a planner to change."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from serving.planner.decision import ScalingDecision
from serving.planner.observation import Observation, PoolFacts, PoolState, RankLoad, RequestTraffic
from serving.planner.planner import Planner

NO_LOAD = RankLoad()


def facts(name: str = "worker", **changes) -> PoolFacts:
    return PoolFacts(
        **{"name": name, "max_num_seqs": 100, "max_num_batched_tokens": 8192, "max_kv_tokens": 100_000} | changes
    )


class Steady:
    """Steps that take 100 ms with a full prompt budget of 1000 tokens, and 1 ms for each request that decodes."""

    def step_s(self, prefill_tokens, num_decodes=0, num_kv_tokens=0, *, context_tokens=0):
        return prefill_tokens * 1e-4 + num_decodes * 1e-3


def timed(name: str = "worker", **changes) -> PoolFacts:
    return facts(name, **{"times": Steady(), "max_num_batched_tokens": 1000} | changes)


def state(num_ready: int, *loads: RankLoad, **changes) -> PoolState:
    """A pool whose ready workers all have the load, if only one is given."""
    return PoolState(
        num_ready=num_ready, loads=loads if len(loads) > 1 else (loads or (NO_LOAD,)) * num_ready, **changes
    )


def seen(now: float = 0.0, traffic: RequestTraffic | None = None, **pools: PoolState) -> Observation:
    return Observation(now=now, pools=pools, traffic=traffic)


def replicas(decision: ScalingDecision) -> dict[str, int]:
    return {name: target.replicas for name, target in decision.targets.items()}


@dataclass
class FleetPool:
    facts: PoolFacts
    num_ready: int
    total: RankLoad = NO_LOAD
    """What all its workers together have to do."""
    drain_s: float = 0.0
    starts: list[float] = field(default_factory=list)
    """When each starting worker will be ready, or infinity."""
    drains: list[float] = field(default_factory=list)

    def advance(self, now: float) -> None:
        self.num_ready += sum(at <= now for at in self.starts)
        self.starts = [at for at in self.starts if at > now]
        self.drains = [at for at in self.drains if at > now]

    def scale(self, now: float, target: int, startup_s: Iterable[float]) -> None:
        for _ in range(target - self.num_ready - len(self.starts)):
            self.starts.append(now + next(iter(startup_s)))
        while self.num_ready + len(self.starts) > target:
            if self.starts:
                self.starts.remove(max(self.starts))
                continue
            self.num_ready -= 1
            self.drains.append(now + self.drain_s)

    @property
    def gpus(self) -> int:
        return (self.num_ready + len(self.starts) + len(self.drains)) * self.facts.gpus_per_worker

    @property
    def state(self) -> PoolState:
        ranks = max(1, self.num_ready * self.facts.num_ranks)
        load = RankLoad(
            num_running=self.total.num_running // ranks,
            num_waiting=self.total.num_waiting // ranks,
            kv_tokens=self.total.kv_tokens // ranks,
            queued_prefill_tokens=self.total.queued_prefill_tokens // ranks,
            decode_kv_tokens=self.total.decode_kv_tokens // ranks,
            queued_decode_kv_tokens=self.total.queued_decode_kv_tokens // ranks,
        )
        return PoolState(
            num_ready=self.num_ready,
            num_starting=len(self.starts),
            num_draining=len(self.drains),
            loads=(load,) * (self.num_ready * self.facts.num_ranks),
        )


class Fleet:
    """Acts a planner's decisions out."""

    def __init__(
        self, planner: Planner, *pools: FleetPool, traffic: Callable[[float], RequestTraffic | None] | None = None
    ):
        self.planner = planner
        self.pools = {pool.facts.name: pool for pool in pools}
        self.now = 0.0
        self.traffic = traffic or (lambda now: None)

    def step(self, startup_s: Iterable[float] = ()) -> ScalingDecision:
        """Let an interval pass and act the decision out; starts take the given times in turn, else the expected."""
        self.now += self.planner.interval_s
        for pool in self.pools.values():
            pool.advance(self.now)
        decision = self.planner.decide(
            Observation(
                now=self.now,
                pools={name: pool.state for name, pool in self.pools.items()},
                traffic=self.traffic(self.now),
            )
        )
        times = iter(startup_s)
        for name, target in decision.targets.items():
            pool = self.pools[name]
            pool.scale(self.now, target.replicas, (next(times, pool.facts.startup_s) for _ in range(10**6)))
        return decision

    @property
    def gpus(self) -> int:
        return sum(pool.gpus for pool in self.pools.values())

    @property
    def sizes(self) -> dict[str, int]:
        return {name: pool.state.size for name, pool in self.pools.items()}
