"""Compare the simulator with real engines: the same workload, real and simulated, metric by metric."""

import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dynabench.arm import Arm, Run, Settings, runs_of
from dynabench.deployment.description import Deployment, Pool
from dynabench.experiment.arms import ENDPOINT
from dynabench.experiment.manifest import manifest_of
from dynabench.experiment.own_points import Row
from dynabench.experiment.run import results_folder
from dynabench.experiment.settings import ExperimentConfig
from dynabench.experiment.source import source_of
from dynabench.fidelity.contribution import check_contributable, contributed
from dynabench.fidelity.fitting import OUTLIER, predicted
from dynabench.fidelity.past_runs import read_requests
from dynabench.fidelity.settings import ValidateConfig
from dynabench.fidelity.step_log import LOG, RECORDER, EngineStepLog, read_step_log
from dynabench.terminal import Terminal
from dynabench.virtual.run import simulate
from foundation.errors import UserError
from foundation.text import listed
from mocker.config import EngineVersion, version_of
from mocker.timing.config import TimingConfig, divide
from mocker.timing.files import read_calibration
from reports import fidelity, folder
from reports.fidelity import Fidelity, Runs, Speed
from reports.record.records import Record
from reports.verdicts import headline
from workloads import Workload
from workloads.request import Ends
from workloads.shape import ShapeConfig, shape

ROUTER_UNKNOWN = "the router of the endpoint in {real} is not known and simulated as {mode} (--router-mode)"
REAL, SIMULATED = "{}, real", "{}, simulated"
SAME_PACE = 0.01
"""Allowed relative difference in the time over which the same requests arrive: the clock of a past run is not exact."""


@dataclass(frozen=True)
class Validation:
    """The result of a comparison of real and simulated runs."""

    folder: Path
    """The results folder."""
    fidelity: Fidelity
    notes: list[str]
    """What makes the runs questionable."""
    points: list[Row]
    """Rows to contribute, if that was asked for."""

    @property
    def failures(self) -> list[str]:
        """The thresholds that arms fail."""
        return [f"{arm}: {text}" for arm, found in self.fidelity.arms.items() for text in found.failed]


def run_validation(
    files: tuple[Path, ...],
    config: ValidateConfig,
    experiment: ExperimentConfig,
    settings: Settings,
    console: Terminal,
    *,
    real: Deployment | None,
) -> Validation:
    """Compare real runs, live or past, with simulated ones, and write a results folder.

    Args:
        files: the workload.
        config: a past run, and when to fail.
        experiment: router modes and repeats.
        settings: the simulated deployment, and how the workload is sent.
        console: shows the progress of live runs.
        real: the deployment to measure if no past run is given.

    Raises:
        UserError: neither a past run nor a live engine is given, or the past run cannot be read.
    """
    if config.contribute is not None:
        check_contributable(settings, config.contribute)
    out = results_folder(experiment, "validate")
    logs: dict[str, list[EngineStepLog]] = {}
    if config.real is None:
        workload, measured, logs = _measure(files, experiment, settings, real, console)
        reported = next((log.engine for found in logs.values() for log in found), {})
        settings = like(settings, reported)
        if warning := mode_mismatch(settings):
            console.say(warning)
    else:
        settings = as_calibrated(settings)
        workload, measured = _past(config.real, files, experiment, settings)
        if workload.notes:
            console.say("; ".join(workload.notes))
    compared = {
        mode: _simulated(mode, runs, logs.get(mode), settings, workload, experiment.seed)
        for mode, runs in measured.items()
    }
    found = fidelity.summary(compared, [fidelity.parse(text) for text in config.fail_if])
    every = [run for arm in compared.values() for run in (*arm.real, *arm.simulated)]
    arms = [Arm(run.arm, settings, {}) for run in every if run.repeat == 0]
    named = files or (() if config.real is None else (config.real,))
    manifest = manifest_of("virtual", named, workload, experiment, settings, arms, every)
    manifest |= {"title": f"{workload.name}: simulated against real", "fidelity": msgspec.to_builtins(found)}
    notes = headline.notes(folder.write(out, manifest, every))
    wanted = config.contribute is not None and not notes
    return Validation(out, found, notes, contributed(settings, compared, found.arms) if wanted else [])


def _simulated(
    mode: str, real: list[Record], logs: list[EngineStepLog] | None, settings: Settings, workload: Workload, seed: int
) -> Runs:
    """Simulate the real runs of a router mode, and if the real engine's speed is known, again at that speed."""

    def simulations(settings: Settings) -> list[Record]:
        """Simulate each real run, with answers of the same lengths."""
        same = [as_answered(workload, run) for run in real] or [workload]
        return list(map(simulate, _simulations(mode, settings, len(same), seed), same))

    simulated = simulations(settings)
    if logs is None:
        return Runs(real, simulated)
    (pool,) = settings.deployment.pools
    if (speed := speed_of(logs, pool.timing)) is None:
        return Runs(real, simulated, speed=None)
    faster = _with_pool(settings, replace(pool, timing=at(speed, pool.timing)))
    return Runs(real, simulated, simulations(faster), speed)


def _simulations(mode: str, settings: Settings, count: int, seed: int) -> list[Run]:
    """Return as many simulated runs of a router mode as there are real ones."""
    deployment = replace(settings.deployment, router_mode=mode)
    arm = Arm(SIMULATED.format(mode), replace(settings, deployment=deployment, client=None), {})
    return runs_of([arm], count, seed)


def as_answered(workload: Workload, run: Record) -> Workload:
    """Set the length and end of answers that a model may end itself to those of a run."""
    found, requests = run.requests, list(workload.requests)
    for place in np.flatnonzero((found.osl > 0) & (found.error == "")):
        number = int(found.request[place])
        if requests[number].ends == "stop":
            ends: Ends = "length" if found.finish_reason[place] == "length" else "stop"
            requests[number] = msgspec.structs.replace(requests[number], output_length=int(found.osl[place]), ends=ends)
    return replace(workload, requests=requests)


def as_calibrated(settings: Settings) -> Settings:
    """Give simulated engines the settings of the calibrated engine.

    Raises:
        UserError: the calibration cannot be read.
    """
    (pool,) = settings.deployment.pools
    if pool.timing.calibration is None or pool.engine_type != "vllm":  # a calibration has settings of vLLM
        return settings
    try:
        reported = read_calibration(pool.timing.calibration)["engine"]
    except ValueError as error:
        raise UserError(str(error)) from error
    chosen = {name: getattr(pool.mocker, name) for name in ("num_gpu_blocks", "async_scheduling")}
    return like(settings, reported | {name: value for name, value in chosen.items() if value is not None})


def _version(release: object) -> EngineVersion:
    try:
        return version_of(release)
    except ValueError as error:
        raise UserError(f"the real engine is {error}") from error


def like(settings: Settings, reported: dict[str, Any]) -> Settings:
    """Give simulated engines the settings that a real engine reported."""
    (pool,) = settings.deployment.pools
    if "policy" in reported:
        reported = reported | {"scheduling_policy": reported["policy"]}
    if "version" in reported and pool.engine_type == "vllm" and pool.mocker.engine_version is None:
        reported = reported | {"engine_version": _version(reported["version"])}
    names = {field.name for part in (pool.mocker, pool.timing) for field in fields(part)} - {"model"}
    dials, times = divide({name: value for name, value in reported.items() if name in names and value is not None})
    return _with_pool(
        settings, replace(pool, mocker=replace(pool.mocker, **dials), timing=replace(pool.timing, **times))
    )


def mode_mismatch(settings: Settings) -> str | None:
    """Return a warning if the step times are those of an engine that schedules differently from the simulated one."""
    (pool,) = settings.deployment.pools
    if pool.timing.calibration is None:
        return None
    was_async = read_calibration(pool.timing.calibration)["engine"].get("async_scheduling", pool.mocker.is_async)
    if was_async == pool.mocker.is_async:
        return None
    names = {True: "asynchronously", False: "synchronously"}
    return (
        f"the real and the simulated engine schedule {names[not was_async]}, but the step times are those of "
        f"an engine that schedules {names[was_async]}; calibrate again with the same engine arguments"
    )


def _with_pool(settings: Settings, pool: Pool) -> Settings:
    return replace(settings, deployment=replace(settings.deployment, pools=(pool,)))


def _measure(
    files: tuple[Path, ...],
    experiment: ExperimentConfig,
    settings: Settings,
    real: Deployment | None,
    console: Terminal,
) -> tuple[Workload, dict[str, list[Record]], dict[str, list[EngineStepLog]]]:
    """Run the real engine in every mode; return also the logs of its steps."""
    from dynabench.live.run import measure
    from dynabench.live.view import LiveView

    if real is None:
        raise UserError(
            "validate needs a real engine or run: use --engine vllm with --model, or --real with a past run"
        )
    if is_watched := real.pools[0].engine == "vllm":
        watched = replace(real.pools[0], engine_args={"scheduler-cls": RECORDER})
        real = replace(real, pools=(watched,))
    workload = source_of(files, experiment)(settings.shape)
    logs: dict[str, list[EngineStepLog]] = {mode: [] for mode in experiment.router_mode}
    runs: dict[str, list[Record]] = {mode: [] for mode in experiment.router_mode}
    arms = [
        Arm(REAL.format(mode), replace(settings, deployment=replace(real, router_mode=mode)), {})
        for mode in experiment.router_mode
    ]
    for wanted in runs_of(arms, experiment.repeats, experiment.seed):
        mode, started = wanted.deployment.router_mode, list[float]()
        title = f"{mode} {wanted.repeat + 1}/{experiment.repeats}"
        with _step_logs() as steps, LiveView(console, title, len(workload)) as view:
            run = measure(wanted, workload, view=view, on_start=started.append)
            if not run.is_complete:
                raise KeyboardInterrupt("interrupted before the real runs were complete; nothing was written")
            if is_watched:
                found = [read_step_log(file).between(started[0], math.inf) for file in steps.iterdir()]
                run = _with_preemptions(run, found)
                logs[mode] += found
        runs[mode].append(run)
    return workload, runs, logs


@contextmanager
def _step_logs() -> Iterator[Path]:
    """Provide the folder into which engines started in this block log their steps."""
    with tempfile.TemporaryDirectory(prefix="dynabench-") as folder:
        os.environ[LOG] = f"{folder}/steps"
        try:
            yield Path(folder)
        finally:
            del os.environ[LOG]


def _with_preemptions(run: Record, logs: list[EngineStepLog]) -> Record:
    """Record how often vLLM preempted in total; the log does not say which requests."""
    count = sum(int(log.steps["preempted"].sum()) for log in logs)
    return replace(run, facts={**run.facts, "preemptions": float(count)})


def speed_of(logs: list[EngineStepLog], timing: TimingConfig) -> Speed | None:
    """Return how fast a real engine was in these runs.

    Machines drift, and what slows their memory need not slow their arithmetic. This separates the error due to the
    machine's speed from the error of the model.
    """
    if not logs or timing.calibration is None:
        return None
    costs = read_calibration(timing.calibration)["step"]
    expected = np.concatenate([predicted(costs, log.steps) for log in logs])
    actual = np.concatenate([log.duration_s for log in logs])
    kept = actual < OUTLIER * expected
    has_prefill = np.concatenate([log.steps["prefill_tokens"] for log in logs]) > 0
    kinds = (kept & has_prefill, kept & ~has_prefill)
    return Speed(*(float(expected[kind].sum() / actual[kind].sum()) if kind.any() else 1.0 for kind in kinds))


def at(speed: Speed, timing: TimingConfig) -> TimingConfig:
    """Make a simulated engine equally fast."""
    return replace(
        timing,
        speedup_ratio=timing.speedup_ratio * speed.prefill,
        decode_speedup_ratio=timing.decode_speedup_ratio * speed.decode / speed.prefill,
    )


def _check_alike(real: Path, run: Record, workload: Workload, settings: Settings) -> None:
    """Refuse to compare a past run with simulations of other workers, or of requests that arrive at other times."""
    num_workers = sum(pool.replicas * pool.dp_size for pool in settings.deployment.pools)
    if run.num_workers != num_workers:
        raise UserError(
            f"{real}: {run.arm} had {run.num_workers} workers, but {num_workers} would be simulated; use --workers "
            f"{run.num_workers}, or the options of that run"
        )
    if workload.has_dependencies or settings.load.is_closed or not len(run.requests):
        return  # then answers decide when requests arrive
    came_s = float(np.ptp(run.requests.intended_s))
    come_s = float(np.ptp([workload.requests[number].arrival_s for number in run.requests.request]))
    if abs(came_s - come_s) > SAME_PACE * max(came_s, come_s):
        raise UserError(
            f"{real}: the requests of {run.arm} arrived within {came_s:.4g} s, but those of {workload.name} arrive "
            "within "
            f"{come_s:.4g} s; use the rate or --rate-scale of that run"
        )


def _past(
    real: Path, files: tuple[Path, ...], experiment: ExperimentConfig, settings: Settings
) -> tuple[Workload, dict[str, list[Record]]]:
    if not real.is_dir():
        if files:
            raise UserError(f"request records are their own workload; leave out {' '.join(map(str, files))}")
        workload, run = read_requests(real)
        workload = shape(workload, ShapeConfig(ends=settings.shape.ends))
        return workload, {mode: [replace(run, arm=REAL.format(mode))] for mode in experiment.router_mode}
    _, runs = folder.read(real)
    workload = source_of(files, experiment)(settings.shape)
    found: dict[str, list[Record]] = {}
    unknown = ""
    for run in runs:
        count = int(run.requests.request.max(initial=-1)) + 1
        if count > len(workload) or (count < len(workload) and run.is_complete):
            raise UserError(
                f"{real} has {count} requests, but {workload.name} has {len(workload)}; use the workload and shape "
                "of that "
                f"run"
            )
        _check_alike(real, run, workload, settings)
        modes: tuple[str, ...] = (run.arm.removesuffix(REAL.format("")),)
        if modes == (ENDPOINT,):  # a server of others, which is compared with each mode
            modes = experiment.router_mode
            unknown = ROUTER_UNKNOWN.format(real=real, mode=listed(modes))
        for mode in modes:
            if not mode.endswith(SIMULATED.format("")):
                found.setdefault(mode, []).append(replace(run, arm=REAL.format(mode)))
    return replace(workload, notes=(*workload.notes, *filter(None, [unknown]))), found
