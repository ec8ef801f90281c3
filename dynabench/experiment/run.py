"""An experiment: a workload, arms with different settings, repeats, and a results folder."""

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from msgspec import structs

from dynabench.arm import Arm, Run, Settings, runs_of
from dynabench.deployment.engines import check_fits, engines_of, refuse_idle_settings
from dynabench.experiment.arms import comparison_of
from dynabench.experiment.bounds import Bounds, bounds_of
from dynabench.experiment.cost import expected_s, num_processes
from dynabench.experiment.limits import check_has_tokens
from dynabench.experiment.manifest import manifest_of, now
from dynabench.experiment.oracle import has_changing_fleet, oracles_of
from dynabench.experiment.parallel import in_parallel
from dynabench.experiment.settings import ExperimentConfig
from dynabench.experiment.source import Given, Source, source_of
from dynabench.interrupt import Flag, Interrupt, InterruptError, noted
from dynabench.progress import Display
from dynabench.terminal import Terminal
from dynabench.virtual.run import simulate
from reports import folder, gate
from reports.figures.conditions import Condition
from reports.folder import Manifest
from reports.key import key_of
from reports.record.records import Record
from reports.summarize import summary_of
from reports.summary import Summary
from workloads import WorkloadError


class Measured(NamedTuple):
    """What came of an experiment."""

    out: Path | None
    """The results folder, if it was to be written."""
    manifest: Manifest
    summary: Summary
    runs: list[Record]


def run_experiment(
    clock: Literal["virtual", "wall"],
    given: Given,
    experiment: ExperimentConfig,
    settings: Settings,
    *,
    console: Terminal,
    gates: Sequence[Condition] = (),
    is_kept: bool = True,
    interrupt: Interrupt | None = None,
) -> Measured:
    """Run all arms and, if the results are to be kept, write their folder.

    Another thread that has entered an interrupt may lend it: only the main thread gets signals.

    Raises:
        WorkloadError: the workload cannot be used.
        ValueError: an axis is not understood, the deployment cannot run on this clock, or a gate could not be judged.
        KeyboardInterrupt: the user interrupted before anything was measured, or twice.
    """
    if settings.client is not None and settings.url is not None:
        from dynabench.live.tls import check_reachable

        check_reachable(settings.url, settings.client)
        experiment = replace(experiment, router_mode=experiment.router_mode[:1])  # the endpoint does its own routing
    check_has_tokens(experiment.limits, settings.client)
    arms, left_out = comparison_of(experiment, settings)
    refuse_idle_settings([arm.settings.deployment for arm in arms])
    num_arms = sum(not arm.is_repeated for arm in arms)
    gate.refuse_idle(gates, gate.Basis(num_arms=num_arms, has_limits=bool(experiment.limits)))
    out = results_folder(experiment, "simulate" if clock == "virtual" else "run") if is_kept else None
    source = source_of(given, experiment)
    if clock == "virtual":
        arms, impossible = _possible(arms, source)
        left_out += impossible
    for reason in left_out:
        console.item(f"left out: {reason}")
    workload = source(arms[0].settings.shape)
    wanted = runs_of(arms, experiment.repeats, experiment.seed)
    carry_out = _simulate_all if clock == "virtual" else _measure_all
    with (
        contextlib.nullcontext(interrupt) if interrupt else Interrupt() as interrupt,
        noted(),
    ):  # what was measured is not lost, wherever a signal comes
        runs = carry_out(wanted, source, experiment, console, interrupt)
        is_whole = len(runs) == len(wanted)
        runs = [replace(run, is_complete=run.is_complete and is_whole) for run in runs if len(run.requests)]
        if not runs:
            raise KeyboardInterrupt("interrupted before any request was answered; nothing was written")
        order = {arm.name: place for place, arm in enumerate(arms)}
        runs.sort(key=lambda run: (order[run.arm], run.repeat))
        bounds = Bounds()
        with contextlib.suppress(InterruptError), interrupt.obeyed():
            if clock == "virtual" and not interrupt.is_asked:
                runs = _beside_oracles(runs, arms, source, experiment, console, interrupt)
                bounds = bounds_of(arms, source)
        manifest = manifest_of(clock, given, workload, experiment, settings, arms, runs)
        manifest |= {"bound_s": bounds.ttft_s, "best_hit_shares": bounds.hit_shares, "left_out": left_out}
        if out is None:
            return Measured(None, manifest, summary_of(manifest, runs), runs)
        if interrupt.is_asked and all(run.is_complete for run in runs):
            raise InterruptError(folder.keep(out, manifest, runs))
        with interrupt.obeyed():
            summary = folder.write(out, manifest, runs, with_charts=not interrupt.is_asked)
            return Measured(out, manifest, summary, runs)


def _possible(arms: list[Arm], source: Source) -> tuple[list[Arm], list[str]]:
    """Return the arms whose engines can be simulated and fit the workload, and why the others do not.

    Raises:
        ValueError: no engines can be simulated.
        WorkloadError: no engines fit the workload, or it cannot be used.
    """
    found: list[Arm] = []
    reasons: list[tuple[str, ValueError | WorkloadError]] = []
    fits = functools.cache(lambda shape, engine, is_hard: check_fits(source(shape), engine, fail_on_too_long=is_hard))
    for arm in arms:
        try:
            for engine in set(engines_of(arm.settings.deployment)):
                fits(arm.settings.shape, engine, arm.settings.load.fail_on_too_long)
        except (ValueError, WorkloadError) as error:
            reasons.append((arm.name, error))
        else:
            found.append(arm)
    if not found:
        raise reasons[0][1]
    return found, [f"{name} ({error})" for name, error in reasons]


def results_folder(experiment: ExperimentConfig, command: str) -> Path:
    """Return the results folder: the one that was set, or a new one named after the time.

    Raises:
        ReportError: it exists, or cannot be written.
    """
    out = experiment.out or Path("results") / f"{now():%Y%m%d-%H%M%S}-{command}"
    folder.check_new(out)
    return out


def _simulate_all(
    wanted: list[Run], source: Source, experiment: ExperimentConfig, console: Terminal, interrupt: Interrupt
) -> list[Record]:
    """Simulate every run, several at once on several cores."""
    jobs = num_processes(experiment.jobs, expected_s(len(wanted) * len(source(wanted[0].settings.shape))))
    calls = [(_simulate_one, (run, source, interrupt.flag)) for run in wanted]
    with Display("simulating", "runs", interrupt, console):
        return [run for _, run in in_parallel(calls, jobs, interrupt=interrupt)]


def _simulate_one(run: Run, source: Source, flag: Flag) -> Record:
    workload = source(run.settings.shape)
    return simulate(run, workload, on_progress=flag.progress.of(len(workload)), is_interrupted=flag.is_raised)


def _beside_oracles(
    runs: list[Record],
    arms: list[Arm],
    source: Source,
    experiment: ExperimentConfig,
    console: Terminal,
    interrupt: Interrupt,
) -> list[Record]:
    """Add the fewest workers that would have kept the limits to the runs whose workers changed."""
    if not (
        experiment.oracle and experiment.limits and any(has_changing_fleet(arm.settings.deployment) for arm in arms)
    ):
        return runs
    with Display("finding the fewest workers", "parts", interrupt, console):
        oracles = oracles_of(arms, source, experiment.limits, experiment.jobs, interrupt)
    return [
        replace(run, fleet=structs.replace(run.fleet, oracle=oracles[run.arm]))
        if run.fleet is not None and run.arm in oracles
        else run
        for run in runs
    ]


def _measure_all(
    wanted: list[Run], source: Source, experiment: ExperimentConfig, console: Terminal, interrupt: Interrupt
) -> list[Record]:
    """Measure every run over HTTP, one after the other."""
    from dynabench.live.run import measure
    from dynabench.live.view import LiveView

    runs: list[Record] = []
    key = key_of(list(dict.fromkeys(run.arm.name for run in wanted)))
    for place, run in enumerate(wanted):
        entry = key[run.arm.name]
        title = f"{entry.name} ({place + 1}/{len(wanted)})"
        with contextlib.suppress(InterruptError), interrupt.obeyed():
            workload = source(run.settings.shape)
            with LiveView(console, title, len(workload), entry.dark) as view:
                runs.append(measure(run, workload, view=view, interrupt=interrupt))
        if interrupt.is_asked:
            break
    return runs
