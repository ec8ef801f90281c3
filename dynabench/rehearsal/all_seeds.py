"""Many rehearsals, one for each seed; those that fail are made smaller, and written to files that replay them."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dynabench.deployment.description import Deployment
from dynabench.deployment.engines import are_answered, check_fits
from dynabench.deployment.file import as_plain, from_plain
from dynabench.experiment.parallel import in_parallel
from dynabench.interrupt import Interrupt
from dynabench.rehearsal.checks.invariants import Violation
from dynabench.rehearsal.clients.limits import NO_LIMITS, Limits
from dynabench.rehearsal.clients.questions import generated, taken
from dynabench.rehearsal.faults.draw import draw, idle_kinds
from dynabench.rehearsal.faults.fault import Level
from dynabench.rehearsal.picture import picture_of, write_picture
from dynabench.rehearsal.run import Outcome, Rehearsal, rehearse
from dynabench.rehearsal.settings import RehearseConfig
from dynabench.rehearsal.shrink import shrunk
from dynabench.rehearsal.stage.own import is_chat
from dynabench.rehearsal.stage.stage import names_of
from dynabench.rehearsal.stage.story import Story
from dynabench.rehearsal.virtual_time.loop import unheard
from foundation.errors import UserError
from foundation.files import replace_text
from mocker.timing.choose import resolve
from workloads import Workload, WorkloadError

SCHEMA = "dynabench.rehearsal/1"


class Failed(NamedTuple):
    """A seed of which an invariant did not hold."""

    seed: int
    violations: list[Violation]
    file: Path
    picture: Path
    smaller: Rehearsal
    """The least that fails in the same way."""


class Found(NamedTuple):
    """What came of all seeds."""

    num_seeds: int
    num_requests: int
    num_failed_requests: int
    virtual_s: float
    happened: Counter[str]
    """How often each kind of fault happened."""
    failed: list[Failed]


class Plan(NamedTuple):
    """What is rehearsed with each seed."""

    deployment: Deployment
    level: Level
    num_requests: int
    rate: float
    workload: Workload | None = None
    own_engine: str = ""
    """`pystr:FILE` or `pytok:FILE`."""
    limits: Limits = NO_LIMITS
    """How long requests may be."""

    def of(self, seed: int) -> Rehearsal:
        """Draw the rehearsal of a seed."""
        model = self.deployment.pools[0].served_name
        asked = (
            generated(seed, self.num_requests, self.rate, model, self.limits)
            if self.workload is None
            else taken(self.workload, seed, self.num_requests, model, self.limits)
        )
        takes_chat = is_chat(self.own_engine or self.deployment.pools[0].engine)
        asked = [msgspec.structs.replace(one, is_chat=takes_chat) for one in asked]
        workers, others = names_of(self.deployment)
        rng, idle = random.Random(f"faults {seed}"), idle_kinds(self.deployment)
        faults = draw(rng, self.level, workers, others, asked[-1].at_s, idle=idle)
        return Rehearsal(seed, asked, faults, self.own_engine)


def check_workload(plan: Plan) -> None:
    """Refuse a workload as simulations do: with a request that never gets room, or with none that fits.

    Raises:
        WorkloadError: it is one.
    """
    if plan.workload is None:
        return
    for pool in plan.deployment.pools:
        if pool.engine == "mocker" and not plan.own_engine:
            check_fits(plan.workload, resolve(pool.engine_config, pool.timing))
    if not are_answered(plan.workload, plan.limits.longest).any():
        raise WorkloadError(
            f"{plan.workload.name}: no request fits {plan.limits.longest}; expected one that is answered"
        )


def left_out(plan: Plan) -> list[str]:
    """Say what is described and a rehearsal does not do, and which requests must be refused."""
    found, deployment = [], plan.deployment
    if plan.workload is not None and (refused := int((~are_answered(plan.workload, plan.limits.longest)).sum())):
        found.append(
            f"{refused:,} of {len(plan.workload):,} requests do not fit {plan.limits.longest}; they must be refused (HTTP 400)"
        )
    if deployment.fleet.events:
        found.append("fleet.events happen in `dynabench simulate` only; faults are those of --faults")
    if deployment.runtime is not None:
        found.append("the network is one in memory, not what the deployment's runtime names")
    return found


def carry_out(plan: Plan, seed: int) -> tuple[Rehearsal, Outcome]:
    """Rehearse a seed, without its faults and then with them, so that texts can be compared; return what counts."""
    whole = plan.of(seed)
    calm = msgspec.structs.replace(whole, faults=[])
    outcome = rehearse(plan.deployment, calm)
    if outcome.violations or not whole.faults:
        return calm, outcome
    return whole, rehearse(plan.deployment, whole, outcome.texts)


def rehearse_all(
    plan: Plan, config: RehearseConfig, interrupt: Interrupt, on_failure: Callable[[Failed], object]
) -> Found:
    """Rehearse every seed; stop early if the user interrupts."""
    found = Found(0, 0, 0, 0.0, Counter(), [])
    calls = [(carry_out, (plan, seed)) for seed in config.numbers]
    for _, (rehearsal, outcome) in in_parallel(calls, config.jobs, interrupt=interrupt):
        if outcome.violations:
            found.failed.append(_written(plan, rehearsal, outcome, config.out))
            on_failure(found.failed[-1])
        found.happened.update(event.partition(" ")[0] for event in outcome.happened)
        found = found._replace(
            num_seeds=found.num_seeds + 1,
            num_requests=found.num_requests + outcome.num_requests,
            num_failed_requests=found.num_failed_requests + outcome.num_failed,
            virtual_s=found.virtual_s + outcome.virtual_s,
        )
    return found


def _written(plan: Plan, whole: Rehearsal, outcome: Outcome, out: Path) -> Failed:
    """Make a rehearsal that failed smaller, and write it."""
    names = {violation.invariant for violation in outcome.violations}

    def fails(smaller: Rehearsal) -> bool:
        return any(violation.invariant in names for violation in replay(plan.deployment, smaller).violations)

    smaller = shrunk(whole, fails)
    file = out / f"seed-{whole.seed}.json"
    out.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "violations": [str(violation) for violation in outcome.violations],
        "deployment": as_plain(plan.deployment),
        "rehearsal": msgspec.to_builtins(smaller),
    }
    replace_text(file, msgspec.json.format(msgspec.json.encode(content)).decode() + "\n")
    replay(plan.deployment, smaller, file)
    return Failed(whole.seed, outcome.violations, file, picture_of(file), smaller)


def read(file: Path) -> tuple[Deployment, Rehearsal]:
    """Read a rehearsal that was written.

    Raises:
        UserError: it is something else.
    """
    try:
        content = msgspec.json.decode(file.read_bytes())
        if content["schema"] != SCHEMA:
            raise ValueError(f"its schema is {content['schema']!r}; expected {SCHEMA!r}")
        return from_plain(content["deployment"]), msgspec.convert(content["rehearsal"], Rehearsal)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, msgspec.ValidationError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file} is no rehearsal: {error}") from error


def replay(deployment: Deployment, rehearsal: Rehearsal, file: Path | None = None) -> Outcome:
    """Carry a rehearsal out again, compare it with its answers without faults, and draw its picture beside its file."""
    with unheard():
        calm = rehearse(deployment, msgspec.structs.replace(rehearsal, faults=[]))
    story = Story()
    outcome = rehearse(deployment, rehearsal, calm.texts, story)
    if file is not None:
        write_picture(file, deployment, outcome, story)
    return outcome


def lines(found: Found) -> Iterator[str]:
    """Say what happened how often, and what came of it."""
    often = ", ".join(f"{kind} {count:,}" for kind, count in sorted(found.happened.items()))
    yield f"happened: {often or 'nothing'}"
    was = "was" if found.num_failed_requests == 1 else "were"
    lost = f", of which {found.num_failed_requests:,} {was} not answered" * bool(found.num_failed_requests)
    yield f"{found.num_requests:,} requests{lost}, in {found.virtual_s:,.0f} s of virtual time"
    names: Sequence[str] = sorted({violation.invariant for each in found.failed for violation in each.violations})
    count = f"{len(found.failed):,} with violations" if found.failed else "0 violations"
    yield f"{found.num_seeds:,} seed{'s' * (found.num_seeds != 1)}, {count}" + f" ({', '.join(names)})" * bool(names)
