"""Kubernetes' HorizontalPodAutoscaler (autoscaling/v2), as KServe, AIBrix, KEDA and the vLLM production-stack use it.

    r        = mean of the metric over ready workers / target; if r > 1, starting workers count with a metric of 0
    desired  = workers as they are, if |r - 1| <= tolerance or the starting ones turn r > 1 into r <= 1
               ceil(r N) otherwise, N the workers that r was taken over
    up       at most to twice the workers of 15 s ago, or 4 more, whichever is more
    down     at most to the largest desired of the last 300 s

Source: the algorithm and the default behaviour in Kubernetes' documentation.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

from serving.planner.config import PlannerConfig
from serving.planner.observation import PoolFacts, PoolState, RankLoad
from serving.planner.policies.policy import Policy, Proposal, Rest
from serving.planner.recent import Recent

UP_PERIOD_S = 15.0
UP_FACTOR = 2
UP_WORKERS = 4


class Hpa(Policy):
    """Keeps a metric at its target in proportion."""

    description: ClassVar[str] = (
        "Kubernetes: ceil(workers x metric / target) beyond a tolerance of 10%; down after 300 s (hpa_metric, hpa_target)"
    )
    default_interval_s: ClassVar[float] = 15.0

    def __init__(self, config: PlannerConfig, pools: Sequence[PoolFacts]) -> None:
        super().__init__(config, pools)
        self._wishes = {name: Recent(config.hpa_down_window_s) for name in self._pools}
        self._sizes: dict[str, list[tuple[float, int]]] = {name: [] for name in self._pools}

    @property
    def rest(self) -> Rest:
        """It looks back at its windows."""
        return Rest(max(self._config.hpa_down_window_s, UP_PERIOD_S))

    def forget(self, pool: str) -> None:
        """Forget past proposals, and how fast the pool grew."""
        self._wishes[pool].clear()
        self._sizes[pool].clear()

    def _propose_one(self, now: float, facts: PoolFacts, state: PoolState) -> Proposal:
        target = self._target(facts)
        total = sum(_metric(self._config.hpa_metric, facts, load) for load in state.loads)
        if self._config.hpa_metric == "kv_usage":
            total /= facts.num_ranks  # a worker is as full as its ranks are on average
        wanted = desired(total, target, state, tolerance=self._config.hpa_tolerance)
        wishes = self._wishes[facts.name]
        wishes.add(now, wanted)
        replicas = min(wanted, self._ceiling(now, facts.name, state.size))
        if replicas < state.size:
            replicas = min(state.size, round(wishes.most))
        return Proposal(
            replicas,
            f"{self._config.hpa_metric} is {total / state.num_ready:.3g} per ready worker, its target {target:.3g}",
        )

    def _target(self, facts: PoolFacts) -> float:
        if self._config.hpa_target is not None:
            return self._config.hpa_target
        usual = {"queue": 3.0, "kv_usage": 0.75, "concurrency": 0.7 * facts.max_num_seqs * facts.num_ranks}
        return usual[self._config.hpa_metric]

    def _ceiling(self, now: float, pool: str, size: int) -> int:
        """Return the largest size to which the pool may grow now."""
        sizes = [(at, before) for at, before in self._sizes[pool] if at > now - UP_PERIOD_S] + [(now, size)]
        self._sizes[pool] = sizes
        start = min(before for _, before in sizes)
        return max(UP_FACTOR * start, start + UP_WORKERS)


def desired(total: float, target: float, state: PoolState, *, tolerance: float) -> int:
    """Return the workers that keep a metric at its target.

    Args:
        total: the total metric of all ready workers.
        target: per worker.
        state: the pool.
        tolerance: share of the target within which nothing changes.
    """
    number = state.num_ready
    ratio = total / number / target
    if abs(ratio - 1) <= tolerance:
        return state.size
    if ratio > 1 and state.num_starting:
        number = state.size
        ratio = total / number / target
        if ratio <= 1 + tolerance:
            return state.size
    return math.ceil(ratio * number - 1e-9)


def _metric(metric: str, facts: PoolFacts, load: RankLoad) -> float:
    if metric == "queue":
        return load.num_waiting
    if metric == "kv_usage":
        return load.kv_tokens / facts.max_kv_tokens
    return load.num_requests
