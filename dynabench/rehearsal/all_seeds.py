"""Many rehearsals, one for each seed; those that fail are made smaller, and written to files that replay them."""

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from dynabench.deployment.description import Deployment
from dynabench.deployment.engines import are_answered, check_fits, refuse_encoders, refuse_idle_settings
from dynabench.experiment.parallel import Call, in_parallel
from dynabench.experiment.processes import KilledError
from dynabench.experiment.settings import ExperimentConfig
from dynabench.experiment.source import Given, source_of
from dynabench.interrupt import Flag, Interrupt, InterruptError
from dynabench.progress import Display
from dynabench.rehearsal.checks.invariants import Violation
from dynabench.rehearsal.clients.limits import NO_LIMITS, Limits
from dynabench.rehearsal.clients.questions import generated, taken
from dynabench.rehearsal.faults.draw import draw, idle_kinds
from dynabench.rehearsal.faults.fault import Level
from dynabench.rehearsal.files import write
from dynabench.rehearsal.news import Item, News, Teller
from dynabench.rehearsal.picture import picture_of, write_picture
from dynabench.rehearsal.run import Outcome, Rehearsal, rehearse, started
from dynabench.rehearsal.settings import RehearseConfig
from dynabench.rehearsal.shrink import MOST_TRIES, shrunk, size
from dynabench.rehearsal.stage.own import check_own, is_chat, own_of
from dynabench.rehearsal.stage.stage import names_of
from dynabench.rehearsal.stage.story import Story
from dynabench.rehearsal.virtual_time.loop import unheard
from dynabench.terminal import Terminal
from foundation.errors import UserError, plain_errors
from foundation.own_code import base_and_additions, file_of, is_own
from foundation.text import listed
from mocker.timing.choose import resolve
from workloads import Workload, WorkloadError
from workloads.shape import ShapeConfig

BEGUN = 1e-6
"""The share of a call that has begun."""


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
    is_complete: bool = True
    """Whether it was not interrupted."""


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
        chats = is_chat(self.own_engine or self.deployment.pools[0].engine)
        asked = [msgspec.structs.replace(one, is_chat=chats) for one in asked]
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


def refused(plan: Plan) -> list[str]:
    """Say how many requests of a workload must be refused, if any."""
    if plan.workload is None or not (count := int((~are_answered(plan.workload, plan.limits.longest)).sum())):
        return []
    return [
        f"{count:,} of {len(plan.workload):,} requests do not fit {plan.limits.longest}; they must be refused (HTTP 400)"
    ]


def left_out(deployment: Deployment) -> list[str]:
    """Say what a deployment names and a rehearsal does not do."""
    found = []
    if deployment.fleet.events:
        found.append("fleet.events happen in `dynabench simulate` only; faults are those of --faults")
    if deployment.runtime is not None:
        found.append("the network is one in memory, not what the deployment's runtime names")
    return found


def carry_out(plan: Plan, seed: int) -> tuple[Rehearsal, Outcome]:
    """Rehearse a seed, without its faults and then with them, so that texts can be compared; return what counts."""
    rehearsal, outcome, _ = _told(plan, seed)
    return rehearsal, outcome


def _told(plan: Plan, seed: int) -> tuple[Rehearsal, Outcome, Story]:
    whole, story = plan.of(seed), Story()
    calm = msgspec.structs.replace(whole, faults=[])
    outcome = rehearse(plan.deployment, calm, story=story)
    if outcome.violations or not whole.faults:
        return calm, outcome, story
    story = Story()
    return whole, rehearse(plan.deployment, whole, outcome.texts, story), story


def _rehearse_seed(
    plan: Plan, seed: int, out: Path, teller: Teller, flag: Flag, *, is_twice: bool
) -> tuple[Outcome, Failed | None]:
    """Rehearse a seed; if it fails, write it, and then again as the least that fails.

    Raises:
        UserError: twice the same rehearsal gave two runs, because code of the user's is not deterministic.
    """
    flag.progress.note(BEGUN)
    rehearsal, outcome, story = _told(plan, seed)
    if is_twice and not outcome.is_stuck and _of(_told(plan, seed)[1]) != _of(outcome):
        raise UserError(
            f"seed {seed} gave two different runs{_own_code(plan)}; expected code that draws random numbers from the one it "
            "is given, or from random, and depends on nothing else that changes"
        )
    if not outcome.violations:
        return outcome, None
    first = outcome.violations[0]
    teller.tell(Item(seed, first.invariant, first.what))
    failed = _written(plan, rehearsal, outcome, out, story)
    if outcome.is_stuck:
        return outcome, failed

    def fails(smaller: Rehearsal) -> bool:
        if flag.is_raised():
            raise InterruptError
        return any(one.invariant == first.invariant for one in replay(plan.deployment, smaller).violations)

    with contextlib.suppress(InterruptError):  # what was written is kept
        smaller = shrunk(
            rehearsal, fails, lambda least, number: teller.tell(Item(seed, size=size(least), number=number))
        )
        if smaller != rehearsal:
            story = Story()
            again = replay(plan.deployment, smaller, story=story)
            failed = _written(plan, smaller, again, out, story)._replace(violations=outcome.violations)
    return outcome, failed


def _written(plan: Plan, rehearsal: Rehearsal, outcome: Outcome, out: Path, story: Story) -> Failed:
    file = write(out, plan.deployment, rehearsal, outcome, story)
    return Failed(rehearsal.seed, outcome.violations, file, picture_of(file), rehearsal)


def _of(outcome: Outcome) -> tuple[str, list[str], int]:
    """Return what must be the same each time."""
    return outcome.digest, outcome.happened, outcome.num_requests


def run_rehearsal(
    deployment: Deployment,
    given: Given,
    config: RehearseConfig,
    *,
    console: Terminal,
    interrupt: Interrupt | None = None,
) -> Found:
    """Rehearse a deployment with every seed, and say which fail; without a workload, each seed generates its requests.

    Raises:
        UserError: a setting is invalid, or the deployment cannot be rehearsed.
    """
    with contextlib.nullcontext(interrupt) if interrupt else Interrupt() as interrupt:
        plan = _planned(deployment, given, config)
        for said in [*left_out(deployment), *refused(plan)]:
            console.say(said, style="yellow")
        with Display("rehearsing", "seeds", interrupt, console) as display:

            def see(seed: int, violation: Violation) -> None:
                console.item(f"seed {seed}: {violation}")
                console.say("  leaving out faults and requests, as long as it fails in the same way", style="yellow")

            def try_smaller(seed: int, least: str, number: int) -> None:
                display.what = f"seed {seed} fails with {least}; try {number} of at most {MOST_TRIES}; rehearsed"

            def see_written(failed: Failed) -> None:
                console.say(f"seed {failed.seed} fails with {size(failed.smaller)}:")
                console.verbatim(f"  {failed.file}\n  {failed.picture}")
                display.what = "rehearsing"

            def try_alone(seed: int) -> None:
                console.say(
                    f"a process ended; rehearsing seed {seed}, which was under way, again, alone", style="yellow"
                )

            found = rehearse_all(
                *(plan, config, interrupt, see_written), on_violations=see, on_try=try_smaller, on_alone=try_alone
            )
            return found._replace(is_complete=not interrupt.is_asked)


def _planned(deployment: Deployment, given: Given, config: RehearseConfig) -> Plan:
    """Return what is rehearsed, once every program has started."""
    with plain_errors():
        refuse_encoders(deployment)
        refuse_idle_settings([deployment])
        requests = source_of(given, ExperimentConfig())(ShapeConfig()) if given else None
        if config.own_engine:
            check_own(config.own_engine)
        own = config.own_engine or own_of(deployment)
        plan = Plan(deployment, config.faults, config.requests, config.rate, requests, own, started(deployment, own))
        check_workload(plan)
        plan.of(config.numbers[0])
        return plan


def rehearse_all(
    plan: Plan,
    config: RehearseConfig,
    interrupt: Interrupt,
    on_failure: Callable[[Failed], object],
    *,
    on_violations: Callable[[int, Violation], object] = lambda *_: None,
    on_try: Callable[[int, str, int], object] = lambda *_: None,
    on_alone: Callable[[int], object] = lambda *_: None,
) -> Found:
    """Rehearse every seed, each in another process; stop early if the user interrupts.

    Args:
        plan: what is rehearsed.
        config: which seeds, and where to write those that fail.
        interrupt: ends it early.
        on_failure: is told of a seed that failed, once it is as small as it gets, and written.
        on_violations: is told at once the first that did not hold with a seed.
        on_try: is told a seed, the size of the least that fails so far, and the number of the next try.
        on_alone: is told a seed before it is rehearsed again, because a process ended while several were under way.

    Raises:
        UserError: one cannot be rehearsed, or its process ended.
    """
    found, seeds = Found(0, 0, 0, 0.0, Counter(), []), config.numbers
    call, again = partial(_rehearse_seed, is_twice=False), partial(_rehearse_seed, is_twice=bool(_own_code(plan)))
    with News(on_violations, on_try) as news:
        calls = [
            (again if seed == seeds[0] else call, (plan, seed, config.out, news.teller, interrupt.flag))
            for seed in seeds
        ]
        try:
            for _, (outcome, failed) in in_parallel(calls, config.jobs, interrupt=interrupt, is_apart=True):
                if failed is not None:
                    news.hear()
                    found.failed.append(failed)
                    on_failure(failed)
                found.happened.update(event.partition(" ")[0] for event in outcome.happened)
                found = found._replace(
                    num_seeds=found.num_seeds + 1,
                    num_requests=found.num_requests + outcome.num_requests,
                    num_failed_requests=found.num_failed_requests + outcome.num_failed,
                    virtual_s=found.virtual_s + outcome.virtual_s,
                )
        except KilledError as error:
            begun = {seed: calls[place] for place, seed in enumerate(seeds) if 0 < interrupt.shares.each()[place] < 1}
            said = _killed(begun, on_alone) + _own_code(plan)
            raise UserError(f"{said}; if memory ran out, use fewer --jobs") from error
    return found


def _killed(begun: Mapping[int, Call], on_alone: Callable[[int], object]) -> str:
    """Say which seed ended its process: of several that were under way, the first that does it alone, too."""
    if not begun:
        return "a process ended while it rehearsed no seed"
    if len(begun) == 1:
        return f"the process that rehearsed seed {next(iter(begun))} ended"
    for seed, call in begun.items():
        on_alone(seed)
        try:
            with Interrupt() as interrupt:
                list(in_parallel([call], 1, interrupt=interrupt, is_apart=True))
        except KilledError:
            return f"the process that rehearsed seed {seed} ended, and again when it rehearsed that seed alone"
        if interrupt.is_asked:
            raise InterruptError
    seeds = listed([*map(str, begun)], "or")
    return f"a process that rehearsed seed {seeds} ended, but none did when each of these seeds was rehearsed alone"


def _own_code(plan: Plan) -> str:
    """Name the files of the user's that a rehearsal runs."""
    deployment = plan.deployment
    named = [deployment.router_mode, *(pool.router_mode or "" for pool in deployment.pools), deployment.planner.planner]
    files = [file_of(base_and_additions(name)[0]) for name in named if is_own(base_and_additions(name)[0])]
    files += [plan.own_engine.partition(":")[2]] * bool(plan.own_engine)
    return f"; it ran {', '.join(dict.fromkeys(files))}" * bool(files)


def replay(
    deployment: Deployment, rehearsal: Rehearsal, file: Path | None = None, story: Story | None = None
) -> Outcome:
    """Carry a rehearsal out again, compare it with its answers without faults, and draw its picture beside its file."""
    texts: dict[int, str] = {}
    if rehearsal.faults:
        with unheard():
            texts = rehearse(deployment, msgspec.structs.replace(rehearsal, faults=[])).texts
    story = story or Story()
    outcome = rehearse(deployment, rehearsal, texts, story)
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
    end = f" ({', '.join(names)})" * bool(names) + (
        "" if found.is_complete else "; interrupted: the other seeds did not run"
    )
    yield f"{found.num_seeds:,} seed{'s' * (found.num_seeds != 1)}, {count}{end}"
