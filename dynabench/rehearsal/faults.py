"""Faults: what happens to a deployment while it is rehearsed, drawn from a seed.

Programs that are rehearsed use no files, and KV has no contents, so slow or full disks and flipped bits do not happen.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from contextvars import Context
from functools import partial
from typing import Literal

import msgspec

from dynabench.rehearsal.client import Question
from dynabench.rehearsal.stage import Actor, Stage
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
    "overload",
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
    """A share, a time (s), or the requests that come at once."""

    def __str__(self) -> str:
        """Say what happens."""
        whom = " and ".join(filter(None, (self.target, self.other)))
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
    *("lose-machine", "pause", "partition", "half-open", "lose-events", "repeat-events", "clock-jump", "chase"),
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
DEATHS = (2, 5)
"""How many workers of one request are killed, as long as it goes on."""
CHASED_S = 1.0
"""After what time each of them is started again (s)."""
AIM_S = 0.005
"""How often a chase looks for the next (s)."""


def draw(
    rng: random.Random, level: Level, workers: Sequence[str], others: Sequence[str], duration_s: float
) -> list[Fault]:
    """Draw what happens within a time (s)."""
    rates = LEVELS[level]
    if not rates.most:
        return []
    faults = [
        _drawn(rng, rng.choice(rates.kinds), rates, workers, others, duration_s)
        for _ in range(rng.randint(1, rates.most))
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
        case "discovery-away" | "broker-away":
            return Fault(kind, at_s, lasts_s)
        case "discovery-wiped" | "broker-wiped":
            return Fault(kind, at_s, 0.0)
        case "clock-jump":
            return Fault(
                kind, at_s, 0.0, rng.choice([*workers, *others]), amount=rng.choice((-3600.0, -5.0, 5.0, 3600.0))
            )
        case "overload":
            return Fault(kind, at_s, 0.0, amount=rng.randint(*BURST))
        case "chase":
            return Fault(kind, at_s, lasts_s, amount=rng.randint(*DEATHS))
    return Fault(kind, at_s, lasts_s, target)  # lose-machine, pause


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
            undo: Callable[[], object] | None = chasing.cancel
        else:
            undo = _begin(fault, stage, weather)
        if undo is None:
            return  # its program does not run now, or there is no such server
        weather.begin()
        on_event(f"{fault.kind} {fault.target}".strip())
        await asyncio.sleep(fault.lasts_s)
        undo()
        weather.end()
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
        loop.call_later(CHASED_S, stage.start_again, actor, context=Context())


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
        case "overload":
            pass  # see `bursts`
        case "clock-jump" | "kill" | "lose-machine" | "restart" | "pause":
            actor = next(stage.running([name]), None)
            return None if actor is None else _harm(fault, actor, stage)
    return lambda: None


def _harm(fault: Fault, actor: Actor, stage: Stage) -> Callable[[], object]:
    """Let something happen to a program that runs; return what ends it."""
    network, node = stage.network, actor.node
    match fault.kind:
        case "pause":
            network.pause(node)
            return lambda: network.resume(node) if not node.is_dead else None
        case "clock-jump":
            actor.world.jump(fault.amount)
            return lambda: None
        case "restart":
            stage.stop(fault.target)
        case _:
            stage.kill(fault.target, is_lost=fault.kind == "lose-machine")
    return partial(stage.start_again, actor)


def _more(network: Network, share: str, amount: float) -> Callable[[], object]:
    """Raise a share of the network's; return what lowers it again."""
    setattr(network, share, getattr(network, share) + amount)
    return lambda: setattr(network, share, max(getattr(network, share) - amount, 0.0))
