"""Knative's autoscaler (KPA), which KServe uses.

    desired(w) = ceil(mean requests in the pool over w / target per worker), between ready / 2 and 1000 x ready
    stable     desired(60 s)
    panic      while desired(6 s) >= 2 x ready, and 60 s beyond: desired(6 s), never down

Source: Knative's serving documentation and its autoscaler. Requests that wait count. The target is 70% of what a worker
runs at once, Knative's share of a hard limit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from serving.planner.config import PlannerConfig
from serving.planner.observation import PoolFacts, PoolState
from serving.planner.policies.policy import Policy, Proposal, Rest
from serving.planner.recent import Recent

TARGET_SHARE = 0.7


@dataclass(slots=True)
class _Pool:
    stable: Recent
    panic: Recent
    panics_since: float | None = None
    most_in_panic: int = 0


class Kpa(Policy):
    """Follows the requests in flight, quickly in a panic."""

    description: ClassVar[str] = (
        "Knative: ceil(requests in 60 s / target), in a panic (6 s, twice the ready workers) at once (kpa_target_concurrency)"
    )
    default_interval_s: ClassVar[float] = 2.0

    def __init__(self, config: PlannerConfig, pools: Sequence[PoolFacts]) -> None:
        super().__init__(config, pools)
        self._followed = {name: self._fresh() for name in self._pools}

    @property
    def rest(self) -> Rest:
        """It looks back at its windows; a panic may begin at the end of one and lasts for the other."""
        return Rest(self._config.kpa_panic_window_s + 2 * self._config.kpa_stable_window_s)

    def forget(self, pool: str) -> None:
        """Leave a panic."""
        self._followed[pool].panics_since = None

    def _fresh(self) -> _Pool:
        return _Pool(Recent(self._config.kpa_stable_window_s), Recent(self._config.kpa_panic_window_s))

    def _propose_one(self, now: float, facts: PoolFacts, state: PoolState) -> Proposal:
        config, pool = self._config, self._followed[facts.name]
        number = sum(load.num_requests for load in state.loads)
        pool.stable.add(now, number)
        pool.panic.add(now, number)
        target = config.kpa_target_concurrency or TARGET_SHARE * facts.max_num_seqs * facts.num_ranks
        stable, panic = math.ceil(pool.stable.mean / target), math.ceil(pool.panic.mean / target)
        self._look(now, pool, is_over=panic / state.num_ready >= config.kpa_panic_threshold)
        most = math.ceil(config.kpa_max_up_rate * state.num_ready)
        least = math.floor(state.num_ready / config.kpa_max_down_rate)
        if pool.panics_since is None:
            return Proposal(
                min(max(stable, least), most),
                f"{pool.stable.mean:.4g} requests on average, {target:.4g} per worker wanted",
            )
        pool.most_in_panic = max(pool.most_in_panic, min(panic, most), state.num_ready)
        return Proposal(
            pool.most_in_panic, f"panic: {pool.panic.mean:.4g} requests on average, {target:.4g} per worker wanted"
        )

    def _look(self, now: float, pool: _Pool, *, is_over: bool) -> None:
        """Start, prolong or leave a panic."""
        if is_over:
            if pool.panics_since is None:
                pool.most_in_panic = 0
            pool.panics_since = now
        elif pool.panics_since is not None and pool.panics_since + self._config.kpa_stable_window_s < now:
            pool.panics_since = None
