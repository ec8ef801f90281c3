"""What holds in every rehearsal, whatever goes wrong. Each has a name and a sentence; docs/rehearsal.md lists them.

while it runs    `Watch` looks at every program, twenty times a second
at its end       `of_answers` and the functions after it, once faults are over and leases of the dead have run out
"""

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from dynabench.rehearsal.client import Answer
from dynabench.rehearsal.faults import Fault, Kind, Weather
from dynabench.rehearsal.lives import Lives, renewed
from dynabench.rehearsal.stage import PLANNER, SUPERVISOR, Actor, Stage
from foundation.ordered_set import OrderedSet
from serving.engines.mock.live import live_of
from serving.life.flight import Flight
from serving.life.leg import Leg
from serving.router.blocks import slots_of
from serving.router.index import PrefixIndex
from serving.routing.live import LiveRouting
from serving.runtime.address import INSTANCES, Instance

INVARIANTS = {
    "ends-once": "a request ends exactly once: with its last token, with an error, or as its client leaves",
    "right-text": "an answer has the text that it has without faults; one that breaks off has the beginning of it",
    "unspoiled": "no KV is used whose bytes are not those that were written",
    "counted": "an answer has as many tokens as were asked for, and the usage states these and those of the prompt",
    "bounded": "a request ends within its time: 4 s, and the patience of each fault that meets it (a read of KV: its timeout)",
    "no-loss": "a request fails only if more faults meet it than it may migrate, all workers of a pool are affected at once, "
    "or its frontend or router is",
    "shed": "a frontend never has more requests in progress than its limit, and refuses none before it has that many",
    "booked": "a router never has more requests booked in a pool than its frontend has in progress",
    "elsewhere": "a request that failed at a worker does not go there again while another is there",
    "limited": "no more workers work at a request than it may migrate, and one",
    "left": "a worker that was asked to end and has left discovery takes no more requests",
    "whole": "KV counts as read only if its worker was there until all of it had come",
    "sound": "without faults no KV fails to come, runs out of time or is wrong, and no store counts as away",
    "once": "no engine works twice at one request",
    "wanted": "while nothing is wrong, no engine works at a request that is over for its client",
    "unread": "no connection to a store waits for its next call while an answer is left on it",
    "released": "when all requests are over, none is booked, in progress, in an engine, or has blocks, no KV is held, and no "
    "store keeps room for chunks that do not come",
    "memory": "when all requests are over, no program keeps something for each of them",
    "forgotten": "when leases have run out, discovery and frontends know only workers that run",
    "reached": "when faults are over, discovery knows every worker that runs, and every frontend can route to it",
    "known": "when events have settled, each router knows the blocks that its engines have, and no others",
    "alive": "no program ends by an error, and none logs one that is a defect of its own",
    "planned": "no pool has fewer or more workers than its planner may give it, all fit the GPU budget, and no decision "
    "changes a pool by more than the largest step",
    "drained": "a worker that is asked to end does so when its requests are over, or after its drain time",
    "settled": "while no requests come and nothing is wrong, no pool both grows and shrinks",
    "followed": "when faults are over, a planner plans; it knows the workers, and each pool has as many as it ordered, all ready",
    "serves-again": "when all faults are over, every frontend answers a request",
}
"""The sentence of each, by name."""

OWN_S = 4.0
"""How long a request may take by itself (s)."""
PATIENCE_S = 12.0
"""How long a fault may delay a request: then a process that is silent is given up (s)."""
TAIL_S = 13.0
"""How long after its end a fault may still affect requests: connections are made again, and leases run out (s)."""
LOOK_S = 0.05
"""How often the watch looks (s)."""
ORPHAN_S = 0.05
"""How long an engine may work at a request that is over for its client, while nothing is wrong (s)."""
CALM_S = 15.0
"""After what time without faults nothing is wrong (s)."""
RESTART_S = 7.0
"""How long a program that ended is away: its supervisor waits, and it takes a while to start (s)."""
NOBODY_S = 30.0
"""How long a request waits for a worker while there is none (s)."""
ASIDE = frozenset({PLANNER, SUPERVISOR})
"""Programs through which no request passes."""
MOST_KEPT = 24
"""Most entries of a container that is not a cache, when all requests are over."""
MOST_QUEUED = 4000
"""Most items that a frontend keeps for a client that reads slowly: readers pause their workers at a thousand."""
FULL = "all workers are full"
"""What a frontend says that has room itself, but no worker with room: it may, where faults took workers or brought requests."""

LOSSES: frozenset[Kind] = frozenset({"kill", "lose-machine", "restart", "pause", "partition", "half-open", "reset"})
"""Faults by which a request may lose its worker."""
SILENT: frozenset[Kind] = frozenset({"lose-machine", "partition", "half-open", "pause", "bit-flip"})
"""Faults after which nobody hangs up, or a length is wrong and the rest never comes."""
ENDS: frozenset[Kind] = frozenset({"kill", "lose-machine", "restart"})
"""Faults after which a program is started again."""
NO_STARTS: frozenset[Kind] = frozenset({"start-fails", "start-hangs", "discovery-away"})
"""Faults by which a worker does not start again."""
STALLS: frozenset[Kind] = LOSSES | {
    *("discovery-away", "discovery-wiped", "broker-away", "broker-wiped", "delay", "bit-flip", "slow-disk"),
}
"""Faults that may delay a request."""


class Violation(NamedTuple):
    """An invariant that did not hold."""

    invariant: str
    what: str
    at_s: float | None = None
    """When it was seen (s after the first request could be sent); None: at the end."""

    def __str__(self) -> str:
        """Name it, and say what was found."""
        return f"{self.invariant}: {self.what}"


class Met(NamedTuple):
    """The faults of a rehearsal, and whom they met."""

    faults: Sequence[Fault]
    began_s: float
    """When the first request could be sent, by the loop's clock."""
    pools: Sequence[set[str]]
    """The workers of each."""
    frontends: Sequence[str]
    num_migrations: int
    """How often a request may lose its worker."""
    read_s: float = 0.0
    """How long a read of KV waits for a machine that is silent (s); 0: none is read."""
    there: Sequence[tuple[float, Sequence[set[str]]]] = ()
    """The pools that took the place of `pools`, and when (s, by the loop's clock)."""
    routers: Sequence[str] = ()
    """The routers that are programs of their own."""
    needs_kv: bool = False
    """Whether a request fails whose KV cannot be read from another worker (`kv_load_failure_policy`)."""

    def during(self, answer: Answer, kinds: frozenset[Kind]) -> list[Fault]:
        """Return the faults that may have affected a request."""
        first_s, last_s = answer.asked_s - self.began_s, answer.ended_s - self.began_s
        return [
            fault
            for fault in self.faults
            if fault.kind in kinds and fault.at_s <= last_s and first_s <= self._over_s(fault) + TAIL_S
        ]

    def _over_s(self, fault: Fault) -> float:
        """Return when a fault is over, or its program can start again (s after the first request)."""
        over_s = fault.at_s + fault.lasts_s
        for other in self.faults if fault.kind in ENDS else ():  # in order of time
            if other.kind in NO_STARTS and other.at_s <= over_s + RESTART_S:
                over_s = max(over_s, other.at_s + other.lasts_s)
        return over_s

    def _pools_during(self, answer: Answer) -> Iterator[set[str]]:
        """Yield the workers of each pool while a request was in progress."""
        if not self.there:
            yield from self.pools
        for place, (since_s, pools) in enumerate(self.there):
            until_s = self.there[place + 1][0] if place + 1 < len(self.there) else math.inf
            if since_s <= answer.ended_s and answer.asked_s <= until_s:
                yield from pools

    def bound_s(self, answer: Answer) -> float:
        """Return how long a request may take (s)."""
        stalls = self.during(answer, STALLS)
        reads_s = self.read_s * sum(fault.kind in SILENT for fault in stalls)
        nobody_s = NOBODY_S if any(self._over_s(fault) > fault.at_s + fault.lasts_s for fault in stalls) else 0.0
        return OWN_S + reads_s + nobody_s + sum(_patience_s(fault) + 1.0 for fault in stalls)

    def excuses(self, answer: Answer) -> bool:
        """Return whether a request could not be saved."""
        losses = [fault for fault in self.during(answer, LOSSES) if ASIDE.isdisjoint((fault.target, fault.other))]
        targets = {name for fault in losses for name in (fault.target, fault.other)}
        pools = list(self._pools_during(answer))
        workers = set[str]().union(*self.pools, *(pool for _, pools in self.there for pool in pools))
        hurt = {fault.target for fault in losses if not fault.other} - workers
        return (
            len(losses) > self.num_migrations
            or any(pool <= targets for pool in pools)
            or answer.frontend in hurt
            or bool(hurt & set(self.routers))
            or (self.needs_kv and bool(self.during(answer, frozenset({"bit-flip"}))))
            or bool(self.during(answer, frozenset({"broker-away", "broker-wiped"})))
        )


def _patience_s(fault: Fault) -> float:
    """Return how long a fault may delay a request (s)."""
    match fault.kind:
        case "broker-away":
            return fault.lasts_s  # an answer that has begun waits for the server, however long
        case "bit-flip":
            return PATIENCE_S  # where a length is wrong, the rest is awaited longer than the fault lasts
    return min(fault.lasts_s + RESTART_S * (fault.kind in ENDS), PATIENCE_S)


# While it runs


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
            yield from _busy(frontend, self._limits[frontend.program.name] + 2 * _num_asked(self._stage))
            yield from self._placed(frontend)
        is_calm = self._weather.is_calm(CALM_S)
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
        there = set[int]()
        for routing in _routings(frontend):
            ranks = {rank.instance_id for rank in routing.ranks()}
            if routing.stage != "prefill":
                there |= ranks & self._ranks.get(routing, set())
            self._ranks[routing] = ranks
        for flight in _flights(frontend):
            leg = flight.decode
            if leg is None or leg.state != "sent" or leg in self._legs:
                continue
            self._legs[leg] = None
            if leg.slot in flight.failed_at and (others := there.difference(flight.failed_at)):
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
    for routing in _routings(frontend):
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


def _num_asked(stage: Stage) -> int:
    """Return how many requests for its metrics a planner may have at a frontend; they are open there like others."""
    return int(PLANNER in stage.programs)


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


def _flights(frontend: Actor) -> Iterator[Flight]:
    """Yield the requests that a frontend answers."""
    for response in () if frontend.handlers is None else frontend.handlers.answering._responses:
        yield from (choice.attempts.flight for choice in response._accepted.choices)


def requests_at(worker: Actor) -> Iterator[str]:
    """Yield the requests at which a worker's engine works."""
    for rank in () if worker.engine is None else worker.engine.ranks:
        yield from (live_of(sequence).request_id for sequence in rank.engine.sequences())


def limits_of(stage: Stage) -> dict[str, int]:
    """Return how many requests each frontend may have in progress."""
    return {name: stage.programs[name].settings[0].max_inflight_requests for name in stage.frontends}


def _routings(actor: Actor) -> Iterator[LiveRouting]:
    """Yield the routings of a frontend, or that of a router that is a program of its own."""
    for pool in actor.models.pools() if actor.models is not None else ():
        if pool.routing is not None:
            yield pool.routing
    if actor.router is not None and actor.router._routing is not None:
        yield actor.router._routing


# What came of requests


def of_answers(answers: Sequence[Answer], texts: Mapping[int, str], met: Met) -> Iterator[Violation]:
    """Check what came of each request.

    Args:
        answers: what came of each.
        texts: the texts without faults, by request.
        met: the faults.
    """
    for answer in answers:
        asked = answer.question
        if answer.num_ends != 1:
            yield Violation("ends-once", f"{asked.id} ended {answer.num_ends} times")
        if (took := answer.ended_s - answer.asked_s) > (bound_s := met.bound_s(answer)):
            yield Violation("bounded", f"{asked.id} took {took:.3f} s, more than {bound_s:.3f} s")
        if answer.is_right and answer.num_tokens != asked.max_tokens:
            yield Violation("counted", f"{asked.id} has {answer.num_tokens} tokens of {asked.max_tokens}")
        if answer.is_right and answer.usage != (wanted := (len(asked.prompt), asked.max_tokens)):
            yield Violation("counted", f"{asked.id}: the usage has {answer.usage} tokens, not {wanted}")
        if (right := texts.get(asked.number)) is not None:
            is_right = answer.text == right if answer.is_right else right.startswith(answer.text)
            if not is_right:
                yield Violation("right-text", f"{asked.id} has {answer.text!r:.80}, and without faults {right!r:.80}")


def of_failures(answers: Sequence[Answer], met: Met, limits: Mapping[str, int]) -> Iterator[Violation]:
    """Check that requests failed only if they could not be saved, or their frontend was full.

    Args:
        answers: what came of each.
        met: the faults.
        limits: how many requests each frontend may have in progress.
    """
    for answer in answers:
        if not answer.error or answer.has_left:
            continue
        asked = answer.question
        if FULL in answer.error and met.during(answer, LOSSES | {"overload"}):
            continue
        if answer.status == 429:
            num_open = sum(
                one.frontend == answer.frontend
                and one.asked_s <= answer.ended_s
                and one.ended_s >= answer.asked_s - OWN_S * bool(met.faults)
                for one in answers
            )
            if num_open <= (1 if FULL in answer.error else limits[answer.frontend]):
                yield Violation("shed", f"{asked.id} was refused although at most {num_open} requests were in progress")
        elif not met.excuses(answer):
            losses = "; ".join(map(str, met.during(answer, LOSSES))) or "no fault"
            yield Violation("no-loss", f"{asked.id} failed ({answer.error:.200}) with {losses}")


# At the end


def at_rest(stage: Stage) -> Iterator[Violation]:
    """Check that nothing is left of requests that are over."""
    for actor in stage.running([*stage.frontends, *stage.routers]):
        name = actor.program.name
        num_open = 0 if actor.handlers is None else actor.handlers.answering.num_open
        if num_open > _num_asked(stage):
            yield Violation("released", f"{name} has {num_open} requests in progress")
        for routing in _routings(actor):
            for rank, books in routing.books():
                numbers = books.num_requests, books.prefill_tokens, books.decode_blocks, books.num_decoding
                if any(numbers):
                    whose = f"{name} has {numbers} requests, prefill tokens, blocks and decoding requests"
                    yield Violation("released", f"{whose} booked at worker {rank.instance_id:x}")
    for worker in stage.running(stage.workers):
        yield from _idle(worker)
    for actor in stage.running(list(stage.programs)):
        for where, size in _kept(actor):
            yield Violation("memory", f"{actor.program.name} keeps {size} entries in {where}")


def _idle(worker: Actor) -> Iterator[Violation]:
    """Check that an engine has nothing to do, and holds nothing."""
    name, engine = worker.program.name, worker.engine
    for number, rank in enumerate(() if engine is None else engine.ranks):
        assert engine is not None
        transfers = engine.load(number).kv_transfers
        held = transfers.num_held, transfers.num_waiting, transfers.num_loading
        if left := rank.engine.sequences():
            yield Violation("released", f"{name} still has {len(left)} sequences")
        elif used := rank.engine.view().num_used_blocks:
            yield Violation("released", f"{name} has {used} used blocks without a sequence")
        if any(held):
            yield Violation("released", f"{name} has KV of {held} prompts that is held, awaited and being read")
    if num_renewed := renewed(worker):
        yield Violation("released", f"{name} still renews {num_renewed} leases of KV")


CACHES = frozenset(
    {
        "KnownTier.whole",
        "KnownTier.parts",
        "Run.ids",
        "Run.children",
        "PrefixIndex._runs",
        "BlockLedger._parents",
        "ByteTable.escaped",
    }
)
"""What is as large as the KV caches of engines, or as the alphabet."""
CONTAINERS = (list, dict, set, deque, OrderedSet)


def _kept(actor: Actor) -> Iterator[tuple[str, int]]:
    """Yield the containers of a program that have many entries, with their sizes."""
    waiting: list[Any] = [actor.models, actor.handlers, actor.router]
    if actor.engine is not None:
        waiting += [
            actor.engine._handovers,
            *(getattr(rank._events, "_publisher", None) for rank in actor.engine.ranks),
        ]
    seen = set[int]()
    while waiting:
        owner = waiting.pop()
        if id(owner) in seen or not _is_ours(owner):
            continue
        seen.add(id(owner))
        for name, value in _attributes(owner):
            where = f"{type(owner).__name__}.{name}"
            if isinstance(value, CONTAINERS) and len(value) > MOST_KEPT and where not in CACHES:
                yield where, len(value)
            waiting += _contents(value)


def _is_ours(value: object) -> bool:
    module = type(value).__module__
    return module.startswith("serving.") and not module.startswith("serving.runtime.memory.")  # that is the network


def _attributes(owner: object) -> Iterator[tuple[str, Any]]:
    yield from getattr(owner, "__dict__", {}).items()
    for kind in type(owner).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(owner, name):
                yield name, getattr(owner, name)


def _contents(value: Any) -> list[Any]:
    match value:
        case dict():
            return list(value.values())
        case list() | tuple() | set() | deque():
            return list(value)
    return [value]


def of_programs(stage: Stage) -> Iterator[Violation]:
    """Check that no program ended by an error."""
    for name, error in stage.failures.items():
        yield Violation("alive", f"{name} ended: {error!r:.300}")


def of_discovery(stage: Stage) -> Iterator[Violation]:
    """Check that discovery and frontends know exactly the programs that take requests, and what those have cached."""
    takers = [*stage.workers, *stage.routers]
    running = {actor.program.name: actor for actor in stage.running(takers)}
    found = {
        instance.instance_id: instance.transport.removeprefix("memory:").partition("/")[0]
        for key, entry in stage.network.discovery.keys.items()
        if key.startswith(INSTANCES)
        for instance in [Instance.parse(key, entry.value)]
    }
    for id, name in found.items():
        if name in takers and name not in running:
            yield Violation("forgotten", f"discovery knows {name} as instance {id:x}, which does not run")
    for name in running.keys() - found.values():
        yield Violation("reached", f"discovery does not know {name}, which runs")
    known = {id: running[name] for id, name in found.items() if name in running}
    wanted = {id for id in known if found[id] in (stage.routers or running)}
    for frontend in stage.running(stage.frontends):
        yield from _of_routing(frontend, known, wanted)
    for router in stage.running(stage.routers):
        yield from _of_routing(
            router, known, {id for id, name in found.items() if name in stage.workers} & known.keys()
        )


def _of_routing(actor: Actor, known: Mapping[int, Actor], wanted: set[int]) -> Iterator[Violation]:
    """Check what a frontend or a router knows.

    Args:
        actor: the frontend or router.
        known: who runs, by the ids of their instances.
        wanted: those that it has to route to: the routers, if there are any, else the workers.
    """
    name, ids = actor.program.name, set[int]()
    for pool in actor.models.pools() if actor.models is not None else ():
        for card in pool.cards.values():
            if card.instance_id not in known:
                yield Violation("forgotten", f"{name} has the card of {card.instance_id:x}, which does not run")
    for routing in _routings(actor):
        for id in {instance.instance_id for instance in routing._following.client._known.values()} - known.keys():
            yield Violation("forgotten", f"{name} knows instance {id:x}, which does not run")
        ids.update(rank.instance_id for rank in routing.ranks())
        yield from _known_blocks(name, routing, known)
    for id in wanted - ids:
        yield Violation("reached", f"{name} cannot route to {known[id].program.name}, instance {id:x}")


def _known_blocks(name: str, routing: LiveRouting, workers: Mapping[int, Actor]) -> Iterator[Violation]:
    """Check that an index has the blocks that engines have, where engines report them."""
    index = routing.core.index
    if not isinstance(index, PrefixIndex):
        return
    for slot, rank in routing._following.ranks.items():
        worker, traits = workers.get(rank.instance_id), routing.traits(rank.instance_id)
        if worker is None or worker.engine is None or traits is None or not traits.has_kv_events:
            continue
        pool = getattr(worker.engine.ranks[rank.dp_rank].engine._core, "pool", None)
        if pool is None or type(pool).__name__ != "BlockPool":
            continue  # others cache parts of prompts, which an index of whole prefixes cannot have
        cached, known = set(pool._index), _held(index, slot)
        if cached != known:
            numbers = f"{len(known - cached)} blocks that it has not, and misses {len(cached - known)} of {len(cached)}"
            yield Violation("known", f"{name} knows of {worker.program.name} {numbers}")


def _held(index: PrefixIndex, slot: int) -> set[Any]:
    """Return the blocks that a rank has, as an index knows them."""
    held, waiting = set[Any](), list(index._roots.get(slot, ()))
    while waiting:
        run = waiting.pop()
        held.update(run.ids[: run.depths.get(slot, run.start) - run.start])
        waiting += [child for child in run.children or () if slot in child.depths]
    return held
