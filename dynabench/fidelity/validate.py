"""Hold the simulator against real engines: the same workload, real and simulated, figure by figure."""

import dataclasses
import functools
import math
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dynabench.errors import UserError
from dynabench.experiment.arms import Arm, Settings
from dynabench.experiment.run import load_workload, manifest_of, results_folder, simulate_arm
from dynabench.experiment.settings import ExperimentConfig, ValidateConfig
from dynabench.fidelity.fitting import OUTLIER, predicted
from dynabench.fidelity.past_runs import read_requests
from dynabench.fidelity.step_log import LOG, RECORDER, StepLog, read_step_log
from dynabench.terminal import Terminal
from mocker import EngineConfig
from mocker.timing.files import read_calibration
from reports import fidelity, folder, tables
from reports.records import Record
from workloads import Workload

REAL, SIMULATED = "{}, real", "{}, simulated"


def validate(
    files: tuple[Path, ...], config: ValidateConfig, experiment: ExperimentConfig, settings: Settings, console: Terminal
) -> tuple[Path, dict[str, Any]]:
    """Compare real runs, live or past, with simulated ones; write a results folder; return it and what was found.

    Raises:
        UserError: neither a past run nor a live engine is given, or the past one cannot be read.
    """
    out = results_folder(experiment, "validate")
    if config.real is None:
        workload, real, logs = _measure(files, experiment, settings, console)
        known = next((log.engine for found in logs.values() for log in found), {})
        settings = dataclasses.replace(settings, engine=like(settings.engine, known))
    else:
        settings = dataclasses.replace(settings, engine=as_calibrated(settings.engine))
        workload, real = _past(config.real, files, experiment, settings)
        logs = {}
    pairs: dict[str, tuple[list[Record], list[Record]]] = {}
    at_speed: dict[str, list[Record]] = {}
    speeds = {mode: speed_of(found, settings.engine) for mode, found in logs.items()}
    runs = []
    for mode, measured in real.items():
        arm = Arm(SIMULATED.format(mode), dataclasses.replace(settings, mode=mode, live=None), {})
        count = max(len(measured), 1)
        simulated = [simulate_arm(arm, repeat, experiment.seed + repeat, workload) for repeat in range(count)]
        pairs[mode] = (measured, simulated)
        if (speed := speeds.get(mode)) is not None:
            fast = dataclasses.replace(arm.settings, engine=at(speed, settings.engine))
            scaled = dataclasses.replace(arm, settings=fast)
            at_speed[mode] = [
                simulate_arm(scaled, repeat, experiment.seed + repeat, workload) for repeat in range(count)
            ]
        runs += [*measured, *simulated]
    found = fidelity.summary(pairs, [fidelity.parse(text) for text in config.fail_if], at_speed)
    for mode, speed in speeds.items():
        found["arms"][mode]["speed"] = None if speed is None else speed._asdict()
    arms = [Arm(run.arm, settings, {}) for run in runs if run.repeat == 0]
    named = files or (() if config.real is None else (config.real,))
    manifest = manifest_of("virtual", named, workload, experiment, settings, arms, runs)
    manifest |= {"title": f"{workload.name}: simulated against real", "fidelity": found}
    found["notes"] = tables.notes(folder.write(out, manifest, runs))
    return out, found


def as_calibrated(engine: EngineConfig) -> EngineConfig:
    """Give a simulated engine the settings that the calibrated one had.

    Raises:
        UserError: the calibration cannot be read.
    """
    if engine.timing_name != "calibrated" or engine.timing_file is None:
        return engine
    try:
        known = read_calibration(engine.timing_file)["engine"]
    except ValueError as error:
        raise UserError(str(error)) from error
    if engine.num_gpu_blocks is not None:
        known = known | {"num_gpu_blocks": engine.num_gpu_blocks}
    return like(engine, known)


def like(engine: EngineConfig, known: dict[str, Any]) -> EngineConfig:
    """Give a simulated engine the settings that a real one told."""
    if "policy" in known:
        known = known | {"scheduling_policy": known["policy"]}
    names = {field.name for field in dataclasses.fields(EngineConfig)} & known.keys() - {"model"}
    return dataclasses.replace(engine, **{name: known[name] for name in names if known[name] is not None})


def _measure(
    files: tuple[Path, ...], experiment: ExperimentConfig, settings: Settings, console: Terminal
) -> tuple[Workload, dict[str, list[Record]], dict[str, list[StepLog]]]:
    """Run the real engine, every mode in turn and back (ABBA); return what it told of its steps, too."""
    from dynabench.live.run import run_live
    from dynabench.live.view import LiveView

    live = settings.live
    if live is None or live.engine == "mocker":
        raise UserError("validate needs something real: --engine vllm with --model, or --real with a past run")
    source = functools.partial(
        load_workload, files, experiment.trace_block_size, seed=experiment.seed, format=experiment.format
    )
    workload = source(config=settings.shape)
    flags = (f"--scheduler-cls={RECORDER}",) if live.engine == "vllm" else ()
    logs: dict[str, list[StepLog]] = {mode: [] for mode in experiment.router_mode}
    real: dict[str, list[Record]] = {mode: [] for mode in experiment.router_mode}
    for repeat in range(experiment.repeats):
        for mode in experiment.router_mode[:: -1 if repeat % 2 else 1]:
            started: list[float] = []
            with (
                tempfile.TemporaryDirectory(prefix="dynabench-") as steps,
                LiveView(console, f"{mode} {repeat + 1}/{experiment.repeats}", len(workload)) as view,
            ):
                os.environ[LOG] = f"{steps}/steps"
                run = run_live(
                    workload,
                    live=live,
                    mode=mode,
                    engine=settings.engine,
                    router=settings.router,
                    num_workers=settings.workers,
                    load=settings.load,
                    seed=experiment.seed + repeat,
                    view=view,
                    engine_flags=flags,
                    on_start=started.append,
                )
                if not run.is_complete:
                    raise KeyboardInterrupt("interrupted before the real runs were whole; nothing was written")
                if flags:
                    told = [read_step_log(file).between(started[0], math.inf) for file in Path(steps).iterdir()]
                    run = _with_preemptions(run, told)
                    logs[mode] += told
            real[mode].append(dataclasses.replace(run, arm=REAL.format(mode), repeat=repeat))
    return workload, real, logs


def _with_preemptions(run: Record, logs: list[StepLog]) -> Record:
    """Note how often vLLM preempted, all requests together: which of them is not known."""
    count = sum(int(log.steps["preempted"].sum()) for log in logs)
    return dataclasses.replace(run, facts={**run.facts, "preemptions": float(count)})


class Speed(NamedTuple):
    """How fast an engine was against its calibration, by the time that the same batches take together."""

    prefill: float
    """Of steps with prefill, which compute."""
    decode: float
    """Of the others, which read memory."""


def speed_of(logs: list[StepLog], engine: EngineConfig) -> Speed | None:
    """Return how fast a real engine was in these runs.

    Machines drift, and what slows their memory need not slow their arithmetic. This tells what of an error is their speed, and
    what is the model.
    """
    if not logs or engine.timing_name != "calibrated" or engine.timing_file is None:
        return None
    costs = read_calibration(engine.timing_file)["step"]
    expected = np.concatenate([predicted(costs, log.steps) for log in logs])
    actual = np.concatenate([log.duration_s for log in logs])
    kept = actual < OUTLIER * expected
    has_prefill = np.concatenate([log.steps["prefill_tokens"] for log in logs]) > 0
    kinds = (kept & has_prefill, kept & ~has_prefill)
    return Speed(*(float(expected[kind].sum() / actual[kind].sum()) if kind.any() else 1.0 for kind in kinds))


def at(speed: Speed, engine: EngineConfig) -> EngineConfig:
    """Make a simulated engine as fast."""
    return dataclasses.replace(
        engine,
        speedup_ratio=engine.speedup_ratio * speed.prefill,
        decode_speedup_ratio=engine.decode_speedup_ratio * speed.decode / speed.prefill,
    )


def _past(
    real: Path, files: tuple[Path, ...], experiment: ExperimentConfig, settings: Settings
) -> tuple[Workload, dict[str, list[Record]]]:
    if not real.is_dir():
        if files:
            raise UserError(f"records of requests are their own workload; leave out {' '.join(map(str, files))}")
        workload, run = read_requests(real)
        mode = settings.mode
        return workload, {mode: [dataclasses.replace(run, arm=REAL.format(mode))]}
    _, runs = folder.read(real)
    workload = load_workload(files, experiment.trace_block_size, settings.shape, experiment.seed, experiment.format)
    found: dict[str, list[Record]] = {}
    for run in runs:
        if int(run.requests.request.max(initial=-1)) >= len(workload):
            raise UserError(
                f"{real} has more requests than {workload.name}; give the workload and shape it was run with"
            )
        mode = run.arm.removesuffix(REAL.format(""))
        if mode.endswith(SIMULATED.format("")):
            continue
        found.setdefault(mode, []).append(dataclasses.replace(run, arm=REAL.format(mode)))
    return workload, found
