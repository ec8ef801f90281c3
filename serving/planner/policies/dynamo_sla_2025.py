"""NVIDIA Dynamo's SLA planner of 2025: replicas from throughput, corrected by measurements.

    p          measured TTFT / TTFT of a mean prompt;  d = measured ITL / ITL of the measured concurrency and context
    prefill    ceil(requests ISL / interval x min(1, p) / prompt tokens a second of a worker)
    decode     ceil(requests OSL / interval / tokens a second of a worker), at the fullest KV cache of 100 whose ITL is
               within limit / d
    budget     scale = budget / GPUs;  prefill round(scale x prefill), decode round(rest / GPUs of a worker)

Requests, ISL and OSL are predicted. Source: docs/architecture/sla_planner.md and planner_core.py at 353ba5dbb. Dynamo
interpolates profiled points for times; here, the pool's step times are used.
"""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from serving.planner.capacity import RequestShape, prefill_s
from serving.planner.config import PlannerConfig
from serving.planner.observation import Observation, PoolFacts, RequestTraffic
from serving.planner.policies.policy import Policy, Proposal, Rest
from serving.planner.predictors import PREDICTORS
from serving.planner.sizing import workers_for

STEPS = 100
"""Levels of KV usage to try."""


class DynamoSla2025(Policy):
    """Divides the predicted tokens by a worker's throughput, corrected."""

    description: ClassVar[str] = (
        "NVIDIA Dynamo 2025: ceil(predicted tokens a second x correction / tokens a second of a worker within limits), every 180 s"
    )
    default_interval_s: ClassVar[float] = 180.0
    needs_loads: ClassVar[bool] = False
    needs_traffic: ClassVar[bool] = True
    needs_limits: ClassVar[bool] = True
    needs_times: ClassVar[bool] = True
    layouts: ClassVar[tuple[tuple[str, ...], ...]] = (("decode", "prefill"),)

    def __init__(self, config: PlannerConfig, pools: Sequence[PoolFacts]) -> None:
        super().__init__(config, pools)
        self._by_role: dict[str, PoolFacts] = {pool.role: pool for pool in pools}
        kind = PREDICTORS[config.load_predictor]
        interval_s = config.planner_interval_s or self.default_interval_s
        self._requests, self._isl, self._osl = (kind(config, interval_s) for _ in range(3))

    @property
    def rest(self) -> Rest | None:
        """It does not look back, unless its predictor does."""
        return Rest(0.0) if self._config.load_predictor == "constant" else None

    def propose(self, seen: Observation) -> Mapping[str, Proposal | str]:
        """Propose for both pools, or report what was not measured."""
        traffic, decode = seen.traffic, self._by_role["decode"]
        assert traffic is not None
        self._requests.add(traffic.num_requests)
        if traffic.isl is None or traffic.osl is None or traffic.ttft_s is None or not traffic.duration_s:
            return dict.fromkeys(self._pools, "no request has ended since the last look")
        self._isl.add(traffic.isl)
        self._osl.add(traffic.osl)
        shape = RequestShape(self._isl.predict(), max(1.0, self._osl.predict()))
        requests = self._requests.predict() / traffic.duration_s
        of_prefill = self._prefill_correction(traffic)
        of_decode = self._decode_correction(traffic, max(1, seen.pools[decode.name].num_ready))
        wanted = self._within_budget(
            max(self._config.min_endpoint, self._prefill_workers(requests, shape, of_prefill)),
            max(self._config.min_endpoint, self._decode_workers(requests, shape, of_decode)),
        )
        reason = f"{requests:.3g} requests/s of {shape.isl:.4g} and {shape.osl:.4g} tokens predicted"
        corrections = {"prefill": of_prefill, "decode": of_decode}
        return {
            self._by_role[role].name: Proposal(number, f"{reason}, correction {corrections[role]:.3g}")
            for role, number in zip(("prefill", "decode"), wanted, strict=True)
        }

    def _prefill_correction(self, traffic: RequestTraffic) -> float:
        assert traffic.ttft_s is not None and traffic.isl is not None
        return traffic.ttft_s / _prompt_s(self._by_role["prefill"], traffic.isl)

    def _decode_correction(self, traffic: RequestTraffic, num_workers: int) -> float:
        """Return the measured ITL over the ITL at the concurrency from Little's law."""
        facts = self._by_role["decode"]
        assert facts.times is not None and traffic.isl is not None and traffic.osl is not None
        if not traffic.itl_s or not traffic.e2e_s:
            return 1.0
        ranks = num_workers * facts.num_ranks
        concurrency = max(1, round(traffic.num_requests / ranks * traffic.e2e_s / traffic.duration_s))
        context = RequestShape(traffic.isl, traffic.osl).context
        return traffic.itl_s / facts.times.step_s(0, concurrency, concurrency * context)

    def _prefill_workers(self, requests: float, shape: RequestShape, correction: float) -> int:
        facts = self._by_role["prefill"]
        throughput = shape.isl / _prompt_s(facts, shape.isl) * facts.num_ranks
        return workers_for(requests * shape.isl * min(1.0, correction), throughput)

    def _decode_workers(self, requests: float, shape: RequestShape, correction: float) -> int:
        facts = self._by_role["decode"]
        assert facts.times is not None and self._config.planner_itl_ms is not None
        limit_s = self._config.planner_itl_ms / 1e3 / (correction if correction > 0 else 1.0)
        batch, itl_s = 1, facts.times.step_s(0, 1, shape.context)
        for usage in range(STEPS, 0, -1):
            number = min(facts.max_num_seqs, facts.max_kv_tokens * usage // STEPS // shape.context)
            taken = facts.times.step_s(0, number, number * shape.context) if number else math.inf
            if taken <= limit_s:
                batch, itl_s = number, taken
                break
        return workers_for(requests * shape.osl, batch / itl_s * facts.num_ranks)

    def _within_budget(self, prefill: int, decode: int) -> tuple[int, int]:
        budget, least = self._config.max_gpu_budget, self._config.min_endpoint
        of_prefill, of_decode = (self._by_role[role].gpus_per_worker for role in ("prefill", "decode"))
        gpus = prefill * of_prefill + decode * of_decode
        if budget is None or gpus <= budget:
            return prefill, decode
        prefill = max(least, round(prefill * budget / gpus))
        return prefill, max(least, round((budget - prefill * of_prefill) / of_decode))


def _prompt_s(facts: PoolFacts, isl: float) -> float:
    """Return how long a prompt takes alone (s)."""
    assert facts.times is not None
    return prefill_s(facts.times, max(1, round(isl)), facts.max_num_batched_tokens)
