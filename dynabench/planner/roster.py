"""The workers that a planner's hands started: the state of each, and which leave when there are too many.

starting --ready--> ready --leave--> draining --gone--> forgotten
|                 |
|                 +--ends on its own--> starting again, or forgotten in a group that does not restart
+--leave: the start is cancelled--> draining
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from dynabench.planner.messages import ReportedFleet, ReportedWorker, State, WantedWorkers
from reports.record.fleet import FleetChange, Headcount

MAX_PAST = 100_000
"""Rows of a pool's history, and changes, that are kept: a deployment may be served for years."""


class PoolOfWorkers(NamedTuple):
    """The constant facts about a pool."""

    name: str
    role: str
    gpus_per_worker: int


@dataclass(slots=True)
class Member:
    """A worker."""

    name: str
    pool: str
    state: State
    since_s: float
    """When it last started."""
    instance: str = ""
    startup_s: float | None = None


@dataclass(slots=True)
class Roster:
    """Workers and their history; `now` is in seconds, on any clock."""

    pools: Sequence[PoolOfWorkers]
    members: dict[str, Member] = field(default_factory=dict)
    history: dict[str, list[Headcount]] = field(default_factory=dict)
    """A row for each change of a pool."""
    changes: list[FleetChange] = field(default_factory=list)
    failed_starts: dict[str, int] = field(default_factory=dict)
    died: dict[str, int] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)
    _obeyed: dict[str, tuple[int, int]] = field(default_factory=dict)

    def fleet(self) -> ReportedFleet:
        """Return the workers of each pool, for the planner."""
        found: dict[str, list[ReportedWorker]] = {pool.name: [] for pool in self.pools}
        for member in self.members.values():
            found[member.pool].append(ReportedWorker(member.name, member.state, member.instance, member.startup_s))
        return ReportedFleet({name: tuple(workers) for name, workers in found.items()})

    def begin(self, now: float, pool: str) -> str:
        """Add a worker that is being started to a pool; return its name, which is never reused."""
        number = self._numbers[pool] = self._numbers.get(pool, -1) + 1
        name = f"{pool}-{number}"
        self.members[name] = Member(name, pool, "starting", now)
        self._note(now, pool)
        return name

    def on_ready(self, now: float, name: str, instance: str) -> None:
        """Note that a worker accepts requests."""
        member = self.members.get(name)
        if member is None:
            return
        member.instance = instance
        if member.state == "starting":
            member.state, member.startup_s = "ready", now - member.since_s
            self._note(now, member.pool)

    def on_ended(self, now: float, name: str, *, was_ready: bool, is_kept: bool) -> None:
        """Note that a worker has ended without an order; in a group that restarts, it starts again."""
        member = self.members.get(name)
        if member is None or member.state == "draining":
            return
        counts = self.died if was_ready else self.failed_starts
        counts[member.pool] = counts.get(member.pool, 0) + 1
        if not is_kept:
            self.forget(now, name)
            return
        if member.state == "ready":  # consecutive failed starts count as one start, which may take too long
            member.since_s = now
        member.state, member.instance = "starting", ""
        self._note(now, member.pool)

    def on_unstarted(self, now: float, name: str) -> None:
        """Note that a worker could not even be started."""
        pool = self.members[name].pool
        self.failed_starts[pool] = self.failed_starts.get(pool, 0) + 1
        self.forget(now, name)

    def forget(self, now: float, name: str) -> None:
        """Note that a worker is gone."""
        member = self.members.pop(name)
        self._note(now, member.pool)

    def obey(self, now: float, term: int, wanted: Mapping[str, WantedWorkers]) -> tuple[list[str], list[str]]:
        """Change the pools to a planner's decision, once; return the workers to end, and those to start."""
        ending: list[str] = []
        starting: list[str] = []
        for pool, target in wanted.items():
            if pool not in self._names or (term, target.number) <= self._obeyed.get(pool, (0, 0)):
                continue
            self._obeyed[pool] = (term, target.number)
            here = [each for each in self.members.values() if each.pool == pool and each.state != "draining"]
            if len(here) == target.replicas:
                continue
            self.changes.append(FleetChange(now, pool, len(here), target.replicas, target.reason[:1000]))
            for member in _by_worth(here, target.leaving)[: max(len(here) - target.replicas, 0)]:
                member.state = "draining"
                ending.append(member.name)
            starting += [self.begin(now, pool) for _ in range(target.replicas - len(here))]
            self._note(now, pool)
        del self.changes[:-MAX_PAST]
        return ending, starting

    @property
    def _names(self) -> set[str]:
        return {pool.name for pool in self.pools}

    def _note(self, now: float, pool: str) -> None:
        states = [member.state for member in self.members.values() if member.pool == pool]
        row = Headcount(now, 0, *(states.count(state) for state in ("starting", "ready", "draining")))
        rows = self.history.setdefault(pool, [])
        if not rows or replace(row, time_s=rows[-1].time_s) != rows[-1]:
            rows.append(row)
            del rows[:-MAX_PAST]


def _by_worth(members: Iterable[Member], leaving: Sequence[str]) -> list[Member]:
    """Sort workers in leaving order: the oldest starting ones, then those with the fewest requests, then the newest."""
    places = {instance: place for place, instance in enumerate(leaving)}

    def worth(member: Member) -> tuple[int, float]:
        if member.state == "starting":
            return 0, member.since_s
        return (1, places[member.instance]) if member.instance in places else (2, -member.since_s)

    return sorted(members, key=worth)
