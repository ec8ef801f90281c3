"""Faults: what happens to a deployment while it is rehearsed, drawn from a seed."""

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import msgspec

from dynabench.rehearsal.stage import Stage
from serving.runtime.memory.network import DISCOVERY
from serving.runtime.world import SeededWorld

Kind = Literal[
    "kill",
    "lose-machine",
    "restart",
    "pause",
    "partition",
    "reset",
    "delay",
    "lose-events",
    "discovery-away",
    "discovery-wiped",
    "clock-jump",
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
    """The program; of a partition and a reset, one of the two."""
    other: str = ""
    """The other of the two."""
    amount: float = 0.0
    """A share, or a time (s)."""

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


LIGHT: tuple[Kind, ...] = ("kill", "restart", "delay", "reset")
MEDIUM: tuple[Kind, ...] = (*LIGHT, "lose-machine", "pause", "partition", "lose-events", "clock-jump")
LEVELS: dict[Level, Rates] = {
    "none": Rates(0, (), 0.0),
    "light": Rates(2, LIGHT, 2.0),
    "medium": Rates(5, MEDIUM, 6.0),
    "harsh": Rates(12, (*MEDIUM, "discovery-away", "discovery-wiped"), 15.0),
}
START_AGAIN_S = (0.5, 3.0)
"""After what time a program that ended is started again (s)."""


def draw(
    rng: random.Random, level: Level, workers: Sequence[str], others: Sequence[str], duration_s: float
) -> list[Fault]:
    """Draw what happens within a time (s); frontends and routers are not killed, as their clients would fail with them."""
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
        case "kill" | "lose-machine" | "restart":
            return Fault(kind, at_s, rng.uniform(*START_AGAIN_S), target)
        case "partition":
            return Fault(kind, at_s, lasts_s, target, rng.choice([*others, DISCOVERY]))
        case "reset":
            return Fault(kind, at_s, 0.0, target, rng.choice(others))
        case "delay":
            return Fault(kind, at_s, lasts_s, amount=rng.uniform(0.01, 0.5))
        case "lose-events":
            return Fault(kind, at_s, lasts_s, amount=rng.uniform(0.01, 0.3))
        case "discovery-away" | "discovery-wiped":
            return Fault(kind, at_s, lasts_s if kind == "discovery-away" else 0.0)
        case "clock-jump":
            return Fault(
                kind, at_s, 0.0, rng.choice([*workers, *others]), amount=rng.choice((-3600.0, -5.0, 5.0, 3600.0))
            )
    return Fault(kind, at_s, lasts_s, target)  # pause


class Weather:
    """What the network does to messages now."""

    def __init__(self) -> None:
        self.delays: list[float] = []
        """The longest additional delays of faults that are in force (s)."""

    def delay(self, sender: str, receiver: str, rng: random.Random) -> float:
        """Return how long a message takes (s): 0.2 to 0.7 ms, and one in a hundred longer while delays are in force."""
        usual = 0.0002 + 0.0005 * rng.random()
        return usual + max(self.delays) * rng.random() if self.delays and rng.random() < 0.01 else usual


async def carry_out(faults: Sequence[Fault], stage: Stage, weather: Weather, on_event: Callable[[str], None]) -> None:
    """Let everything happen at its time, and end; return once all faults are over."""
    start_s = asyncio.get_running_loop().time()

    async def happen(fault: Fault) -> None:
        await asyncio.sleep(max(start_s + fault.at_s - asyncio.get_running_loop().time(), 0.0))
        if (undo := _begin(fault, stage, weather)) is None:
            return  # its program does not run now
        on_event(f"{fault.kind} {fault.target}".strip())
        await asyncio.sleep(fault.lasts_s)
        undo()
        on_event(f"end of {fault.kind} {fault.target}".strip())

    await asyncio.gather(*(happen(fault) for fault in faults))


def _begin(fault: Fault, stage: Stage, weather: Weather) -> Callable[[], object] | None:
    """Begin a fault; return what ends it, or None if it cannot happen now."""
    network, name = stage.network, fault.target
    actor = next(stage.running([name]), None)
    if name and actor is None:
        return None
    match fault.kind:
        case "kill" | "lose-machine":
            assert actor is not None
            stage.kill(name, is_lost=fault.kind == "lose-machine")
            return partial(stage.start_again, actor)
        case "restart":
            assert actor is not None
            stage.stop(name)
            return partial(stage.start_again, actor)
        case "pause":
            assert actor is not None
            node = actor.node
            network.pause(node)
            return lambda: network.resume(node) if not node.is_dead else None
        case "partition":
            network.partition([name], [fault.other])
            return lambda: network.mend([name], [fault.other])
        case "reset":
            network.reset(name, fault.other)
        case "delay":
            weather.delays.append(fault.amount)
            return lambda: weather.delays.remove(fault.amount)
        case "lose-events":
            network.event_loss = min(network.event_loss + fault.amount, 1.0)
            return lambda: setattr(network, "event_loss", max(network.event_loss - fault.amount, 0.0))
        case "discovery-away":
            if network.discovery.is_away:
                return None
            network.discovery.go_away()
            return network.discovery.come_back
        case "discovery-wiped":
            network.discovery.wipe()
        case "clock-jump":
            assert actor is not None and isinstance(actor.world, SeededWorld)
            actor.world.jump(fault.amount)
    return lambda: None
