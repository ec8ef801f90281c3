"""What holds at any time: `Watch` looks at every program, twenty times a second."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from dynabench.rehearsal.checks.invariants import Violation
from dynabench.rehearsal.checks.lives import Lives
from dynabench.rehearsal.checks.programs import flights, limits_of, num_asked, requests_at, routings, waits_for_work
from dynabench.rehearsal.clients.client import Answer
from dynabench.rehearsal.faults.weather import Weather
from dynabench.rehearsal.stage.stage import Actor, Stage
from serving.life.leg import Leg
from serving.router.blocks import slots_of
from serving.router.index import PrefixIndex
from serving.routing.live import LiveRouting

LOOK_S = 0.05
"""How often the watch looks (s)."""
ORPHAN_S = 0.05
"""How long an engine may work at a request that is over for its client, while nothing is wrong (s)."""
MOST_QUEUED = 4000
"""Most items that a frontend keeps for a client that reads slowly: readers pause their workers at a thousand."""


class Watch:
    """Looks at every program while it runs; keeps the first violation of each invariant."""

    def __init__(
        self,
        stage: Stage,
        answers: Sequence[Answer],
        weather: Weather,
        num_migrations: int,
        also: Callable[[float], Iterator[Violation]],
    ) -> None:
        """Watch a stage; `answers` grows as requests are sent, each of which may migrate so often; `also` looks at more."""
        self._also = also
        self._stage = stage
        self._answers = answers
        self._weather = weather
        self._limits = limits_of(stage)
        self._began_s = asyncio.get_running_loop().time()
        self._lives = Lives(stage, weather, num_migrations)
        self._by_id: dict[str, Answer] = {}
        self._legs: dict[Leg, None] = {}  # the last that were seen, kept so that no other takes their place
        self._ranks: dict[LiveRouting, set[int]] = {}  # the instances that were there then
        self._found: dict[str, Violation] = {}
        self.worked_s = defaultdict[str, float](float)
        """For how long an engine that had a request worked, at it or at others (s)."""

    @property
    def violations(self) -> list[Violation]:
        """Those found so far."""
        return list(self._found.values())

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            now = asyncio.get_running_loop().time()
            at_s = now - self._began_s
            for invariant, what, _ in (*self._look(now), *self._also(now)):
                self._found.setdefault(invariant, Violation(invariant, f"{what}, at {at_s:.3f} s", at_s))
            await asyncio.sleep(LOOK_S)

    def _look(self, now: float) -> Iterator[Violation]:
        yield from (Violation(*each) for each in self._lives.look(now))
        for frontend in self._stage.running(self._stage.frontends):
            yield from _busy(frontend, self._limits[frontend.program.name] + 2 * num_asked(self._stage))
            yield from self._placed(frontend)
        workers = self._stage.running(self._stage.workers)
        for id in {id for worker in workers for id in waits_for_work(worker)}:
            self.worked_s[id] += LOOK_S
        is_calm = self._weather.is_calm
        for worker in self._stage.running(self._stage.workers):
            name, working = worker.program.name, Counter(requests_at(worker))
            for what in worker.spoiled:
                yield Violation("unspoiled", f"{name} used KV with {what} wrong")
            for id, count in working.items():
                if count > 1:
                    yield Violation("once", f"{name} works {count} times at {id}")
                if is_calm and self._over_s(id, now) > ORPHAN_S:
                    yield Violation("wanted", f"{name} works at {id}, which is over")

    def _placed(self, frontend: Actor) -> Iterator[Violation]:
        """Check where requests went since the last look, among the workers that were there then and are there now."""
        there = dict[int, set[int]]()  # by worker: those of its pool
        for routing in routings(frontend):
            ranks = {rank.instance_id for rank in routing.ranks()}
            if routing.stage != "prefill":
                there.update(dict.fromkeys(ranks, ranks & self._ranks.get(routing, set())))
            self._ranks[routing] = ranks
        for flight in flights(frontend):
            leg = flight.decode
            if leg is None or leg.slot is None or leg.state != "sent" or leg in self._legs:
                continue
            self._legs[leg] = None
            if leg.slot in flight.failed_at and (others := there.get(leg.slot, set()).difference(flight.failed_at)):
                where = f"worker {leg.slot:x}, where it had failed, and {len(others)} others are there"
                yield Violation("elsewhere", f"{frontend.program.name} sent a request to {where}")

    def _over_s(self, id: str, now: float) -> float:
        """Return for how long a request has been over for its client (s)."""
        for answer in self._answers[len(self._by_id) :]:
            self._by_id[answer.question.id] = answer
        return now - self._by_id[id].ended_s if id in self._by_id and self._by_id[id].ended_s else 0.0


def _busy(frontend: Actor, limit: int) -> Iterator[Violation]:
    """Check what a frontend has in progress."""
    if frontend.handlers is None:
        return
    name, num_open = frontend.program.name, frontend.handlers.answering.num_open
    if num_open > limit:
        yield Violation("shed", f"{name} has {num_open} requests in progress; its limit is {limit}")
    for routing in routings(frontend):
        booked = sum(isinstance(id, int) for id in routing.core._booked)  # those of other routers have pairs
        if booked > num_open:
            yield Violation("booked", f"{name} has {booked} requests booked at {routing.address}, and {num_open} open")
        index, ranks = routing.core.index, routing._following.ranks
        if isinstance(index, PrefixIndex) and (strangers := [slot for slot in index._roots if slot not in ranks]):
            yield Violation("known", f"{name} keeps the blocks of {len(strangers)} workers that it cannot route to")
        if isinstance(index, PrefixIndex) and (strangers := [slot for slot in _beyond_gpu(index) if slot not in ranks]):
            yield Violation(
                "known", f"{name} keeps what {len(strangers)} workers have beyond their GPUs, and cannot route to them"
            )
        for instance_id, connection in routing._following.client._connections.items():
            most = max((len(stream.items) for stream in connection._streams.values()), default=0)
            if most > MOST_QUEUED:
                yield Violation("memory", f"{name} keeps {most} items of worker {instance_id:x} for one client")


def _beyond_gpu(index: PrefixIndex) -> list[int]:
    """Return the slots of the ranks that have blocks in host memory or on disks, as an index knows them."""
    mask = 0
    for medium, tier in index.tiers._tiers.items():
        if medium != "SHARED":
            for holders in tier.whole.values():
                mask |= holders
            for holders in chain.from_iterable(tier.parts.values()):
                mask |= holders
    return slots_of(mask)
