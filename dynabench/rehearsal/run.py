"""A rehearsal: one deployment, one workload, the faults of one seed, and what did not hold."""

import asyncio
import hashlib
import logging
import random
import traceback
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from dynabench.deployment.description import Deployment
from dynabench.interrupt import InterruptError, SecondInterruptError, recognized
from dynabench.rehearsal.checks.answers import of_answers, of_failures
from dynabench.rehearsal.checks.discovery import of_discovery
from dynabench.rehearsal.checks.invariants import Violation
from dynabench.rehearsal.checks.met import Met
from dynabench.rehearsal.checks.planner import PlanWatch, of_plan
from dynabench.rehearsal.checks.programs import limits_of
from dynabench.rehearsal.checks.rest import at_rest, in_stores, of_programs, read_well
from dynabench.rehearsal.checks.watch import Watch
from dynabench.rehearsal.clients.client import Answer, Question, ask_all
from dynabench.rehearsal.clients.limits import Limits, limits_with
from dynabench.rehearsal.faults.draw import bursts
from dynabench.rehearsal.faults.fault import Fault
from dynabench.rehearsal.faults.happen import Happenings
from dynabench.rehearsal.faults.weather import Weather
from dynabench.rehearsal.stage.own import contained, is_chat
from dynabench.rehearsal.stage.stage import UP_S, Stage
from dynabench.rehearsal.stage.story import Story
from dynabench.rehearsal.stage.supervisor import Supervisor
from dynabench.rehearsal.virtual_time.errors import OutsideError, StuckError, VirtualLoopError
from dynabench.rehearsal.virtual_time.loop import run, unheard
from foundation.errors import UserError
from mocker.timing.choose import resolve
from serving.kv_tiers.tier import TierError
from serving.model.context import BYTES_CONTEXT
from serving.model.errors import ModelError
from serving.runtime.memory.network import Network
from serving.runtime.ports import RuntimeUnavailableError
from serving.runtime.world import SeededWorld, within
from serving.worker.engine import EngineError

Result = TypeVar("Result")

BROKERED = 0.25
"""The share of seeds with which requests and events go over a server, as with NATS."""
SETTLE_S = 40.0
"""After this time without requests and faults, all leases of the dead have run out, and all events have arrived (s)."""
OF_MOCKERS = {"counted"}
"""Invariants that other engines need not keep: they may answer with as many tokens as they like."""
LONGEST_S = 2000.0
"""How long a rehearsal may take after its last request (s)."""


class Rehearsal(msgspec.Struct, frozen=True):
    """What is rehearsed; a file with it replays it."""

    seed: int
    questions: list[Question]
    faults: list[Fault]
    own_engine: str = ""
    """`pystr:FILE` or `pytok:FILE`: what each worker runs instead of its engine."""


class Outcome(msgspec.Struct, frozen=True):
    """What came of a rehearsal."""

    seed: int
    violations: list[Violation]
    digest: str
    """Of everything that clients saw, with times."""
    virtual_s: float
    texts: dict[int, str]
    """Of the requests that were answered."""
    num_requests: int
    """The requests that were sent, those of overloads included."""
    num_failed: int
    """Those of them that failed, although they were not too long."""
    happened: list[str]
    """The faults that happened, those whom a chase killed included, and the pools that a planner changed."""
    is_stuck: bool = False
    """Whether it was given up because code computed without end."""


def rehearse(
    deployment: Deployment, rehearsal: Rehearsal, texts: dict[int, str] | None = None, story: Story | None = None
) -> Outcome:
    """Carry out a rehearsal.

    Args:
        deployment: what is rehearsed.
        rehearsal: the requests and the faults.
        texts: the answers without faults (None: they are not compared).
        story: is told what happens.

    Raises:
        UserError: a program wants something that does not exist in virtual time.
    """
    logged = _Logged()
    root = logging.getLogger()
    root.addHandler(logged)
    of_uvicorn = logging.getLogger("uvicorn.error")
    of_uvicorn.addFilter(logged.note)
    longest_s = LONGEST_S + max((asked.at_s for asked in rehearsal.questions), default=0.0)
    whole = _whole(deployment, rehearsal, texts or {}, logged, story or Story())
    try:
        return _apart(whole, rehearsal.seed, longest_s)
    except (InterruptError, SecondInterruptError):
        raise
    except (VirtualLoopError, StuckError) as error:
        found, is_stuck = [Violation("bounded", str(error)[:2000])], isinstance(error, StuckError)
        return Outcome(rehearsal.seed, found, "", longest_s, {}, 0, 0, [], is_stuck=is_stuck)
    except (SystemExit, KeyboardInterrupt) as error:  # code of the user's raised it
        return Outcome(rehearsal.seed, [Violation("alive", _exit(error))], "", longest_s, {}, 0, 0, [])
    finally:
        root.removeHandler(logged)
        of_uvicorn.removeFilter(logged.note)


def started(deployment: Deployment, own_engine: str = "") -> Limits:
    """Start every program of a deployment once, without requests and faults; return how long requests may be.

    Raises:
        UserError: one does not start, or wants something that does not exist in virtual time.
    """
    try:
        with unheard():
            context = _apart(_context(deployment, own_engine), 0, LONGEST_S)
    except (InterruptError, SecondInterruptError):
        raise
    except (VirtualLoopError, StuckError) as error:
        raise UserError(f"the deployment does not start: {error}") from error
    except (SystemExit, KeyboardInterrupt) as error:
        raise UserError(f"the deployment does not start: {_exit(error)}") from error
    simulated = [pool for pool in deployment.pools if pool.engine == "mocker" and not own_engine]
    return limits_with(context, [resolve(pool.engine_config, pool.timing) for pool in simulated])


def _exit(error: BaseException) -> str:
    """Say which code ends its process by an exception."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{error!r} would end the process, from {Path(place.filename).name}:{place.lineno} ({place.name})"


async def _context(deployment: Deployment, own_engine: str) -> int:
    """Start every program; return the shortest context of its models."""
    stage = Stage(deployment, 0, Network(random.Random(0)), own_engine=own_engine)
    stage.start(*stage.programs)
    tasks = {actor.task: name for name, actor in stage.actors.items()}
    ended, _ = await asyncio.wait(tasks, timeout=UP_S, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        error = task.exception() if task in ended else None
        if isinstance(error, (ValueError, EngineError, ModelError, TierError, RuntimeUnavailableError)):
            raise UserError(f"{tasks[task]} does not start: {error}") from error
        if error is not None:
            raise UserError(f"{tasks[task]} does not start: {error!r}") from error
    models = [actor.models for actor in stage.running(stage.frontends)]
    return min((pool.card.context_length for each in models if each for pool in each.pools()), default=BYTES_CONTEXT)


def _apart(main: Coroutine[Any, Any, Result], seed: int, longest_s: float) -> Result:
    """Run a coroutine on virtual time, apart from threads, and from this machine's clocks and randomness.

    Raises:
        UserError: a program wants something that does not exist in virtual time.
    """
    try:
        with recognized(), contained(seed):
            return run(main, max_s=longest_s, is_strict=True)
    except OutsideError as error:
        raise UserError(f"this cannot be rehearsed: {error}") from error


async def _whole(
    deployment: Deployment, rehearsal: Rehearsal, texts: dict[int, str], logged: "_Logged", story: Story
) -> Outcome:
    loop, weather, faults = asyncio.get_running_loop(), Weather(), list[Fault]()
    rng = random.Random(f"network {rehearsal.seed}")
    network = Network(rng, delay=weather.delay, has_broker=rng.random() < BROKERED)
    stage = Stage(deployment, rehearsal.seed, network, story, own_engine=rehearsal.own_engine)
    supervisor = Supervisor(stage, deployment)
    supervising = supervisor.begin(rehearsal.seed)
    start_s, answers = loop.time(), story.answers
    await asyncio.sleep(UP_S)
    story.began_s = loop.time()
    planned = PlanWatch(deployment, stage, supervisor, answers, weather)
    client = network.node("client")
    watch = Watch(stage, answers, weather, max(_migration_limits(deployment)), planned.look)
    first = deployment.pools[0]
    engine = rehearsal.own_engine or first.engine
    met = _met(deployment, stage, faults, planned.there)._replace(worked_s=watch.worked_s)
    if is_chat(engine):
        met = met._replace(num_migrations=0)  # nobody but the engine knows how to go on with its answer
    watching = asyncio.create_task(watch.run())
    with within(SeededWorld(rehearsal.seed, "client")), story.to_its_end():
        questions = [*rehearsal.questions, *bursts(rehearsal.faults, rehearsal.questions)]
        asking = asyncio.create_task(ask_all(questions, stage.frontends, answers), context=client.context())
        happening = Happenings(stage, weather, faults.append).carry_out(rehearsal.faults)
        await asyncio.gather(asking, happening)
        await asyncio.sleep(SETTLE_S)
        if watching.done():
            watching.result()  # it looks until cancelled, so it has a defect of its own
        watching.cancel()
        story.checked_s = loop.time()
        found = [
            *watch.violations,
            *of_answers(answers, texts, met),
            *of_failures(answers, met, limits_of(stage)),
            *at_rest(stage),
            *in_stores(stage),
            *(() if rehearsal.faults else read_well(stage)),
            *of_programs(stage),
            *of_discovery(stage),
            *of_plan(deployment, stage, supervisor, loop.time()),
            *(Violation("alive", f"the supervisor ended: {error!r}") for error in _ended(supervising)),
            *(Violation("alive", said) for said in logged.defects),
        ]
        last = Question(0, 0.0, [97, 98, 99], 4, model=first.served_name, is_chat=is_chat(engine))
        found += await asyncio.create_task(_serve_again(stage.frontends, last), context=client.context())
    return Outcome(
        rehearsal.seed,
        [one for one in dict.fromkeys(found) if engine == "mocker" or one.invariant not in OF_MOCKERS],
        _digest(answers),
        loop.time() - start_s,
        {answer.question.number: answer.text for answer in answers if answer.is_right},
        len(answers),
        sum(bool(answer.error) and not answer.question.is_too_long for answer in answers),
        [*(f"{fault.kind} {fault.target}".strip() for fault in faults), *_changes(supervisor)],
    )


async def _serve_again(frontends: Sequence[str], question: Question) -> list[Violation]:
    """Check that each frontend answers a question."""
    answers = list[Answer]()
    await ask_all(
        [msgspec.structs.replace(question, number=each) for each in range(len(frontends))], frontends, answers
    )
    return [Violation("serves-again", answer.error) for answer in answers if not answer.is_right]


def _changes(supervisor: Supervisor) -> Iterator[str]:
    """Yield what a planner changed."""
    for change in supervisor.hands.roster.changes if supervisor.hands else ():
        yield f"{'grow' if change.after > change.before else 'shrink'} {change.pool}"


def _ended(supervising: asyncio.Task[None]) -> list[BaseException | None]:
    """Return why the supervisor ended, if it did."""
    return [supervising.exception()] if supervising.done() else []


def _met(
    deployment: Deployment,
    stage: Stage,
    faults: Sequence[Fault],
    there: Sequence[tuple[float, Sequence[set[str]]]],
) -> Met:
    """Return what decides which requests may fail, now that requests are sent."""
    settings = {name: stage.programs[name].settings[0] for name in stage.workers}
    whose = {name: (worker.endpoint, worker.role) for name, worker in settings.items()}  # each model has an endpoint
    pools = [{name for name in whose if whose[name] == kind} for kind in dict.fromkeys(whose.values())]
    limit = min(_migration_limits(deployment))
    read_s = deployment.kv_transfer.transfer_read_timeout_s if deployment.is_disaggregated else 0.0
    policies = {getattr(pool.mocker, "kv_load_failure_policy", "fail") for pool in deployment.pools}
    needs_kv = deployment.is_disaggregated and "fail" in policies
    began_s = asyncio.get_running_loop().time()
    return Met(faults, began_s, pools, stage.frontends, limit, read_s, there, stage.routers, needs_kv)


def _migration_limits(deployment: Deployment) -> list[int]:
    """Return how often requests to each pool may migrate; a frontend's own limit is that of all."""
    given = deployment.frontend.migration_limit
    return [pool.worker.migration_limit if given is None else given for pool in deployment.pools]


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

    def note(self, record: logging.LogRecord) -> bool:
        """Keep what uvicorn logs, which does not pass it on; return whether somebody wants to see it."""
        if record.exc_info and isinstance(error := record.exc_info[1], InterruptError):
            loop: Any = asyncio.get_running_loop()  # uvicorn catches it
            loop.tear(error)
            return False
        if record.levelno >= self.level:
            self.emit(record)
        return any(not isinstance(handler, _Logged) for handler in logging.getLogger().handlers)
