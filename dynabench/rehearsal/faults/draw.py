"""Which faults happen, drawn from a seed.

A deployment without disks, whose KV stays in its workers, or whose routers ask for none, draws none of their faults (`idle_kinds`).
"""

import random
from collections.abc import Collection, Sequence

import msgspec

from dynabench.deployment.description import Deployment
from dynabench.deployment.processes import STORE
from dynabench.rehearsal.clients.client import Question
from dynabench.rehearsal.faults.fault import Fault, Kind, Level
from dynabench.rehearsal.stage.stage import PLANNER
from foundation.own_code import base_and_additions, is_own
from serving.model.card import Role
from serving.router import wants_kv_events
from serving.runtime.memory.network import DISCOVERY


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
    *("bit-flip", "slow-disk", "full-disk", "slow-store", "early-timeout"),
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
"""How much longer each use of a slow disk, or each message of a slow store, takes (s)."""
HASTE = (0.1, 0.9)
"""The share of waits that end too early."""
DEATHS = (2, 5)
"""How many workers of one request are killed, as long as it goes on."""


def idle_kinds(deployment: Deployment) -> frozenset[Kind]:
    """Return the faults that change nothing for a deployment."""
    found = set[Kind]()
    if not (deployment.is_disaggregated or deployment.kv_store.kv_store_size):
        found.add("bit-flip")
    if not any(getattr(pool.mocker, "kv_disk_size", 0.0) for pool in deployment.pools):
        found |= {"slow-disk", "full-disk"}
    if not deployment.kv_store.kv_store_size:
        found.add("slow-store")
        if not any(_fetches_snapshots(deployment, pool.role) for pool in deployment.pools):
            found.add("early-timeout")
    return frozenset(found)


def _fetches_snapshots(deployment: Deployment, role: Role) -> bool:
    """Return whether a router follows the caches of a role's workers; a mode of the user's own may."""
    if role == "decode":  # they are followed for local prompts only
        return deployment.disaggregation.conditional_disagg != "never" and deployment.router.use_kv_events
    mode = deployment.mode_of(role)
    return is_own(base_and_additions(mode)[0]) or wants_kv_events(mode, deployment.router)


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
        case "slow-store":
            return Fault(kind, at_s, lasts_s, STORE, amount=rng.uniform(*SLOW_S))
        case "early-timeout":
            return Fault(kind, at_s, lasts_s, rng.choice([*workers, *others]), amount=rng.uniform(*HASTE))
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
