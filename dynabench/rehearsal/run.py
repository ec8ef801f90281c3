"""A rehearsal: one deployment, one workload, the faults of one seed, and what did not hold."""

import asyncio
import hashlib
import logging
import random
from collections.abc import Sequence
from typing import Any

import msgspec

from dynabench.deployment.description import Deployment
from dynabench.rehearsal import invariants
from dynabench.rehearsal.client import Answer, Question, ask_all
from dynabench.rehearsal.faults import Fault, Level, Weather, carry_out, draw
from dynabench.rehearsal.invariants import Violation
from dynabench.rehearsal.loop import VirtualLoopError, run
from dynabench.rehearsal.stage import Stage
from serving.runtime.memory.network import Network
from serving.runtime.world import SeededWorld, within

UP_S = 5.0
"""Within this time after the start every worker is known (s)."""
SETTLE_S = 40.0
"""After this time without requests and faults, all leases of the dead have run out, and all events have arrived (s)."""
BOUND_S = 120.0
"""How long a request may take, whatever happens (s)."""
LONGEST_S = 1000.0
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


def drawn(
    seed: int, level: Level, stage_of: Deployment, questions: Sequence[Question], names: tuple[list[str], list[str]]
) -> Rehearsal:
    """Draw a rehearsal from a seed."""
    rng = random.Random(f"faults {seed}")
    duration_s = max((one.at_s for one in questions), default=0.0)
    return Rehearsal(seed, list(questions), draw(rng, level, *names, duration_s))


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
    loop, weather = asyncio.get_running_loop(), Weather()
    network = Network(random.Random(f"network {rehearsal.seed}"), delay=weather.delay)
    stage = Stage(deployment, rehearsal.seed, network)
    stage.start()
    began_s, happened = loop.time(), list[str]()
    await asyncio.sleep(UP_S)
    client = network.node("client")
    with within(SeededWorld(rehearsal.seed, "client")):
        asking = asyncio.create_task(ask_all(rehearsal.questions, stage.frontends), context=client.context())
        blowing = asyncio.create_task(carry_out(rehearsal.faults, stage, weather, happened.append))
        answers = await asking
        await blowing
        await asyncio.sleep(SETTLE_S)
        found = [
            *invariants.of_answers(answers, texts, BOUND_S),
            *invariants.of_failures(answers, may_fail=bool(rehearsal.faults)),
            *invariants.at_rest(stage),
            *invariants.of_programs(stage),
            *invariants.of_discovery(network, stage),
            *(Violation("alive", said) for said in logged.defects),
        ]
        last = Question(-1, 0.0, [1, 2, 3], 4, model=deployment.pools[0].served_name)
        again = await asyncio.create_task(
            ask_all([last] * len(stage.frontends), stage.frontends), context=client.context()
        )
        found += [Violation("serves-again", answer.error) for answer in again if not answer.is_right]
    return Outcome(
        rehearsal.seed,
        found,
        _digest(answers),
        loop.time() - began_s,
        {answer.question.number: answer.text for answer in answers if answer.is_right},
        sum(bool(answer.error) for answer in answers),
        happened,
    )


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
