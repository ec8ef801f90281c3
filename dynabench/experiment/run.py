"""An experiment: a workload, arms that differ in settings, repeats, a results folder."""

import contextlib
import datetime
import functools
import platform
import shlex
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dynabench.errors import UserError
from dynabench.experiment.arms import Arm, Settings, arms_of
from dynabench.experiment.bounds import pool_bound, ttft_bound
from dynabench.experiment.parallel import in_parallel
from dynabench.experiment.settings import ExperimentConfig, LiveConfig
from dynabench.experiment.workload_file import read_workload
from dynabench.interrupt import Flag, Interrupt, InterruptError
from dynabench.terminal import Terminal
from dynabench.virtual.run import simulate
from mocker import scheduler
from reports.records import Record
from reports.summary import Summary
from serving.model.card import model_name
from serving.runtime.config import masked
from serving.worker.config import read_arguments
from serving.worker.engine import ENGINES
from workloads import Workload
from workloads.shape import ShapeConfig, shape

SERVERS = ("--url", "--etcd-endpoints", "--nats-server")
"""Flags whose values may hold passwords."""

SEEDS_APART = 1_000_003
"""Between an arm and its twin that tells the noise floor."""


@functools.lru_cache(maxsize=4)
def load_workload(
    files: tuple[Path, ...], trace_block_size: int | None, config: ShapeConfig, seed: int, format: str | None = None
) -> Workload:
    """Read a workload (none: the bundled one) and reshape it.

    Raises:
        WorkloadError: it cannot be read, or nothing is left of it.
    """
    return shape(read_workload(files, format=format, block_size=trace_block_size), config, seed=seed)


def run_experiment(
    clock: Literal["virtual", "wall"],
    files: tuple[Path, ...],
    experiment: ExperimentConfig,
    settings: Settings,
    *,
    console: Terminal,
) -> tuple[Path, Summary]:
    """Run all arms and write the results folder; return it and the summary.

    Arms alternate in direction from repeat to repeat (ABBA), so that drift favours none.

    Raises:
        WorkloadError: the workload cannot be used.
        ValueError: an axis is not understood.
        KeyboardInterrupt: the user asked to end before anything was measured, or asked twice.
    """
    from reports import folder

    if settings.live is not None and settings.live.engine != "mocker" and settings.engine.timing_name != "polynomial":
        raise UserError(
            f"--gpu, --timing and --timing-file are for simulated engines, not for --engine {settings.live.engine}"
        )
    if settings.live is not None and settings.live.url is not None:
        _check_reachable(settings.live.url)
        experiment = replace(experiment, router_mode=experiment.router_mode[:1])  # the endpoint routes by itself
    arms = arms_of(experiment, settings)
    out = results_folder(experiment, "simulate" if clock == "virtual" else "run")
    source = functools.partial(
        load_workload, files, experiment.trace_block_size, seed=experiment.seed, format=experiment.format
    )
    workload = source(config=arms[0].settings.shape)
    plan = _plan(arms, experiment)
    with Interrupt() as interrupt:
        runs = (_simulate_all if clock == "virtual" else _measure_all)(plan, source, experiment, console, interrupt)
        runs = [run for run in runs if len(run.requests)]
        if not runs:
            raise KeyboardInterrupt("interrupted before any request was answered; nothing was written")
        order = {arm.name: place for place, arm in enumerate(arms)}
        runs.sort(key=lambda run: (order[run.arm], run.repeat))
        bound = None
        if clock == "virtual" and _is_open(arms):
            engine, workers = arms[0].settings.engine, arms[0].settings.workers
            bound = max(ttft_bound(workload, engine), pool_bound(workload, engine, workers))
        manifest = manifest_of(clock, files, workload, experiment, settings, arms, runs) | {"bound_s": bound}
        return out, folder.write(out, manifest, runs)


def results_folder(experiment: ExperimentConfig, command: str) -> Path:
    """Return where to write: as given, or a new folder named by the time.

    Raises:
        ReportError: it exists, or cannot be written.
    """
    from reports import folder

    out = experiment.out or Path("results") / f"{_now():%Y%m%d-%H%M%S}-{command}"
    folder.check_new(out)
    return out


def _plan(arms: list[Arm], experiment: ExperimentConfig) -> list[tuple[Arm, int, int]]:
    """Return each run as (arm, repeat, seed), in the order in which they are carried out."""
    return [
        (arm, repeat, experiment.seed + repeat + SEEDS_APART * arm.is_repeated)
        for repeat in range(experiment.repeats)
        for arm in (arms if repeat % 2 == 0 else arms[::-1])
    ]


def _is_open(arms: list[Arm]) -> bool:
    """Tell whether all arms see the same arrivals on the same engines, so that one bound is for all."""
    return (
        not any(arm.settings.load.is_closed for arm in arms)
        and len({(a.settings.shape, a.settings.engine, a.settings.workers) for a in arms}) == 1
    )


def _simulate_all(
    plan: list[tuple[Arm, int, int]],
    source: Callable[..., Workload],
    experiment: ExperimentConfig,
    console: Terminal,
    interrupt: Interrupt,
) -> list[Record]:
    """Simulate every run, several at once on several cores."""
    runs: list[Record] = []
    if len(plan) == 1 or experiment.jobs == 1:
        for place, (arm, repeat, seed) in enumerate(plan):
            if interrupt.is_asked:
                break
            with progress_bar(console) as progress:
                workload = source(config=arm.settings.shape)
                bar = progress.add_task(f"{arm.name} ({place + 1}/{len(plan)})", total=len(workload))
                on_progress = _throttled(progress, bar, len(workload)) if console.is_terminal else None
                runs.append(simulate_arm(arm, repeat, seed, workload, on_progress, lambda: interrupt.is_asked))
    else:
        calls = [(_simulate_one, (arm, repeat, seed, source, interrupt.flag)) for arm, repeat, seed in plan]
        with progress_bar(console, "runs") as progress:
            bar = progress.add_task("simulating", total=len(plan))
            for _, run in in_parallel(calls, experiment.jobs, interrupt=interrupt):
                runs.append(run)
                progress.update(bar, advance=1)
    return _marked(runs, plan)


def _marked(runs: list[Record], plan: list[tuple[Arm, int, int]]) -> list[Record]:
    """Mark runs as incomplete where others of the plan were not begun."""
    return [replace(run, is_complete=run.is_complete and len(runs) == len(plan)) for run in runs]


def _simulate_one(arm: Arm, repeat: int, seed: int, source: Callable[..., Workload], flag: Flag) -> Record:
    return simulate_arm(arm, repeat, seed, source(config=arm.settings.shape), is_interrupted=flag.is_raised)


def simulate_arm(
    arm: Arm,
    repeat: int,
    seed: int,
    workload: Workload,
    on_progress: Callable[[int], None] | None = None,
    is_interrupted: Callable[[], bool] = bool,
) -> Record:
    """Simulate one run."""
    settings = arm.settings
    run = simulate(
        workload,
        mode=settings.mode,
        engine=settings.engine,
        router=settings.router,
        num_workers=settings.workers,
        load=settings.load,
        overhead=settings.overhead,
        seed=seed,
        on_progress=on_progress,
        is_interrupted=is_interrupted,
    )
    return replace(run, arm=arm.name, repeat=repeat)


def _measure_all(
    plan: list[tuple[Arm, int, int]],
    source: Callable[..., Workload],
    experiment: ExperimentConfig,
    console: Terminal,
    interrupt: Interrupt,
) -> list[Record]:
    """Measure every run over HTTP, one after the other."""
    from dynabench.live.run import run_live
    from dynabench.live.view import LiveView

    runs: list[Record] = []
    for place, (arm, repeat, seed) in enumerate(plan):
        settings = arm.settings
        assert settings.live is not None
        workload = source(config=settings.shape)
        with (
            contextlib.suppress(InterruptError),
            LiveView(console, f"{arm.name} ({place + 1}/{len(plan)})", len(workload)) as view,
        ):
            run = run_live(
                workload,
                live=settings.live,
                mode=settings.mode,
                engine=settings.engine,
                router=settings.router,
                num_workers=settings.workers,
                load=settings.load,
                seed=seed,
                view=view,
                interrupt=interrupt,
            )
            runs.append(replace(run, arm=arm.name, repeat=repeat))
        if interrupt.is_asked:
            break
    return _marked(runs, plan)


def manifest_of(
    clock: str,
    files: tuple[Path, ...],
    workload: Workload,
    experiment: ExperimentConfig,
    settings: Settings,
    arms: list[Arm],
    runs: list[Record],
) -> dict[str, Any]:
    """Return what is needed to run it again, and to understand it."""
    from reports import folder

    live = settings.live
    return {
        "schema": folder.SCHEMA,
        "title": f"{workload.name}: {_versus([arm.name for arm in arms])}",
        "subtitle": _subtitle(clock, workload, experiment, settings),
        "command": _command(),
        "clock": clock,
        "created": _now().isoformat(timespec="seconds"),
        "workload": {
            "file": " ".join(map(str, files)) or "bundled",
            "name": workload.name,
            "requests": len(workload),
            "notes": list(workload.notes),
        },
        "experiment": asdict(experiment) | {"out": str(experiment.out) if experiment.out else None},
        "arms": {arm.name: arm.plain_changes for arm in arms},
        "limits": [str(limit) for limit in experiment.limits],
        "workers": {arm.name: arm.settings.workers for arm in arms},
        "shape": asdict(settings.shape),
        "load": asdict(settings.load),
        "overhead": asdict(settings.overhead),
        "engine": asdict(settings.engine)
        if live is None or live.engine == "mocker"
        else real_engine(live, settings.engine.model or ""),
        "router": asdict(settings.router),
        "live": _live_facts(live) if live else None,
        "versions": {name: metadata.version(name) for name in ("dynabench", "numpy", "simpy", "aiohttp", "fastapi")}
        | {"python": platform.python_version(), "cores": "compiled" if is_compiled() else "interpreted"},
        "runs": [folder.run_facts(run) for run in runs],
    }


def _check_reachable(url: str) -> None:
    """Refuse an endpoint where nothing listens, before a whole workload is sent to it.

    Raises:
        UserError: so it is.
    """
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), timeout=10).close()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"nothing answers at {masked(url)} ({why})") from error


def _command() -> str:
    """Return the command line without the passwords in it."""
    words = []
    for before, word in pairwise(sys.argv):
        flag, _, value = word.partition("=")
        if flag in SERVERS:
            words.append(f"{flag}={masked(value)}" if value else flag)
        else:
            words.append(masked(word) if before in SERVERS or "://" in word else word)
    return shlex.join(["dynabench", *words])


def _live_facts(live: LiveConfig) -> dict[str, Any]:
    """Return the settings of a live run without passwords: results are passed on."""
    facts = asdict(live) | {"extra_engine_args": str(live.extra_engine_args or "") or None}
    return facts | {name: masked(facts[name]) for name in ("url", "etcd_endpoints", "nats_server") if facts[name]}


def sweep_manifest(
    files: tuple[Path, ...], experiment: ExperimentConfig, settings: Settings, arms: list[Arm]
) -> dict[str, Any]:
    """Return what is needed to run a sweep again, and to understand it."""
    workload = load_workload(
        files, experiment.trace_block_size, arms[0].settings.shape, experiment.seed, experiment.format
    )
    return manifest_of("virtual", files, workload, experiment, settings, arms, [])


def is_compiled() -> bool:
    """Tell whether the engine core was compiled (DYNABENCH_COMPILE=1 when it was installed)."""
    return not str(scheduler.__file__).endswith(".py")


def real_engine(live: LiveConfig, model: str) -> dict[str, Any]:
    """Return what tells of an engine that is not simulated: its name, its version here, its model, its arguments."""
    package = ENGINES[live.engine].package
    distributions = metadata.packages_distributions().get(package, [])
    version = metadata.version(distributions[0]) if distributions else "of unknown version"
    arguments = {} if live.extra_engine_args is None else read_arguments(live.extra_engine_args)
    return {"name": live.engine, "version": version, "model": model_name(model), "arguments": arguments}


def _versus(names: list[str]) -> str:
    return " vs ".join(names) if len(names) <= 4 else f"{len(names)} arms"


def progress_bar(console: Terminal, unit: str = "requests") -> Progress:
    """Return a bar that shows on a terminal only."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.completed:,}/{task.total:,} " + unit, markup=False),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _throttled(progress: Progress, bar: Any, total: int) -> Callable[[int], None]:
    stride = max(total // 200, 1)

    def on_progress(done: int) -> None:
        if done % stride == 0 or done >= total:
            progress.update(bar, completed=done)

    return on_progress


def _subtitle(clock: str, workload: Workload, experiment: ExperimentConfig, settings: Settings) -> str:
    live = settings.live
    how = "in virtual time" if clock == "virtual" else "over HTTP on the wall clock"
    notes = f"; {'; '.join(workload.notes)}" if workload.notes else ""
    if live is not None and live.url:
        what = masked(live.url)
    elif live is not None and live.engine != "mocker":
        facts = real_engine(live, settings.engine.model or "")
        what = f"{experiment.workers} {facts['name']} {facts['version']} workers with {facts['model']}"
    else:
        what = f"{experiment.workers} simulated engines"
    load = settings.load
    closed = ""
    if load.concurrency or load.session_concurrency:
        kind = f"{load.concurrency} requests" if load.concurrency else f"{load.session_concurrency} sessions"
        closed = f", {kind} at a time"
    return (
        f"{len(workload):,} requests on {what}{closed}, {how}; "
        f"{experiment.repeats} run(s) per arm, seed {experiment.seed}{notes}"
    )


def _now() -> datetime.datetime:
    return datetime.datetime.now().astimezone()
