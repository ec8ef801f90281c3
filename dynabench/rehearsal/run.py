"""A rehearsal: one deployment, one workload, the faults of one seed, and what did not hold."""

import asyncio
import hashlib
import logging
import random
from collections.abc import Sequence
from typing import Any

import msgspec

from dynabench.deployment.description import Deployment
from dynabench.rehearsal.client import Answer, Question, ask_all
from dynabench.rehearsal.faults import Fault, Weather, bursts, carry_out
from dynabench.rehearsal.invariants import (
    Met,
    Violation,
    Watch,
    at_rest,
    limits_of,
    of_answers,
    of_discovery,
    of_failures,
    of_programs,
)
from dynabench.rehearsal.lives import in_stores, read_well
from dynabench.rehearsal.loop import VirtualLoopError, run
from dynabench.rehearsal.stage import Stage
from serving.runtime.memory.network import Network
from serving.runtime.world import SeededWorld, within

BROKERED = 0.25
"""The share of seeds with which requests and events go over a server, as with NATS."""
UP_S = 5.0
"""Within this time after the start every worker is known (s)."""
SETTLE_S = 40.0
"""After this time without requests and faults, all leases of the dead have run out, and all events have arrived (s)."""
LONGEST_S = 2000.0
"""How long a rehearsal may take (s)."""


class Rehearsal(msgspec.Struct, frozen=True):
    """What is rehearsed; a file with it replays it."""

    seed: int
    questions: list[Question]
    faults: list[Fault]


class Outcome(msgspec.Struct, frozen=True):
    """What came of a rehearsal."""

    seed: int
    violations: list[Violation]
    digest: str
    """Of everything that clients saw, with times."""
    virtual_s: float
    texts: dict[int, str]
    """Of the requests that were answered."""
    num_failed: int
    happened: list[str]
    """The faults that happened."""


def rehearse(deployment: Deployment, rehearsal: Rehearsal, texts: dict[int, str] | None = None) -> Outcome:
    """Carry out a rehearsal.

    Args:
        deployment: what is rehearsed.
        rehearsal: the requests and the faults.
        texts: the answers without faults (None: they are not compared).
    """
    logged = _Logged()
    root = logging.getLogger()
    root.addHandler(logged)
    try:
        return run(_whole(deployment, rehearsal, texts or {}, logged), max_s=LONGEST_S)
    except VirtualLoopError as error:
        return Outcome(rehearsal.seed, [Violation("bounded", str(error)[:2000])], "", LONGEST_S, {}, 0, [])
    finally:
        root.removeHandler(logged)


async def _whole(deployment: Deployment, rehearsal: Rehearsal, texts: dict[int, str], logged: "_Logged") -> Outcome:
    loop, weather, faults = asyncio.get_running_loop(), Weather(), [*rehearsal.faults]
    rng = random.Random(f"network {rehearsal.seed}")
    network = Network(rng, delay=weather.delay, has_broker=rng.random() < BROKERED)
    stage = Stage(deployment, rehearsal.seed, network)
    stage.start()
    start_s, happened, answers = loop.time(), list[str](), list[Answer]()
    await asyncio.sleep(UP_S)
    client, met = network.node("client"), _met(deployment, stage, faults)
    watch = Watch(stage, answers, weather, met.num_migrations)
    watching = asyncio.create_task(watch.run())
    with within(SeededWorld(rehearsal.seed, "client")):
        questions = [*rehearsal.questions, *bursts(faults, rehearsal.questions)]
        asking = asyncio.create_task(ask_all(questions, stage.frontends, answers), context=client.context())
        happening = carry_out(rehearsal.faults, stage, weather, happened.append, faults.append)
        await asyncio.gather(asking, happening)
        await asyncio.sleep(SETTLE_S)
        watching.cancel()
        found = [
            *watch.violations,
            *of_answers(answers, texts, met),
            *of_failures(answers, met, limits_of(stage)),
            *at_rest(stage),
            *(Violation(*each) for each in in_stores(stage)),
            *(Violation(*each) for each in (() if faults else read_well(stage))),
            *of_programs(stage),
            *of_discovery(stage),
            *(Violation("alive", said) for said in logged.defects),
        ]
        again = list[Answer]()
        model = deployment.pools[0].served_name
        last = [Question(number, 0.0, [1, 2, 3], 4, model=model) for number in range(len(stage.frontends))]
        await asyncio.create_task(ask_all(last, stage.frontends, again), context=client.context())
        found += [Violation("serves-again", answer.error) for answer in again if not answer.is_right]
    return Outcome(
        rehearsal.seed,
        found,
        _digest(answers),
        loop.time() - start_s,
        {answer.question.number: answer.text for answer in answers if answer.is_right},
        sum(bool(answer.error) for answer in answers),
        happened,
    )


def _met(deployment: Deployment, stage: Stage, faults: Sequence[Fault]) -> Met:
    """Return what decides which requests may fail, now that requests are sent."""
    pools = [
        {name for name in stage.workers if stage.programs[name].settings[0].role == role}
        for role in dict.fromkeys(pool.role for pool in deployment.pools)
    ]
    limit = min(pool.worker.migration_limit for pool in deployment.pools)
    read_s = deployment.kv_transfer.transfer_read_timeout_s if deployment.is_disaggregated else 0.0
    return Met(faults, asyncio.get_running_loop().time(), pools, stage.frontends, limit, read_s)


def _digest(answers: Sequence[Answer]) -> str:
    seen: Any = [(one.question.number, one.status, one.error, one.text, one.first_s, one.ended_s) for one in answers]
    return hashlib.sha256(repr(seen).encode()).hexdigest()[:16]


class _Logged(logging.Handler):
    """Keeps what programs log as defects of their own."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.defects: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep an error that has a traceback."""
        if record.exc_info:
            self.defects.append(f"{record.name}: {record.getMessage()}: {record.exc_info[1]!r}"[:500])
