"""Ours: each pool is sized for the time when a worker that is started now will be ready.

    s         start-up time of a worker;  H = s + the interval;  c = requests a second of a worker within the limits
    load      max(recent requests a second, those predicted for now + H) / c, in workers
    room      how many times the load the pool must be able to take (`surprises`): the factor over what was expected H before
              that covers 99% of what came in the last hour, and at least 1 / (1 - headroom)
    state     requests that run / those that a worker runs at once within the limits, in workers, no rank more than full
    base      max(load x room, state)
    backlog   work of requests that wait, or run beyond the limits, after s: now + (load - ready - starting / 2) s, in
              worker-seconds, less what the base works off within the TTFT limit
    extra     min(sqrt(late weight x load x backlog / s), backlog / TTFT limit)
    up        at once, to ceil(base + extra)
    down      to the most needed in the last hold x s, and a twentieth more

Extra workers: n of them clear the backlog in backlog / n seconds. All requests that arrive until then are late. That is
load x backlog / n worker-seconds of requests, which count `lead_late_weight` times; each of the n costs its start, s. The
sum is least at the root. More workers than can clear the backlog within the limit make no request less late.

Holding: removing a worker that is needed again costs its start, s, and the requests that are late meanwhile, counted
`lead_late_weight` times. An idle worker costs as much after that time. Keeping it that long never costs more than twice
the best possible choice, made with knowledge of when it is needed again (ski rental).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import ClassVar, NamedTuple

from serving.planner.capacity import Capacity, RequestShape
from serving.planner.config import PlannerConfig
from serving.planner.observation import Observation, PoolFacts, PoolState, RequestTraffic
from serving.planner.policies.policy import Policy, Proposal, Rest
from serving.planner.predictors import PREDICTORS
from serving.planner.recent import Recent
from serving.planner.sizing import capacity_of, merged
from serving.planner.surprises import Surprises

MIN_HOLD_S = 30.0
BAND = 0.05
"""A pool shrinks only if it exceeds the need by more than this share."""
SHAPE_WINDOW_S = 300.0
ALIKE = 0.02
"""Share by which requests may change before a worker's capacity is searched again."""


class Need(NamedTuple):
    """Workers that a pool needs."""

    load: float
    """For the arriving requests."""
    state: float
    """For the running requests."""
    extra: float
    """For the waiting requests."""
    room: float
    """How many times the expected load the pool must be able to take."""

    @property
    def base(self) -> float:
        """Workers without those for the backlog."""
        return max(self.load * self.room, self.state)

    @property
    def total(self) -> float:
        """Workers in all."""
        return self.base + self.extra


@dataclass(slots=True)
class _Traffic:
    """Recent requests."""

    windows: list[tuple[float, RequestTraffic]] = field(default_factory=list)
    shape: RequestShape | None = None
    """The mean request; None until one has arrived."""
    is_osl_known: bool = False


class LeadTime(Policy):
    """Orders workers a start-up time ahead, and keeps them as long as a start costs."""

    description: ClassVar[str] = (
        "our own: ceil(load expected until a start is ready / capacity within limits + sqrt(weight x load x backlog / start-up time)) (lead_*)"
    )
    default_interval_s: ClassVar[float] = 5.0
    needs_traffic: ClassVar[bool] = True
    needs_limits: ClassVar[bool] = True
    needs_times: ClassVar[bool] = True
    layouts: ClassVar[tuple[tuple[str, ...], ...]] = (("aggregated",), ("decode", "prefill"))

    def __init__(self, config: PlannerConfig, pools: Sequence[PoolFacts]) -> None:
        super().__init__(config, pools)
        self._ttft_s = (config.planner_ttft_ms or math.inf) / 1e3
        self._itl_s = (config.planner_itl_ms or math.inf) / 1e3
        self._traffic = _Traffic()
        self._step_s = max(config.lead_window_s, self._interval_s)
        self._predictor = PREDICTORS[config.load_predictor](config, self._step_s)
        self._unpredicted_s = 0.0  # since the predictor got a value
        self._needs = {pool.name: Recent(max(MIN_HOLD_S, config.lead_hold * pool.startup_s)) for pool in pools}
        self._is_followed = dict.fromkeys(self._pools, False)
        self._surprises = {
            pool.name: Surprises(pool.startup_s + self._interval_s, config.lead_memory_s) for pool in pools
        }
        self._capacities: dict[str, tuple[RequestShape, Capacity | None]] = {}

    @property
    def rest(self) -> Rest | None:
        """It looks back at its windows, and the predictor gets a value after several looks."""
        if self._config.load_predictor != "constant":
            return None
        startup_s = max(pool.startup_s for pool in self._pools.values())
        windows_s = (
            SHAPE_WINDOW_S,
            self._step_s,
            self._config.lead_memory_s + startup_s + self._interval_s,
            max(MIN_HOLD_S, self._config.lead_hold * startup_s),
        )
        return Rest(sum(windows_s), (Fraction(self._step_s) / Fraction(self._interval_s)).numerator)

    def propose(self, seen: Observation) -> Mapping[str, Proposal | str]:
        """Propose for each pool separately."""
        assert seen.traffic is not None
        rate = self._note(seen.now, seen.traffic)
        return {
            name: self._propose(seen.now, self._pools[name], state, rate)
            for name, state in seen.pools.items()
            if state.num_ready
        }

    def forget(self, pool: str) -> None:
        """Forget past needs."""
        self._needs[pool].clear()
        self._is_followed[pool] = False

    def _note(self, now: float, traffic: RequestTraffic) -> float:
        """Record arrivals, and return the recent requests a second."""
        known = self._traffic
        known.windows = [each for each in known.windows if each[0] > now - SHAPE_WINDOW_S] + [(now, traffic)]
        mean = merged([each for _, each in known.windows])
        if mean.isl is not None:
            known.is_osl_known |= mean.osl is not None
            known.shape = RequestShape(mean.isl, max(1.0, mean.osl or 1.0), mean.hit_share or 0.0)
        lately = [each for at, each in known.windows if at > now - self._config.lead_window_s]
        duration_s = sum(each.duration_s for each in lately)
        rate = sum(each.num_requests for each in lately) / duration_s if duration_s else 0.0
        self._unpredicted_s += traffic.duration_s
        if self._unpredicted_s >= self._step_s:
            self._predictor.add(rate)
            self._unpredicted_s -= self._step_s
        return rate

    def _propose(self, now: float, facts: PoolFacts, state: PoolState, rate: float) -> Proposal | str:
        shape = self._traffic.shape
        if shape is None:
            return "no request has come yet"
        if facts.role != "prefill" and not self._traffic.is_osl_known:
            return "no request has ended yet"
        capacity = self._capacity(facts, shape)
        if capacity is None:
            return f"a worker cannot run requests of {shape.isl:.4g} and {shape.osl:.4g} tokens"
        demand = self._demand(facts, rate)
        surprises = self._surprises[facts.name]
        surprises.add(now, self._came(facts, shape), demand)
        foreseen = surprises.foresee(demand, self._config.lead_share) or demand
        room = max(foreseen / demand if demand else 1.0, 1 / (1 - self._config.lead_headroom))
        need = self._need(facts, state, capacity, demand, room)
        needs = self._needs[facts.name]
        if not self._is_followed[facts.name]:
            needs.add(now, state.size)  # the workers present before may have been needed
            self._is_followed[facts.name] = True
        needs.add(now, need.total)
        wanted, kept = math.ceil(need.total - 1e-9), math.ceil(needs.most * (1 + BAND) - 1e-9)
        reason = (
            f"load needs {need.load:.3g} workers at {capacity.rps:.3g} requests/s, x {need.room:.3g} for surprises, running requests {need.state:.3g}, "
            f"backlog {need.extra:.3g} more{'' if capacity.is_within else '; no batch keeps the limits'}"
        )
        return Proposal(max(wanted, min(kept, state.size)), reason)

    def _demand(self, facts: PoolFacts, rate: float) -> float:
        """Return the requests a second to be ready for."""
        steps = math.ceil((facts.startup_s + self._interval_s) / self._step_s)
        return max(rate, self._predictor.predict(steps))

    @property
    def _interval_s(self) -> float:
        return self._config.planner_interval_s or self.default_interval_s

    def _came(self, facts: PoolFacts, shape: RequestShape) -> float:
        """Return the requests a second of the last look; for prefill workers, a long request counts as several."""
        _, last = self._traffic.windows[-1]
        rate = last.num_requests / last.duration_s if last.duration_s else 0.0
        return rate if facts.role == "decode" or last.isl is None else rate * last.isl / shape.isl

    def _need(self, facts: PoolFacts, state: PoolState, capacity: Capacity, demand: float, room: float) -> Need:
        """Return the workers that a pool needs."""
        startup_s = max(facts.startup_s, 1.0)
        load = demand / capacity.rps
        full = capacity.batch / facts.num_ranks
        running = sum(min(each.num_running, full) for each in state.loads) / capacity.batch
        need = Need(load, 0.0 if facts.role == "prefill" else running, 0.0, room)
        lacking = load - state.num_ready - state.num_starting / 2
        backlog = self._waiting(facts, state, full) / capacity.rps + lacking * facts.startup_s
        patience_s = self._ttft_s if self._ttft_s < math.inf else startup_s
        backlog -= max(1.0, need.base) * patience_s
        if backlog <= 0:
            return need
        root = math.sqrt(self._config.lead_late_weight * load * backlog / startup_s)
        return need._replace(extra=min(root, backlog / patience_s))

    def _waiting(self, facts: PoolFacts, state: PoolState, full: float) -> float:
        """Return the requests that wait, or run in excess of what a rank can run within the limits."""
        if facts.role != "prefill":
            return sum(load.num_waiting + max(0.0, load.num_running - full) for load in state.loads)
        assert self._traffic.shape is not None
        return sum(load.queued_prefill_tokens for load in state.loads) / self._traffic.shape.num_computed

    def _capacity(self, facts: PoolFacts, shape: RequestShape) -> Capacity | None:
        """Return a worker's capacity for such requests; reuse the result for nearly the same ones."""
        known = self._capacities.get(facts.name)
        if known is None or not known[0].is_near(shape, ALIKE):
            known = shape, capacity_of(facts, shape, ttft_s=self._ttft_s, itl_s=self._itl_s)
            self._capacities[facts.name] = known
        return known[1]
