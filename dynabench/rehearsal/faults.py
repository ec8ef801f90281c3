"""Faults: what happens to a deployment while it is rehearsed, drawn from a seed.

A deployment without disks, or whose KV stays in its workers, draws none of their faults (`idle_kinds`).
"""

import asyncio
import random
from collections.abc import Callable, Collection, Sequence
from contextvars import Context
from functools import partial
from typing import Literal

import msgspec

from dynabench.deployment.description import Deployment
from dynabench.rehearsal.client import Question
from dynabench.rehearsal.stage import PLANNER, Actor, Stage
from serving.engines.mock.engine import Mocker
from serving.engines.mock.live import live_of
from serving.runtime.memory.network import DISCOVERY, Network

Kind = Literal[
    "kill",
    "lose-machine",
    "restart",
    "pause",
    "partition",
    "half-open",
    "reset",
    "delay",
    "lose-events",
    "repeat-events",
    "discovery-away",
    "discovery-wiped",
    "broker-away",
    "broker-wiped",
    "clock-jump",
    "clock-drift",
    "overload",
    "start-fails",
    "start-hangs",
    "bit-flip",
    "slow-disk",
    "full-disk",
    "chase",
]
Level = Literal["none", "light", "medium", "harsh"]


class Fault(msgspec.Struct, frozen=True):
    """Something that happens, and ends after a while."""

    kind: Kind
    at_s: float
    """When it begins (s after the first request)."""
    lasts_s: float
    """How long it lasts, or until a program that was killed is started again (s)."""
    target: str = ""
    """The program; of a partition and a reset, one of the two; half-open, the one that the other does not hear."""
    other: str = ""
    """The other of the two."""
    amount: float = 0.0
    """A share, a time (s), what a clock gains in each second (s), or the requests that come at once."""

    @property
    def label(self) -> str:
        """Its kind, and its amount if it has one."""
        return f"{self.kind} {self.amount:.3g}" if self.amount else self.kind

    @property
    def ends(self) -> tuple[str, ...]:
        """The programs that it meets."""
        return tuple(filter(None, (self.target, self.other)))

    def __str__(self) -> str:
        """Say what happens."""
        whom = " and ".join(self.ends)
        amount = f" {self.amount:.3g}" * bool(self.amount)
        return f"{self.at_s:.3f} s: {self.kind} {whom}{amount} for {self.lasts_s:.3f} s".replace("  ", " ")


class Rates(msgspec.Struct, frozen=True):
    """How much goes wrong."""

    most: int
    """Most faults of a rehearsal; at least one happens if it is not 0."""
    kinds: tuple[Kind, ...]
    longest_s: float
    """Longest time that a fault lasts (s)."""
    kills_others: bool = False
    """Whether frontends and routers are killed, too: the clients of a frontend that is killed see their requests fail."""


LIGHT: tuple[Kind, ...] = ("kill", "restart", "delay", "reset", "overload")
MEDIUM: tuple[Kind, ...] = (
    *LIGHT,
    *("lose-machine", "pause", "partition", "half-open", "lose-events", "repeat-events", "chase"),
    *("clock-jump", "clock-drift"),
    *("start-fails", "start-hangs"),
    *("bit-flip", "slow-disk", "full-disk"),
)
HARSH: tuple[Kind, ...] = (*MEDIUM, "discovery-away", "discovery-wiped", "broker-away", "broker-wiped")
LEVELS: dict[Level, Rates] = {
    "none": Rates(0, (), 0.0),
    "light": Rates(2, LIGHT, 2.0),
    "medium": Rates(5, MEDIUM, 20.0),
    "harsh": Rates(12, HARSH, 40.0, kills_others=True),
}
START_AGAIN_S = (0.5, 3.0)
"""After what time a program that ended is started again (s)."""
BURST = (20, 200)
"""How many requests come at once."""
SLOW_S = (0.01, 0.5)
"""How much longer each use of a slow disk takes (s)."""
DEATHS = (2, 5)
"""How many workers of one request are killed, as long as it goes on."""
CHASED_S = 1.0
"""After what time the end of each is seen, if its machine is lost with it (s)."""
AIM_S = 0.005
"""How often a chase looks for the next (s)."""


def idle_kinds(deployment: Deployment) -> frozenset[Kind]:
    """Return the faults that change nothing for a deployment."""
    found = set[Kind]()
    if not (deployment.is_disaggregated or deployment.kv_store.kv_store_size):
        found.add("bit-flip")
    if not any(getattr(pool.mocker, "kv_disk_size", 0.0) for pool in deployment.pools):
        found |= {"slow-disk", "full-disk"}
    return frozenset(found)


def draw(
    rng: random.Random,
    level: Level,
    workers: Sequence[str],
    others: Sequence[str],
    duration_s: float,
    *,
    idle: Collection[Kind] = (),
) -> list[Fault]:
    """Draw what happens within a time (s), except for kinds that would change nothing."""
    rates = LEVELS[level]
    kinds = [kind for kind in rates.kinds if kind not in idle]
    if not rates.most:
        return []
    faults = [
        _drawn(rng, rng.choice(kinds), rates, workers, others, duration_s) for _ in range(rng.randint(1, rates.most))
    ]
    return sorted(faults, key=lambda fault: fault.at_s)


def _drawn(
    rng: random.Random, kind: Kind, rates: Rates, workers: Sequence[str], others: Sequence[str], duration_s: float
) -> Fault:
    at_s, lasts_s, target = rng.uniform(0.0, duration_s), rng.uniform(0.1, rates.longest_s), rng.choice(workers)
    match kind:
        case "kill" | "restart":
            if kind == "kill" and rates.kills_others and rng.random() < 0.25:
                target = rng.choice(others)
            elif kind == "restart":
                target = _or_planner(rng, target, rates, others)
            return Fault(kind, at_s, rng.uniform(*START_AGAIN_S), target)
        case "partition" | "half-open":
            ends = [*dict.fromkeys((target, rng.choice(workers), *others, DISCOVERY))]
            target, other = rng.sample(ends, 2)
            return Fault(kind, at_s, lasts_s, target, other)
        case "reset":
            return Fault(kind, at_s, 0.0, target, rng.choice(others))
        case "delay":
            return Fault(kind, at_s, lasts_s, amount=rng.uniform(0.01, 0.5))
        case "lose-events" | "repeat-events":
            return Fault(kind, at_s, lasts_s, amount=rng.uniform(0.01, 0.3))
        case "bit-flip":
            return Fault(kind, at_s, lasts_s, amount=rng.uniform(0.001, 0.1))
        case "slow-disk":
            return Fault(kind, at_s, lasts_s, target, amount=rng.uniform(*SLOW_S))
        case "discovery-away" | "broker-away":
            return Fault(kind, at_s, lasts_s)
        case "discovery-wiped" | "broker-wiped":
            return Fault(kind, at_s, 0.0)
        case "clock-jump":
            return Fault(
                kind, at_s, 0.0, rng.choice([*workers, *others]), amount=rng.choice((-3600.0, -5.0, 5.0, 3600.0))
            )
        case "clock-drift":
            return Fault(kind, at_s, lasts_s, rng.choice([*workers, *others]), amount=rng.uniform(-0.1, 0.1))
        case "overload":
            return Fault(kind, at_s, 0.0, amount=rng.randint(*BURST))
        case "start-fails" | "start-hangs":
            return Fault(kind, at_s, lasts_s)
        case "chase":
            return Fault(kind, at_s, lasts_s, amount=rng.randint(*DEATHS))
        case "pause":
            target = _or_planner(rng, target, rates, others)
    return Fault(kind, at_s, lasts_s, target)  # lose-machine, pause, full-disk


def _or_planner(rng: random.Random, worker: str, rates: Rates, others: Sequence[str]) -> str:
    """Return a worker, or at times the planner, where others than workers are hit."""
    return PLANNER if PLANNER in others and rates.kills_others and rng.random() < 0.25 else worker


def bursts(faults: Sequence[Fault], questions: Sequence[Question]) -> list[Question]:
    """Return what overloads ask: one of the questions, again and again at once. They have numbers after all others."""
    first, found = max((asked.number for asked in questions), default=0) + 1, list[Question]()
    for fault in faults:
        if fault.kind == "overload" and questions:
            again = questions[len(found) % len(questions)]
            numbers = range(first + len(found), first + len(found) + round(fault.amount))
            calm = msgspec.structs.replace(again, at_s=fault.at_s, leaves_after=None, reads_slowly_s=0.0)
            found += [msgspec.structs.replace(calm, number=number) for number in numbers]
    return found


class Weather:
    """What is wrong now."""

    def __init__(self) -> None:
        self.delays: list[float] = []
        """The longest additional delays of faults that are in force (s)."""
        self.num_faults = 0
        """Faults in force."""
        self._calm_s = 0.0  # when the last ended

    def begin(self) -> None:
        """A fault has begun."""
        self.num_faults += 1

    def end(self) -> None:
        """A fault has ended."""
        self.num_faults -= 1
        self._calm_s = asyncio.get_running_loop().time()

    def is_calm(self, for_s: float) -> bool:
        """Return whether nothing has been wrong for a time (s)."""
        return not self.num_faults and asyncio.get_running_loop().time() - self._calm_s >= for_s

    def delay(self, sender: str, receiver: str, rng: random.Random) -> float:
        """Return how long a message takes (s): 0.2 to 0.7 ms, and one in a hundred longer while delays are in force."""
        usual = 0.0002 + 0.0005 * rng.random()
        return usual + max(self.delays) * rng.random() if self.delays and rng.random() < 0.01 else usual


async def carry_out(
    faults: Sequence[Fault],
    stage: Stage,
    weather: Weather,
    on_event: Callable[[str], None],
    on_death: Callable[[Fault], None] = lambda _: None,
) -> None:
    """Let everything happen at its time, and end; return once all faults are over.

    Args:
        faults: what happens.
        stage: to whom.
        weather: notes what is wrong.
        on_event: is told what begins and ends.
        on_death: is told whom a chase kills: that depends on where its request goes.
    """
    start_s = asyncio.get_running_loop().time()

    async def happen(fault: Fault) -> None:
        await asyncio.sleep(max(start_s + fault.at_s - asyncio.get_running_loop().time(), 0.0))
        if fault.kind == "chase":
            chasing = asyncio.create_task(_chase(fault, stage, start_s, on_death))
            undo: Callable[[], object] | None = partial(_end_chase, chasing)
        else:
            undo = _begin(fault, stage, weather)
        if undo is None:
            return  # its program does not run now, or there is no such server
        weather.begin()
        trouble = stage.story.trouble(fault.label, *fault.ends)
        on_event(f"{fault.kind} {fault.target}".strip())
        await asyncio.sleep(fault.lasts_s)
        undo()
        weather.end()
        trouble.end(asyncio.get_running_loop().time())
        on_event(f"end of {fault.kind} {fault.target}".strip())

    await asyncio.gather(*(happen(fault) for fault in faults))


async def _chase(fault: Fault, stage: Stage, start_s: float, on_death: Callable[[Fault], None]) -> None:
    """Kill the workers of one request, some with their machines: the one whose KV is read, and the one that answers, in turn."""
    loop, id, rng = asyncio.get_running_loop(), "", random.Random(f"chase {fault.at_s}")
    for number in range(round(fault.amount)):
        while (found := _at_work(stage, id, is_reading=number % 2 == 0)) is None:
            await asyncio.sleep(AIM_S)
        actor, id = found
        kind: Kind = rng.choice(("kill", "lose-machine"))
        on_death(Fault(kind, loop.time() - start_s, CHASED_S, actor.program.name))
        stage.kill(actor.program.name, is_lost=kind == "lose-machine")
        loop.call_later(CHASED_S, stage.see_end, actor, context=Context())


def _end_chase(chasing: asyncio.Task[None]) -> None:
    """End a chase; raise what it raised."""
    if chasing.done():
        chasing.result()
    chasing.cancel()


def _at_work(stage: Stage, id: str, *, is_reading: bool) -> tuple[Actor, str] | None:
    """Return a worker that has made some of the answer to a request (default: to any), or whose KV is read for it now."""
    for actor in stage.running(stage.workers):
        for rank in () if actor.engine is None else actor.engine.ranks:
            for live in map(live_of, rank.engine.sequences()):
                if id not in ("", live.request_id):
                    continue
                if live.load is not None and is_reading:
                    is_moving = live.load.moving is not None and not live.load.moving.done()
                    owner = stage.owner_of(live.load.kv) if is_moving and live.load.kv is not None else None
                    if owner is not None:
                        return owner, live.request_id
                elif live.sent and live.end is None:
                    return actor, live.request_id
    return None


def _begin(fault: Fault, stage: Stage, weather: Weather) -> Callable[[], object] | None:
    """Begin a fault; return what ends it, or None if it cannot happen now."""
    network, name = stage.network, fault.target
    match fault.kind:
        case "partition":
            network.partition([name], [fault.other])
            return lambda: network.mend([name], [fault.other])
        case "half-open":
            network.cut([name], [fault.other])
            return lambda: network.mend([name], [fault.other])
        case "reset":
            network.reset(name, fault.other)
        case "delay":
            weather.delays.append(fault.amount)
            return lambda: weather.delays.remove(fault.amount)
        case "lose-events":
            return _more(network, "event_loss", fault.amount)
        case "bit-flip":
            return _more(network, "bit_flips", fault.amount)
        case "repeat-events":
            return _more(network, "event_repeats", fault.amount) if network.broker else None
        case "discovery-away" | "broker-away":
            server = network.discovery if fault.kind == "discovery-away" else network.broker
            if server is None or server.is_away:
                return None
            server.go_away()
            return server.come_back
        case "discovery-wiped":
            network.discovery.wipe()
        case "broker-wiped":
            if network.broker is None:
                return None
            network.broker.wipe()
        case "start-fails":
            stage.num_failing += 1
            return partial(_lower, stage, "num_failing")
        case "start-hangs":
            stage.num_hanging += 1
            return partial(_lower, stage, "num_hanging")
        case "overload":
            pass  # see `bursts`
        case "clock-jump" | "clock-drift" | "kill" | "lose-machine" | "restart" | "pause" | "slow-disk" | "full-disk":
            actor = next(stage.running([name]), None)
            return None if actor is None else _harm(fault, actor, stage)
    return lambda: None


def _harm(fault: Fault, actor: Actor, stage: Stage) -> Callable[[], object] | None:
    """Let something happen to a program that runs; return what ends it, or None if it cannot happen now."""
    network, node = stage.network, actor.node
    match fault.kind:
        case "pause":
            network.pause(node)
            return lambda: network.resume(node) if not node.is_dead else None
        case "clock-jump":
            actor.world.jump(fault.amount)
            return lambda: None
        case "clock-drift":
            actor.world.gain(fault.amount)
            return partial(actor.world.gain, 0.0)
        case "slow-disk" | "full-disk":
            return _harm_disks(fault, actor.engine)
        case "restart":
            stage.restart(actor)
        case _:
            stage.kill(fault.target, is_lost=fault.kind == "lose-machine")
    return partial(stage.see_end, actor)


def _harm_disks(fault: Fault, engine: Mocker | None) -> Callable[[], object] | None:
    """Make the disks of a worker slow or full, as long as this process uses them; return what ends it."""
    if engine is None:
        return None
    if fault.kind == "full-disk":
        engine.fill_disks(True)
        return partial(engine.fill_disks, False)
    engine.slow_disks(fault.amount)
    return partial(engine.slow_disks, 0.0)


def _more(network: Network, share: str, amount: float) -> Callable[[], object]:
    """Raise a share of the network's; return what lowers it again."""
    setattr(network, share, getattr(network, share) + amount)
    return lambda: setattr(network, share, max(getattr(network, share) - amount, 0.0))


def _lower(stage: Stage, count: str) -> None:
    setattr(stage, count, getattr(stage, count) - 1)
