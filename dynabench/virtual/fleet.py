"""The workers of a simulated deployment, from start to end.

    pending --GPUs are free--> starting --in time--> ready --told to leave--> draining --has no request--> gone
       ^                          |                    |                         |
       +--------- fails ----------+                    +------- dies ------------+--> gone

A worker is pending while all GPUs of the deployment are in use. It holds its GPUs from its start until it is gone. Each
pool has a target size, and workers are started until it is reached. So a worker that dies is replaced, unless the size
drops at the same time.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

from msgspec import structs

from dynabench.deployment.engines import SimulatedPool
from dynabench.deployment.fleet import FleetConfig
from dynabench.deployment.fleet_events import Drain, FleetEvent, Kill, Resize, Slow, pool_of
from dynabench.virtual.clock import ARRIVAL, Clock
from dynabench.virtual.rank import Rank
from reports.record.fleet import Headcount

State = Literal["pending", "starting", "ready", "draining", "gone"]
STATES: tuple[State, ...] = ("pending", "starting", "ready", "draining", "gone")
ON_GPUS: tuple[State, ...] = ("starting", "ready", "draining")


@dataclass(slots=True, eq=False)
class Worker:
    """A worker: a process with one or more ranks."""

    number: int
    """Its position in the order in which workers were requested."""
    pool: SimulatedPool
    state: State = "pending"
    ranks: list[Rank] = field(default_factory=list)
    """Its ranks, once it is ready."""
    since_s: float = math.inf
    """When it acquired its GPUs."""
    ready_s: float = math.inf
    num_slowed: int = 0
    """How often it was slowed down."""
    until_s: float = math.inf
    """When it released its GPUs."""

    @property
    def num_requests(self) -> int:
        """The number of its requests."""
        return sum(len(rank.sequences) for rank in self.ranks)


class Site(Protocol):
    """Where the workers of a fleet are put to work."""

    def start_ranks(self, worker: Worker) -> list[Rank]:
        """Make the ranks of a worker that is ready, and start routing requests to them."""

    def stop_routing(self, rank: Rank) -> object:
        """Stop sending requests to a rank."""

    def abandon(self, rank: Rank) -> object:
        """Let the requests of a rank that is gone continue elsewhere."""

    def hand_over(self, rank: Rank) -> object:
        """Move the requests of a rank elsewhere, with their KV."""


class Fleet:
    """The workers of each pool."""

    def __init__(
        self,
        pools: Sequence[SimulatedPool],
        config: FleetConfig,
        clock: Clock,
        site: Site,
        *,
        gpus: int | None,
        rng: random.Random,
    ) -> None:
        """Start with the initial workers of each pool, all ready.

        Args:
            pools: the pools, with their initial number of workers.
            config: how workers are started and stopped.
            clock: the clock.
            site: where workers are put to work.
            gpus: the number of GPUs (None: always enough).
            rng: draws start-up times and failures.

        Raises:
            ValueError: an event names a pool that does not exist.
        """
        self.workers: list[Worker] = []
        self.pools = {pool.name: pool for pool in pools}
        self.sizes = {pool.name: pool.replicas for pool in pools}
        """The target size of each pool."""
        self._in_state: dict[str, dict[State, dict[Worker, None]]] = {
            name: {state: {} for state in STATES} for name in self.pools
        }
        self._gpus_taken = 0
        self.history: dict[str, list[Headcount]] = {name: [] for name in self.pools}
        self.num_failed_starts = dict.fromkeys(self.pools, 0)
        self.died_s: dict[str, list[float]] = {name: [] for name in self.pools}
        """When workers died."""
        self._pending: deque[Worker] = deque()  # includes some that are no longer pending
        self._config = config
        self._clock = clock
        self._site = site
        self._gpus = gpus
        self._rng = rng
        for pool in pools:
            for _ in range(pool.replicas):
                worker = self._ask_for(pool)
                worker.since_s = 0.0
                self._be_ready(worker)
            self._note(pool.name)
        for event in config.timeline:
            if isinstance(event.action, Resize):
                pool_of(event.action, self.pools)
            clock.at(event.time_s, ARRIVAL, partial(self.act, event))

    def act(self, event: FleetEvent) -> None:
        """Carry out an event.

        Raises:
            ValueError: it names a worker that does not exist now.
        """
        match event.action:
            case Resize() as resize:
                name = pool_of(resize, self.pools)
                self.resize(name, resize.size(self.sizes[name]))
            case Kill(number, is_replaced):
                self.kill(self._named(event, number), is_replaced=is_replaced)
            case Drain(number):
                worker = self._named(event, number)
                self.sizes[worker.pool.name] -= 1
                self._leave(worker)
            case Slow(number, factor, duration_s):
                self._slow(self._named(event, number, "ready", "draining"), factor, duration_s)

    def _named(self, event: FleetEvent, number: int, *states: State) -> Worker:
        """Return the worker that an event names, which must be in one of some states (default: any but gone)."""
        states = states or ("pending", "starting", "ready", "draining")
        if number < len(self.workers) and self.workers[number].state in states:
            return self.workers[number]
        state = f"is {self.workers[number].state}" if number < len(self.workers) else "does not exist"
        there = ", ".join(str(worker.number) for worker in self.workers if worker.state in states)
        expected = f"one of {there}" if there else "another time: no worker can be named then"
        raise ValueError(
            f"events: at {event.time_s:g}s: {event.text}: worker {number} {state} at that time; expected {expected}"
        )

    def of(self, pool: str, *states: State) -> list[Worker]:
        """Return the workers of a pool in some states, by number."""
        found = (worker for state in states for worker in self._in_state[pool][state])
        return sorted(found, key=lambda worker: worker.number)

    def resize(self, pool: str, size: int) -> None:
        """Start or drain workers of a pool until it has this size; workers that are not ready leave first."""
        self.sizes[pool] = size
        workers = self.of(pool, "pending", "starting", "ready")
        for worker in sorted(workers, key=_worth)[: max(len(workers) - size, 0)]:
            self._leave(worker)
        for _ in range(size - len(workers)):
            self._ask_for(self.pools[pool])
        self._start_those_that_can()
        self._note(pool)

    def kill(self, worker: Worker, *, is_replaced: bool) -> None:
        """Let a worker die; its requests continue elsewhere."""
        was_needed = worker.state != "draining"
        self.died_s[worker.pool.name].append(self._clock.now)
        self._be_gone(worker)
        if was_needed:
            size = self.sizes[worker.pool.name]
            self.resize(worker.pool.name, size if is_replaced else size - 1)

    def most(self, pool: str) -> int:
        """Return the maximum number of workers of a pool that were ready or draining at one time."""
        return max(row.ready + row.draining for row in self.history[pool])

    def gpu_s(self, pool: str, end_s: float) -> float:
        """Return the GPU-seconds that a pool's workers have used until a given time."""
        workers = [worker for worker in self.workers if worker.pool.name == pool and worker.since_s < end_s]
        return sum((min(each.until_s, end_s) - each.since_s) * each.pool.gpus_per_worker for each in workers)

    def _ask_for(self, pool: SimulatedPool) -> Worker:
        worker = Worker(len(self.workers), pool)
        self.workers.append(worker)
        self._in_state[pool.name][worker.state][worker] = None
        self._pending.append(worker)
        return worker

    def _set(self, worker: Worker, state: State) -> None:
        """Change a worker's state; it has its GPUs while it is starting, ready or draining."""
        of_pool, before = self._in_state[worker.pool.name], worker.state
        del of_pool[before][worker]
        of_pool[state][worker] = None
        self._gpus_taken += worker.pool.gpus_per_worker * ((state in ON_GPUS) - (before in ON_GPUS))
        worker.state = state

    def _start_those_that_can(self) -> None:
        """Start pending workers in order, while there are free GPUs."""
        started: dict[str, None] = {}
        while self._pending:
            worker = self._pending[0]
            if worker.state == "pending":  # it may have been told to leave since
                if self._gpus is not None and self._gpus_taken + worker.pool.gpus_per_worker > self._gpus:
                    break
                self._start(worker)
                started[worker.pool.name] = None
            self._pending.popleft()
        for name in started:
            self._note(name)

    def _start(self, worker: Worker) -> None:
        self._set(worker, "starting")
        worker.since_s = self._clock.now
        self._try(worker)

    def _try(self, worker: Worker) -> None:
        lasts_s = self._config.draw_startup_s(worker.pool.startup_s, self._rng)
        fails = self._rng.random() < self._config.start_failure_rate
        end = self._fail if fails else self._be_ready
        self._clock.at(self._clock.now + lasts_s, ARRIVAL, partial(self._end_start, worker, end))

    def _end_start(self, worker: Worker, end: Callable[[Worker], None]) -> None:
        if worker.state == "starting":  # it may have been told to leave since
            end(worker)
            self._note(worker.pool.name)

    def _fail(self, worker: Worker) -> None:
        self.num_failed_starts[worker.pool.name] += 1
        self._try(worker)

    def _be_ready(self, worker: Worker) -> None:
        self._set(worker, "ready")
        worker.ready_s = self._clock.now
        worker.ranks = self._site.start_ranks(worker)

    def _leave(self, worker: Worker) -> None:
        """Let a worker finish its requests, then remove it."""
        if worker.state in ("pending", "starting"):
            self._be_gone(worker)
            return
        self._set(worker, "draining")
        for rank in worker.ranks:
            self._site.stop_routing(rank)
            rank.on_idle = partial(self._on_idle, worker)
        self._note(worker.pool.name)
        for rank in worker.ranks if self._config.drain_policy == "hand-over" else ():
            self._site.hand_over(rank)
        self._on_idle(worker)
        if worker.state == "draining" and self._config.drain_policy == "bounded":
            self._clock.at(self._clock.now + self._config.drain_limit_s, ARRIVAL, partial(self._cut_off, worker))

    def _on_idle(self, worker: Worker) -> None:
        if worker.state == "draining" and all(rank.is_done for rank in worker.ranks):
            self._be_gone(worker)

    def _cut_off(self, worker: Worker) -> None:
        if worker.state == "draining":
            self._be_gone(worker)

    def _be_gone(self, worker: Worker) -> None:
        ranks = worker.ranks if worker.state in ("ready", "draining") else []
        if worker.state == "ready":
            for rank in ranks:
                self._site.stop_routing(rank)
        self._set(worker, "gone")
        worker.until_s = self._clock.now
        for rank in ranks:
            self._site.abandon(rank)
        self._start_those_that_can()
        self._note(worker.pool.name)

    def _slow(self, worker: Worker, factor: float, duration_s: float | None) -> None:
        worker.num_slowed += 1
        for rank in worker.ranks:
            rank.slow_down(factor)
        if duration_s is not None:
            self._clock.at(self._clock.now + duration_s, ARRIVAL, partial(self._recover, worker, worker.num_slowed))

    def _recover(self, worker: Worker, number: int) -> None:
        """End a slow-down, unless another has begun since."""
        for rank in worker.ranks if number == worker.num_slowed else ():
            rank.slow_down(1.0)

    def _note(self, pool: str) -> None:
        """Record how many workers of a pool are in each state, if that has changed."""
        of_pool = self._in_state[pool]
        row = Headcount(self._clock.now, *(len(of_pool[state]) for state in ("pending", *ON_GPUS)))
        history = self.history[pool]
        if history and history[-1].time_s == row.time_s:
            history.pop()
        if not history or structs.replace(history[-1], time_s=row.time_s) != row:
            history.append(row)


def _worth(worker: Worker) -> tuple[int, int, int]:
    """Sort workers by what is lost if they leave: those not ready, then those with few requests, then the newest."""
    return ("pending", "starting", "ready").index(worker.state), worker.num_requests, -worker.number
