"""The workers of a simulated deployment, as they come and go.

    pending --GPUs are free--> starting --in time--> ready --told to leave--> draining --has no request--> gone
       ^                          |                    |                         |
       +--------- fails ----------+                    +------- dies ------------+--> gone

A worker is pending while all GPUs of the deployment are in use. It holds its GPUs from its start until it is gone. A pool has
a size, and workers are started until it has as many. So a worker that dies is replaced, unless the size falls with it.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

from msgspec import structs

from dynabench.deployment.engines import SimulatedPool
from dynabench.deployment.fleet import FleetConfig
from dynabench.deployment.fleet_events import Drain, FleetEvent, Kill, Resize, Slow, pool_of
from dynabench.virtual.clock import ARRIVAL, Clock
from dynabench.virtual.worker import Worker
from reports.fleet import Headcount

State = Literal["pending", "starting", "ready", "draining", "gone"]
STATES: tuple[State, ...] = ("pending", "starting", "ready", "draining", "gone")
ON_GPUS: tuple[State, ...] = ("starting", "ready", "draining")


@dataclass(slots=True, eq=False)
class Member:
    """A worker: a process with one or more ranks."""

    number: int
    """Counts workers in the order in which they were asked for."""
    pool: SimulatedPool
    state: State = "pending"
    ranks: list[Worker] = field(default_factory=list)
    """Once it is ready."""
    since_s: float = math.inf
    """When it took its GPUs."""
    ready_s: float = math.inf
    num_slowed: int = 0
    """Times that it was slowed down."""
    until_s: float = math.inf
    """When it gave them back."""

    @property
    def num_requests(self) -> int:
        """Requests that it has."""
        return sum(len(rank.sequences) for rank in self.ranks)


class Hooks(NamedTuple):
    """What the cluster does when a worker of the fleet changes its state."""

    start_ranks: Callable[[Member], list[Worker]]
    """Makes the ranks of a worker that is ready, and routes requests to them from now on."""
    stop_routing: Callable[[Worker], object]
    """Sends a rank no more requests."""
    abandon: Callable[[Worker], object]
    """Lets the requests of a rank that is gone go on elsewhere."""
    hand_over: Callable[[Worker], object]
    """Lets the requests of a rank go on elsewhere, with their KV."""


class Fleet:
    """The workers of each pool."""

    def __init__(
        self,
        pools: Sequence[SimulatedPool],
        config: FleetConfig,
        clock: Clock,
        hooks: Hooks,
        *,
        gpus: int | None,
        rng: random.Random,
    ) -> None:
        """Begin with the initial workers of each pool, all ready.

        Args:
            pools: the pools, with the number of workers that each begins with.
            config: how workers come and go.
            clock: the time.
            hooks: what the cluster does when workers come and go.
            gpus: how many there are (None: always enough).
            rng: draws start-up times and failures.

        Raises:
            ValueError: an event names a pool that is not there.
        """
        self.members: list[Member] = []
        self.pools = {pool.name: pool for pool in pools}
        self.sizes = {pool.name: pool.replicas for pool in pools}
        """How many workers each pool should have."""
        self._in_state: dict[str, dict[State, dict[Member, None]]] = {
            name: {state: {} for state in STATES} for name in self.pools
        }
        self._gpus_taken = 0
        self.history: dict[str, list[Headcount]] = {name: [] for name in self.pools}
        self.num_failed_starts = dict.fromkeys(self.pools, 0)
        self.died_s: dict[str, list[float]] = {name: [] for name in self.pools}
        """When workers died."""
        self._pending: deque[Member] = deque()  # and some that are not any more
        self._config = config
        self._clock = clock
        self._hooks = hooks
        self._gpus = gpus
        self._rng = rng
        for pool in pools:
            for _ in range(pool.replicas):
                member = self._ask_for(pool)
                member.since_s = 0.0
                self._be_ready(member)
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
                member = self._named(event, number)
                self.sizes[member.pool.name] -= 1
                self._leave(member)
            case Slow(number, factor, duration_s):
                self._slow(self._named(event, number, "ready", "draining"), factor, duration_s)

    def _named(self, event: FleetEvent, number: int, *states: State) -> Member:
        """Return the worker that an event names, which must be in one of some states (default: not be gone)."""
        states = states or ("pending", "starting", "ready", "draining")
        if number < len(self.members) and self.members[number].state in states:
            return self.members[number]
        state = f"is {self.members[number].state}" if number < len(self.members) else "does not exist"
        there = ", ".join(str(member.number) for member in self.members if member.state in states)
        expected = f"one of {there}" if there else "another time, as no worker fits"
        raise ValueError(
            f"events: at {event.time_s:g}s: {event.text}: worker {number} {state} at that time; expected {expected}"
        )

    def of(self, pool: str, *states: State) -> list[Member]:
        """Return the workers of a pool in some states, by number."""
        found = (member for state in states for member in self._in_state[pool][state])
        return sorted(found, key=lambda member: member.number)

    def resize(self, pool: str, size: int) -> None:
        """Start workers of a pool, or let some leave, until it has this size; those that are not ready yet leave first."""
        self.sizes[pool] = size
        members = self.of(pool, "pending", "starting", "ready")
        for member in sorted(members, key=_worth)[: max(len(members) - size, 0)]:
            self._leave(member)
        for _ in range(size - len(members)):
            self._ask_for(self.pools[pool])
        self._start_those_that_can()
        self._note(pool)

    def kill(self, member: Member, *, is_replaced: bool) -> None:
        """Let a worker die; its requests go on elsewhere."""
        was_needed = member.state != "draining"
        self.died_s[member.pool.name].append(self._clock.now)
        self._be_gone(member)
        if was_needed:
            size = self.sizes[member.pool.name]
            self.resize(member.pool.name, size if is_replaced else size - 1)

    def most(self, pool: str) -> int:
        """Return the most workers of a pool that were ready or draining at one time."""
        return max(row.ready + row.draining for row in self.history[pool])

    def gpu_s(self, pool: str, end_s: float) -> float:
        """Return the GPU-seconds that workers of a pool have held until a time."""
        members = [member for member in self.members if member.pool.name == pool and member.since_s < end_s]
        return sum((min(each.until_s, end_s) - each.since_s) * each.pool.gpus_per_worker for each in members)

    def _ask_for(self, pool: SimulatedPool) -> Member:
        member = Member(len(self.members), pool)
        self.members.append(member)
        self._in_state[pool.name][member.state][member] = None
        self._pending.append(member)
        return member

    def _set(self, member: Member, state: State) -> None:
        """Let a worker be in another state; while it is starting, ready or draining, it has its GPUs."""
        of_pool, before = self._in_state[member.pool.name], member.state
        del of_pool[before][member]
        of_pool[state][member] = None
        self._gpus_taken += member.pool.gpus_per_worker * ((state in ON_GPUS) - (before in ON_GPUS))
        member.state = state

    def _start_those_that_can(self) -> None:
        """Start pending workers, first come first served, while there are GPUs."""
        started: dict[str, None] = {}
        while self._pending:
            member = self._pending[0]
            if member.state == "pending":  # and was not told to leave meanwhile
                if self._gpus is not None and self._gpus_taken + member.pool.gpus_per_worker > self._gpus:
                    break
                self._start(member)
                started[member.pool.name] = None
            self._pending.popleft()
        for name in started:
            self._note(name)

    def _start(self, member: Member) -> None:
        self._set(member, "starting")
        member.since_s = self._clock.now
        self._try(member)

    def _try(self, member: Member) -> None:
        lasts_s = self._config.draw_startup_s(member.pool.startup_s, self._rng)
        fails = self._rng.random() < self._config.start_failure_rate
        end = self._fail if fails else self._be_ready
        self._clock.at(self._clock.now + lasts_s, ARRIVAL, partial(self._end_start, member, end))

    def _end_start(self, member: Member, end: Callable[[Member], None]) -> None:
        if member.state == "starting":  # it may have been told to leave meanwhile
            end(member)
            self._note(member.pool.name)

    def _fail(self, member: Member) -> None:
        self.num_failed_starts[member.pool.name] += 1
        self._try(member)

    def _be_ready(self, member: Member) -> None:
        self._set(member, "ready")
        member.ready_s = self._clock.now
        member.ranks = self._hooks.start_ranks(member)

    def _leave(self, member: Member) -> None:
        """Let a worker finish what it has, and go."""
        if member.state in ("pending", "starting"):
            self._be_gone(member)
            return
        self._set(member, "draining")
        for rank in member.ranks:
            self._hooks.stop_routing(rank)
            rank.on_idle = partial(self._on_idle, member)
        self._note(member.pool.name)
        for rank in member.ranks if self._config.drain_policy == "hand-over" else ():
            self._hooks.hand_over(rank)
        self._on_idle(member)
        if member.state == "draining" and self._config.drain_policy == "bounded":
            self._clock.at(self._clock.now + self._config.drain_limit_s, ARRIVAL, partial(self._cut_off, member))

    def _on_idle(self, member: Member) -> None:
        if member.state == "draining" and all(rank.is_done for rank in member.ranks):
            self._be_gone(member)

    def _cut_off(self, member: Member) -> None:
        if member.state == "draining":
            self._be_gone(member)

    def _be_gone(self, member: Member) -> None:
        ranks = member.ranks if member.state in ("ready", "draining") else []
        if member.state == "ready":
            for rank in ranks:
                self._hooks.stop_routing(rank)
        self._set(member, "gone")
        member.until_s = self._clock.now
        for rank in ranks:
            self._hooks.abandon(rank)
        self._start_those_that_can()
        self._note(member.pool.name)

    def _slow(self, member: Member, factor: float, duration_s: float | None) -> None:
        member.num_slowed += 1
        for rank in member.ranks:
            rank.slow_down(factor)
        if duration_s is not None:
            self._clock.at(self._clock.now + duration_s, ARRIVAL, partial(self._recover, member, member.num_slowed))

    def _recover(self, member: Member, number: int) -> None:
        """End a slow-down, unless another has begun since."""
        for rank in member.ranks if number == member.num_slowed else ():
            rank.slow_down(1.0)

    def _note(self, pool: str) -> None:
        """Note how many workers of a pool are in which state, unless that is as before."""
        of_pool = self._in_state[pool]
        row = Headcount(self._clock.now, *(len(of_pool[state]) for state in ("pending", *ON_GPUS)))
        history = self.history[pool]
        if history and history[-1].time_s == row.time_s:
            history.pop()
        if not history or structs.replace(history[-1], time_s=row.time_s) != row:
            history.append(row)


def _worth(member: Member) -> tuple[int, int, int]:
    """Order workers by how much is lost if they leave: not ready first, then those with few requests, then the youngest."""
    return ("pending", "starting", "ready").index(member.state), member.num_requests, -member.number
