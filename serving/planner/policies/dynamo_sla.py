"""NVIDIA Dynamo 1.6's planner for the optimization target sla: a slow loop sets floors, a fast loop moves by one.

    slow   every 180 s: requests, ISL and OSL predicted; workers = ceil(requests a second / those of a worker within
           the limits), at most 8 away from the ready ones: the least that the fast loop keeps
    fast   each rank's TTFT: time to compute queued tokens and one mean prompt, without what is cached
           each rank's ITL: step time with all that decodes or waits to
           +1    if all ranks exceed a limit (aggregated: the same one)
           -1    if with the load of N / (N - 1) workers, of each rank (aggregated: both)
                 TTFT - TTFT without a queue < (limit - TTFT without a queue) 0.8;  ITL < limit x 0.8, and the KV fits

While workers start, no pool grows. Source: dynamo.planner.core (throughput_scaling, load_scaling, engine_query). Dynamo
learns step times from the engines and counts accepted tokens of speculation; here the pool's step times are used, and
a step produces one token.
"""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

from serving.planner.capacity import RequestShape, drain_s, prefill_per_step
from serving.planner.config import PlannerConfig
from serving.planner.observation import Observation, PoolFacts, PoolState, RankLoad, RequestTraffic
from serving.planner.policies.policy import Policy, Proposal, Rest
from serving.planner.predictors import PREDICTORS
from serving.planner.sizing import capacity_of, merged, workers_for

MAX_STEP = 8
"""The most workers by which the slow loop moves a floor away from the ready ones."""


class Verdict(NamedTuple):
    """How the ranks of a pool compare with a limit."""

    is_over: bool
    """Whether all ranks exceed it."""
    can_shrink: bool
    reason: str


class DynamoSla(Policy):
    """Sets floors for the predicted load periodically, and moves by one worker with the queues."""

    description: ClassVar[str] = (
        "NVIDIA Dynamo 1.6, sla: floors ceil(predicted demand / capacity within limits) every 180 s; +-1 by estimated TTFT and ITL"
    )
    default_interval_s: ClassVar[float] = 5.0
    needs_traffic: ClassVar[bool] = True
    needs_limits: ClassVar[bool] = True
    needs_times: ClassVar[bool] = True
    layouts: ClassVar[tuple[tuple[str, ...], ...]] = (("aggregated",), ("decode", "prefill"))
    waits_for_starts: ClassVar[bool] = True

    def __init__(self, config: PlannerConfig, pools: Sequence[PoolFacts]) -> None:
        super().__init__(config, pools)
        self._ttft_s = (config.planner_ttft_ms or float("inf")) / 1e3
        self._itl_s = (config.planner_itl_ms or float("inf")) / 1e3
        self._windows: list[RequestTraffic] = []
        self._shape: RequestShape | None = None
        self._floors: dict[str, int] = {}
        interval_s = config.dynamo_throughput_interval_s
        kind = PREDICTORS[config.load_predictor]
        self._requests, self._isl, self._osl = (kind(config, interval_s) for _ in range(3))

    @property
    def rest(self) -> Rest | None:
        """The slow loop comes round after several looks, and sets the same floors from the second time on."""
        interval_s = self._config.planner_interval_s or self.default_interval_s
        every = math.ceil(self._config.dynamo_throughput_interval_s / interval_s)
        return Rest(2 * every * interval_s, every) if self._config.load_predictor == "constant" else None

    def propose(self, seen: Observation) -> Mapping[str, Proposal | str]:
        """Update the floors when due, then propose for each pool separately."""
        assert seen.traffic is not None
        self._windows.append(seen.traffic)
        recent = merged(self._windows)
        if recent.isl is not None:
            self._shape = RequestShape(recent.isl, recent.osl or 1.0, recent.hit_share or 0.0)
        if recent.duration_s >= self._config.dynamo_throughput_interval_s:
            self._windows.clear()
            self._set_floors(seen, recent)
        return {name: self._propose(self._pools[name], state) for name, state in seen.pools.items() if state.num_ready}

    def forget(self, pool: str) -> None:
        """Forget the floor."""
        self._floors.pop(pool, None)

    def _set_floors(self, seen: Observation, recent: RequestTraffic) -> None:
        self._requests.add(recent.num_requests)
        if recent.isl is not None and recent.osl is not None:
            self._isl.add(recent.isl)
            self._osl.add(recent.osl)
        shape = RequestShape(self._isl.predict(), max(1.0, self._osl.predict()), recent.hit_share or 0.0)
        if shape.isl < 1:
            return
        demand = self._requests.predict() / recent.duration_s
        for name, facts in self._pools.items():
            capacity = capacity_of(facts, shape, ttft_s=self._ttft_s, itl_s=self._itl_s)
            if capacity is not None:
                ready = seen.pools[name].num_ready
                needed = workers_for(demand, capacity.rps)
                self._floors[name] = min(max(needed, ready - MAX_STEP), ready + MAX_STEP)

    def _propose(self, facts: PoolFacts, state: PoolState) -> Proposal | str:
        if self._shape is None:
            return "no request has come yet"
        floor = self._floors.get(facts.name, 0)
        verdicts = self._verdicts(facts, state, self._shape)
        over = [verdict for verdict in verdicts if verdict.is_over]
        if over:
            return Proposal(max(state.num_ready + 1, floor), over[0].reason)
        if floor > state.size:
            return Proposal(floor, f"the predicted load needs {floor}")
        if state.size > 1 and all(verdict.can_shrink for verdict in verdicts):
            fewer = max(state.num_ready - 1, floor, 1)
            reason = "; ".join(verdict.reason for verdict in verdicts)
            return Proposal(fewer, f"the predicted load needs {floor}" if fewer == floor else reason)
        return Proposal(state.size, "; ".join(verdict.reason for verdict in verdicts))

    def _verdicts(self, facts: PoolFacts, state: PoolState, shape: RequestShape) -> list[Verdict]:
        verdicts = []
        if facts.role != "decode":
            verdicts.append(self._ttft_verdict(facts, state, shape))
        if facts.role != "prefill":
            verdicts.append(self._itl_verdict(facts, state, shape))
        return verdicts

    def _ttft_verdict(self, facts: PoolFacts, state: PoolState, shape: RequestShape) -> Verdict:
        """Compare the ranks' TTFT with the limit."""
        found = [ttft_of(facts, load, shape) for load in state.loads]
        ratio = _consolidation(state)
        can_shrink = True
        for load in state.loads:
            own = ttft_of(facts, load, shape, queue=0.0, decodes=ratio)
            after = ttft_of(facts, load, shape, queue=ratio, decodes=ratio)
            can_shrink &= after - own < (self._ttft_s - own) * self._config.dynamo_down_sensitivity
        return Verdict(
            min(found) > self._ttft_s, can_shrink, f"TTFT would be {_ms(found)}, its limit {self._ttft_s * 1e3:.4g} ms"
        )

    def _itl_verdict(self, facts: PoolFacts, state: PoolState, shape: RequestShape) -> Verdict:
        """Compare the ranks' ITL with the limit."""
        found = [itl_of(facts, load, shape) for load in state.loads]
        ratio = _consolidation(state)
        can_shrink = all(
            kv_of(facts, load) * ratio < facts.max_kv_tokens
            and itl_of(facts, load, shape, scale=ratio) < self._itl_s * self._config.dynamo_down_sensitivity
            for load in state.loads
        )
        return Verdict(
            min(found) > self._itl_s, can_shrink, f"ITL would be {_ms(found)}, its limit {self._itl_s * 1e3:.4g} ms"
        )


def ttft_of(
    facts: PoolFacts, load: RankLoad, shape: RequestShape, *, queue: float = 1.0, decodes: float = 1.0
) -> float:
    """Return the TTFT of a mean request that arrives at a rank now (s), with its queue and decodes scaled."""
    assert facts.times is not None
    tokens = load.queued_prefill_tokens * queue * shape.num_computed / max(1.0, shape.isl) + shape.num_computed
    is_mixed = facts.role == "aggregated"
    return drain_s(
        facts.times,
        tokens,
        facts.max_num_batched_tokens,
        num_decodes=round(load.num_running * decodes) if is_mixed else 0,
        num_kv_tokens=round(load.decode_kv_tokens * decodes) if is_mixed else 0,
    )


def itl_of(facts: PoolFacts, load: RankLoad, shape: RequestShape, *, scale: float = 1.0) -> float:
    """Return the ITL of a rank (s) with all that decodes there or waits to, scaled."""
    assert facts.times is not None
    tokens = round((load.decode_kv_tokens + load.queued_decode_kv_tokens) * scale)
    if not tokens:
        return 0.0
    running = load.num_running + (load.num_waiting if facts.role == "decode" else 0)
    number = min(max(1, round(running * scale)), facts.max_num_seqs)
    prefill = prefill_per_step(shape, number) if facts.role == "aggregated" and shape.osl > 1 else 0
    return facts.times.step_s(min(prefill, facts.max_num_batched_tokens), number, tokens)


def kv_of(facts: PoolFacts, load: RankLoad) -> int:
    """Return the KV tokens that a rank's requests need once all of them decode."""
    queued = load.queued_prefill_tokens if facts.role == "aggregated" else 0
    return load.decode_kv_tokens + load.queued_decode_kv_tokens + queued


def _consolidation(state: PoolState) -> float:
    """Return how much more load a worker has when one leaves."""
    return state.num_ready / (state.num_ready - 1) if state.num_ready > 1 else 1.0


def _ms(found: Sequence[float]) -> str:
    low, high = (f"{each * 1e3:.0f}" for each in (min(found), max(found)))
    return f"{low} ms" if low == high else f"{low} to {high} ms"
