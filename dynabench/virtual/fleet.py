"""The workers of a simulated deployment, as they come and go.

    pending --GPUs are free--> starting --in time--> ready --told to leave--> draining --has no request--> gone
       ^                          |                    |                         |
       +--------- fails ----------+                    +------- dies ------------+--> gone

A worker is pending while the GPUs of the deployment are all in use. It takes GPUs from its start until it is gone. Who dies
is replaced by another, unless its place is lost, too: a pool has a size, and workers are started until it has them.
"""

import math
import random
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


@dataclass(slots=True, eq=False)
class Member:
    """A worker."""

    number: int
    """In the order in which workers were asked for."""
    pool: SimulatedPool
    state: State = "pending"
    ranks: list[Worker] = field(default_factory=list)
    """Once it is ready."""
    since_s: float = math.inf
    """When it took its GPUs."""
    ready_s: float = math.inf
    until_s: float = math.inf
    """When it gave them back."""

    @property
    def num_requests(self) -> int:
        """Requests that it has."""
        return sum(len(rank.sequences) for rank in self.ranks)


class Hands(NamedTuple):
    """What a fleet has done to its workers."""

    employ: Callable[[Member], list[Worker]]
    """Makes the ranks of a worker that is ready, to which requests go from now on."""
    dismiss: Callable[[Worker], object]
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
        hands: Hands,
        *,
        gpus: int | None,
        rng: random.Random,
    ) -> None:
        """Let the workers that the pools begin with be ready.

        Args:
            pools: what there is; with as many workers as they begin with.
            config: how workers come and go.
            clock: the time.
            hands: what is done to workers.
            gpus: how many there are (None: always enough).
            rng: what starts are drawn from.

        Raises:
            ValueError: an event names a pool that is not there.
        """
        self.members: list[Member] = []
        self.pools = {pool.name: pool for pool in pools}
        self.sizes = {pool.name: pool.replicas for pool in pools}
        """How many workers each pool should have."""
        self.history: dict[str, list[Headcount]] = {name: [] for name in self.pools}
        self.num_failed_starts = dict.fromkeys(self.pools, 0)
        self.died_s: dict[str, list[float]] = {name: [] for name in self.pools}
        """When workers died."""
        self._config = config
        self._clock = clock
        self._hands = hands
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
        """Let happen what was given for now.

        Raises:
            ValueError: it names a worker that is not there.
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
        state = f"is {self.members[number].state}" if number < len(self.members) else "is not there"
        there = ", ".join(str(member.number) for member in self.members if member.state in states)
        expected = f"one of {there}" if there else "an earlier time, as there are none"
        raise ValueError(
            f"events: at {event.time_s:g}s: {event.text}: worker {number} {state} then; expected {expected}"
        )

    def of(self, pool: str, *states: State) -> list[Member]:
        """Return the workers of a pool in some states, by number."""
        return [member for member in self.members if member.pool.name == pool and member.state in states]

    def resize(self, pool: str, size: int) -> None:
        """Start workers of a pool, or let some leave, until so many are left: those that are not ready yet go first."""
        self.sizes[pool] = size
        members = self.of(pool, "pending", "starting", "ready")
        for member in sorted(members, key=_worth)[: max(len(members) - size, 0)]:
            self._leave(member)
        for _ in range(size - len(members)):
            self._ask_for(self.pools[pool])
        self._start_those_that_can()
        self._note(pool)

    def kill(self, member: Member, *, is_replaced: bool) -> None:
        """Let a worker die; what it had goes on elsewhere."""
        was_needed = member.state != "draining"
        self.died_s[member.pool.name].append(self._clock.now)
        self._be_gone(member)
        if was_needed:
            size = self.sizes[member.pool.name]
            self.resize(member.pool.name, size if is_replaced else size - 1)

    def most(self, pool: str) -> int:
        """Return how many workers of a pool took requests, or finished them, at one time at most."""
        return max(row.ready + row.draining for row in self.history[pool])

    def gpu_s(self, pool: str, end_s: float) -> float:
        """Return the time for which GPUs were taken by workers of a pool until the end, all together (s)."""
        members = [member for member in self.members if member.pool.name == pool and member.since_s < end_s]
        return sum((min(each.until_s, end_s) - each.since_s) * each.pool.gpus_per_worker for each in members)

    def _ask_for(self, pool: SimulatedPool) -> Member:
        member = Member(len(self.members), pool)
        self.members.append(member)
        return member

    def _start_those_that_can(self) -> None:
        """Start pending workers, first come first served, while there are GPUs."""
        started: dict[str, None] = {}
        for member in [member for member in self.members if member.state == "pending"]:
            if self._gpus is not None and self._gpus_taken() + member.pool.gpus_per_worker > self._gpus:
                break
            self._start(member)
            started[member.pool.name] = None
        for name in started:
            self._note(name)

    def _gpus_taken(self) -> int:
        states = ("starting", "ready", "draining")
        return sum(member.pool.gpus_per_worker for member in self.members if member.state in states)

    def _start(self, member: Member) -> None:
        member.state, member.since_s = "starting", self._clock.now
        self._try(member)

    def _try(self, member: Member) -> None:
        lasts_s = self._config.draw_startup_s(member.pool.startup_s, self._rng)
        fails = self._rng.random() < self._config.start_failure_rate
        end = self._fail if fails else self._be_ready
        self._clock.at(self._clock.now + lasts_s, ARRIVAL, partial(self._end_start, member, end))

    def _end_start(self, member: Member, end: Callable[[Member], None]) -> None:
        if member.state == "starting":  # and not told to leave meanwhile
            end(member)
            self._note(member.pool.name)

    def _fail(self, member: Member) -> None:
        self.num_failed_starts[member.pool.name] += 1
        self._try(member)

    def _be_ready(self, member: Member) -> None:
        member.state, member.ready_s = "ready", self._clock.now
        member.ranks = self._hands.employ(member)

    def _leave(self, member: Member) -> None:
        """Let a worker finish what it has, and go."""
        if member.state in ("pending", "starting"):
            self._be_gone(member)
            return
        member.state = "draining"
        for rank in member.ranks:
            self._hands.dismiss(rank)
            rank.on_idle = partial(self._on_idle, member)
        self._note(member.pool.name)
        for rank in member.ranks if self._config.drain_policy == "hand-over" else ():
            self._hands.hand_over(rank)
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
                self._hands.dismiss(rank)
        member.state, member.until_s = "gone", self._clock.now
        for rank in ranks:
            self._hands.abandon(rank)
        self._start_those_that_can()
        self._note(member.pool.name)

    def _slow(self, member: Member, factor: float, duration_s: float | None) -> None:
        for rank in member.ranks:
            rank.slow_down(factor)
            if duration_s is not None:
                self._clock.at(self._clock.now + duration_s, ARRIVAL, partial(rank.slow_down, 1.0))

    def _note(self, pool: str) -> None:
        """Note how many workers of a pool are in which state, unless that is as before."""
        counts = dict.fromkeys(("pending", "starting", "ready", "draining"), 0)
        for member in self.members:
            if member.pool.name == pool and member.state != "gone":
                counts[member.state] += 1
        row = Headcount(self._clock.now, *counts.values())
        history = self.history[pool]
        if history and history[-1].time_s == row.time_s:
            history.pop()
        if not history or structs.replace(history[-1], time_s=row.time_s) != row:
            history.append(row)


def _worth(member: Member) -> tuple[int, int, int]:
    """Order workers by how much is lost if they leave: those that are not ready first, then by their requests, the youngest first."""
    return ("pending", "starting", "ready").index(member.state), member.num_requests, -member.number
