"""llm-d's Workload Variant Autoscaler, by saturation.

    saturated   KV cache in use >= 0.8, or >= 5 requests wait
    spare       0.8 - mean KV, and 5 - mean queue, over the workers that are not saturated
    up          by 1, if spare KV < 0.1, spare queue < 3, or all are saturated
    down        by 1, if at least two are not saturated and both conditions hold with their load on one worker fewer

While workers start, no pool grows. llm-d passes the number to a HorizontalPodAutoscaler, whose window for reductions is
`wva_down_window_s`. Source: llm-d-workload-variant-autoscaler, saturation scaling. It supports only aggregated workers;
here, each pool is planned separately.
"""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from serving.planner.config import PlannerConfig
from serving.planner.observation import PoolFacts, PoolState
from serving.planner.policies.policy import Policy, Proposal, Rest
from serving.planner.recent import Recent


class Fullness(NamedTuple):
    """How full a worker is."""

    kv: float
    queue: float


class Wva(Policy):
    """Keeps spare KV and queue, by saturation."""

    description: ClassVar[str] = (
        "llm-d: +1 if workers below 80% KV and 5 waiting have less than 10% or 3 to spare, -1 if the rest keep that (wva_*)"
    )
    default_interval_s: ClassVar[float] = 30.0
    waits_for_starts: ClassVar[bool] = True

    def __init__(self, config: PlannerConfig, pools: Sequence[PoolFacts]) -> None:
        super().__init__(config, pools)
        self._wishes = {name: Recent(config.wva_down_window_s) for name in self._pools}

    @property
    def rest(self) -> Rest:
        """It looks back at its window."""
        return Rest(self._config.wva_down_window_s)

    def forget(self, pool: str) -> None:
        """Forget past proposals."""
        self._wishes[pool].clear()

    def _propose_one(self, now: float, facts: PoolFacts, state: PoolState) -> Proposal:
        change, reason = change_of(fullness_of(facts, state), self._config)
        wishes = self._wishes[facts.name]
        wishes.add(now, state.num_ready + change)
        if change < 0:
            return Proposal(min(state.num_ready, round(wishes.most)), reason)
        return Proposal(state.num_ready + change if change else state.size, reason)


def fullness_of(facts: PoolFacts, state: PoolState) -> list[Fullness]:
    """Return how full each ready worker is, over all its ranks."""
    ranks = facts.num_ranks
    workers = [state.loads[first : first + ranks] for first in range(0, len(state.loads), ranks)]
    return [
        Fullness(
            sum(load.kv_tokens for load in worker) / (facts.max_kv_tokens * ranks),
            sum(load.num_waiting for load in worker),
        )
        for worker in workers
    ]


def change_of(workers: Sequence[Fullness], config: PlannerConfig) -> tuple[int, str]:
    """Return by how many workers a pool should change, and why."""
    free = [
        worker
        for worker in workers
        if worker.kv < config.wva_kv_threshold and worker.queue < config.wva_queue_threshold
    ]
    if not free:
        return 1, "all workers are saturated"
    spare = _spare(free, len(free), config)
    reason = f"spare KV {spare.kv:.3g} (least {config.wva_spare_kv:g}), spare queue {spare.queue:.3g} (least {config.wva_spare_queue:g})"
    if spare.kv < config.wva_spare_kv or spare.queue < config.wva_spare_queue:
        return 1, reason
    if len(free) < 2:
        return 0, reason
    rest = _spare(free, len(free) - 1, config)
    return (-1, reason) if rest.kv >= config.wva_spare_kv and rest.queue >= config.wva_spare_queue else (0, reason)


def _spare(free: Sequence[Fullness], number: int, config: PlannerConfig) -> Fullness:
    """Return the average spare capacity of `number` workers with this load."""
    return Fullness(
        config.wva_kv_threshold - sum(worker.kv for worker in free) / number,
        config.wva_queue_threshold - sum(worker.queue for worker in free) / number,
    )
