"""What holds of a planner and its workers in every rehearsal (the sentences are in `invariants.py`)."""

import asyncio
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from dynabench.deployment.description import Deployment, Pool
from dynabench.planner.service import ANSWER_S, WAIT_S, PlannerService
from dynabench.rehearsal.checks.invariants import Violation
from dynabench.rehearsal.checks.programs import requests_at
from dynabench.rehearsal.clients.client import Answer
from dynabench.rehearsal.faults.weather import CALM_S, Weather
from dynabench.rehearsal.stage.stage import PLANNER, Actor, Stage
from dynabench.rehearsal.stage.supervisor import Supervisor, Worker
from serving.planner import PlannerConfig

KNOWN_S = 1.0
"""After what time a worker that is ready counts as one to which requests can go (s)."""
SLACK_S = 3.0
"""How much longer than its interval a planner may take until it looks again (s)."""


class PlanWatch:
    """Looks at the workers of each pool while a rehearsal runs."""

    def __init__(
        self,
        deployment: Deployment,
        stage: Stage,
        supervisor: Supervisor,
        answers: Sequence[Answer],
        weather: Weather,
    ) -> None:
        """Watch the workers of a supervisor; `answers` grows as requests are sent."""
        self._deployment = deployment
        self._supervisor = supervisor
        self._answers = answers
        self._weather = weather
        self.there: list[tuple[float, Sequence[set[str]]]] = []
        """Who could take requests in the pools of each model and role, and since when (s, by the loop's clock)."""
        self._cut_short: list[str] = []
        self._sizes: dict[str, int] = {}
        self._directions: dict[str, set[bool]] = {}  # whether pools grew and shrank while nothing happened
        self._num_changes = 0
        self._num_starting = Counter[
            str
        ]()  # workers of each pool at the last look: those that do not come up are given up
        stage.on_end = self._on_end

    def look(self, now: float) -> Iterator[Violation]:
        """Check the workers that there are now."""
        pools = {pool.name: list(self._supervisor.workers(pool.name)) for pool in self._deployment.pools}
        self._note_there(now, pools)
        yield from (Violation("drained", what) for what in self._cut_short)
        if self._supervisor.hands is None:
            return
        sizes = {name: sum(not worker.is_leaving for worker in workers) for name, workers in pools.items()}
        yield from _within_bounds(self._deployment, sizes, {name: len(workers) for name, workers in pools.items()})
        yield from self._steps()
        yield from self._settled(now, sizes)

    def _note_there(self, now: float, pools: dict[str, list[Worker]]) -> None:
        kinds = dict.fromkeys((pool.served_name, pool.role) for pool in self._deployment.pools)
        found = [
            {
                worker.name
                for pool in self._deployment.pools
                if (pool.served_name, pool.role) == kind
                for worker in pools[pool.name]
                if not worker.is_leaving and worker.up_since_s + KNOWN_S <= now
            }
            for kind in kinds
        ]
        if not self.there or self.there[-1][1] != found:
            self.there.append((now, found))

    def _steps(self) -> Iterator[Violation]:
        """Check the decisions that were carried out since the last look, of a planner that sees everything."""
        assert self._supervisor.hands is not None
        config, roster, starting = self._deployment.planner, self._supervisor.hands.roster, self._num_starting
        new, self._num_changes = roster.changes[self._num_changes :], len(roster.changes)
        self._num_starting = Counter(each.pool for each in roster.members.values() if each.state == "starting")
        step = config.max_scale_step
        if step is None or config.max_gpu_budget or config.min_gpu_budget or not self._weather.is_calm:
            return
        for change in new:
            if not -step - starting[change.pool] <= change.after - change.before <= step:
                yield Violation(
                    "planned", f"{change.pool}: {change.before} -> {change.after} workers; a step is {step}"
                )

    def _settled(self, now: float, sizes: dict[str, int]) -> Iterator[Violation]:
        """Check that no pool both grows and shrinks while no requests come."""
        over_s = max((answer.ended_s or math.inf for answer in self._answers), default=now)
        is_quiet = now - over_s >= CALM_S and self._weather.is_calm
        for name, size in sizes.items():
            if not is_quiet:
                self._directions[name] = set()
            elif size != self._sizes[name]:
                self._directions[name].add(size > self._sizes[name])
            if len(self._directions[name]) == 2:
                yield Violation("settled", f"{name} grows and shrinks without requests; it has {size} workers")
        self._sizes = sizes

    def _on_end(self, actor: Actor) -> None:
        """Note a worker whose end comes before that of its requests, although no fault ended it."""
        drain_s = getattr(actor.program.settings[0], "drain_s", 0.0)
        now = asyncio.get_running_loop().time()
        if actor.asked_s is None or actor.is_harmed or now - actor.asked_s >= drain_s:
            return
        if left := len(list(requests_at(actor))):
            after = f"{now - actor.asked_s:.3f} s after it was asked to, and could take {drain_s:g} s"
            self._cut_short.append(f"{actor.program.name} ended with {left} requests, {after}")


def bounds_of(pool: Pool, config: PlannerConfig) -> tuple[int, float]:
    """Return the fewest and the most workers that a pool may have; it may begin with fewer or more."""
    if config.advisory:
        return pool.replicas, pool.replicas
    most = math.inf if config.max_replicas is None else config.max_replicas
    return min(config.min_endpoint, pool.replicas), max(most, pool.replicas)


def _within_bounds(deployment: Deployment, sizes: dict[str, int], present: dict[str, int]) -> Iterator[Violation]:
    """Check numbers of workers: those that run or start, and all that are present, the draining ones included."""
    config = deployment.planner
    for pool in deployment.pools:
        (least, most), size = bounds_of(pool, config), sizes[pool.name]
        if not least <= size <= most:
            yield Violation("planned", f"{pool.name} has {size} workers, not between {least} and {most:g}")
    if config.max_gpu_budget is None:
        return
    begin = sum(pool.replicas * pool.gpus_per_worker for pool in deployment.pools)
    used = sum(present[pool.name] * pool.gpus_per_worker for pool in deployment.pools)
    if used > max(config.max_gpu_budget, begin):
        yield Violation("planned", f"the workers have {used} GPUs; the budget is {config.max_gpu_budget}")


def of_plan(deployment: Deployment, stage: Stage, supervisor: Supervisor, now: float) -> Iterator[Violation]:
    """Check that a planner plans, and that its orders are carried out, once faults are over."""
    if supervisor.hands is None:
        return
    if (error := supervisor.hands.error) is not None:
        yield Violation("alive", f"the planner's orders are no longer carried out: {error!r:.300}")
    actor = next(stage.running([PLANNER]), None)
    if actor is None or actor.planner is None:
        yield Violation("followed", "no planner runs")
        return
    roster = supervisor.hands.roster
    for why in _blind(actor.planner, now):
        yield Violation("followed", f"the planner does not plan: {why}")
    if [*actor.planner._fleets.values()] != [roster.fleet()]:
        yield Violation("followed", "the planner does not know the workers that there are")
    for pool in deployment.pools:
        states = {member.name: member.state for member in roster.members.values() if member.pool == pool.name}
        found = {worker.name: worker.is_leaving for worker in supervisor.workers(pool.name)}
        if {name: state == "draining" for name, state in states.items()} != found:
            yield Violation("followed", f"the workers of {pool.name} are {found} (leaving), and were noted as {states}")
        if unready := [name for name, state in states.items() if state != "ready"]:
            yield Violation("followed", f"{', '.join(unready)} of {pool.name} are neither ready nor gone")
        wanted = actor.planner._orders.wanted.get(pool.name)
        if wanted is not None and wanted.replicas != len(states):
            yield Violation("followed", f"{pool.name} has {len(states)} workers; {wanted.replicas} were ordered")


def _blind(service: PlannerService, now: float) -> Iterator[str]:
    """Yield why a planner does not plan."""
    looked_s = now - service._looked[0] if service._looked is not None else math.inf
    if looked_s > service._interval_s + WAIT_S + ANSWER_S + SLACK_S:
        yield f"it last looked {looked_s:.3f} s ago"
    if not service.is_planning:
        yield "; ".join(service._said) or "it lacks an input"
