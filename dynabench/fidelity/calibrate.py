"""Measure a real engine's step times and the overhead between a client and the engine, and write them to a file.

The engine runs behind our own frontend, as in `dynabench run`, so the overhead is what a client really sees.
"""

import asyncio
import dataclasses
import json
import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.flags import MeasuredFrontendConfig, MeasuredRouterConfig
from dynabench.deployment.processes import check_engines
from dynabench.fidelity.fitting import OUTLIER, Fit, fit_steps, predicted
from dynabench.fidelity.settings import CalibrateConfig
from dynabench.fidelity.step_log import LOG, RECORDER, EngineStepLog, read_step_log
from dynabench.live.bodies import MeasuredServer
from dynabench.live.clients import Order, send_all
from dynabench.live.http_client import clock
from dynabench.live.run import tokens_of_model
from dynabench.live.stack import LocalStack
from dynabench.terminal import Terminal
from foundation.errors import UserError
from foundation.files import new_file
from mocker import EngineConfig
from mocker.timing.calibrated import StepCosts
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig
from mocker.timing.files import SCHEMA
from mocker.vllm.versions import NEWEST
from serving.engines.mock.costs import step_costs_of
from serving.worker.config import ModelRunConfig, WorkerConfig
from workloads import Request, Workload
from workloads.pacing import LoadConfig

ROUNDS = 4
NOISE_LEVELS = 16
LEAST_STEPS = 12
"""With fewer steps, the 95% interval of the median is not worth printing."""


class Probe(NamedTuple):
    """A load that exercises one aspect of the engine."""

    name: str
    concurrency: int
    prompt: tuple[int, int]
    """Shortest and longest prompt (tokens)."""
    output: tuple[int, int]


def probes(max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> list[Probe]:
    """Design loads that cover batch sizes, contexts, chunk sizes and their mixtures, within an engine's limits."""
    longest, most = max_model_len * 3 // 4, max(min(max_model_len // 8, 80), 2)
    long, short = (most * 3 // 4, most), (max(most // 8, 1), most)
    parts = (max_num_seqs // part for part in (8, 4, 2, 1))
    widths = sorted({width for width in (1, 2, 4, *parts) if 1 <= width <= max_num_seqs})
    lengths = sorted({min(length, longest) for length in (16, 64, 256, 1024, max_num_batched_tokens, longest)})
    found = [Probe(f"decode {width}", width, (min(16, longest), min(32, longest)), long) for width in widths]
    found += [Probe(f"decode {width}, long", width, (longest // 2, longest), long) for width in widths[1::2]]
    found += [Probe(f"prefill {length}", 1, (length * 3 // 4, length), (1, 2)) for length in lengths]
    for width, low, high in (
        (max_num_seqs, 8, longest // 4),
        (max_num_seqs // 2 or 1, longest // 8, longest),
        (max_num_seqs, 8, longest),
    ):
        found.append(Probe(f"mixed {width}, {low} to {high}", width, (min(low, high), high), short))
    return found


def run_calibration(model: str, config: CalibrateConfig, console: Terminal) -> dict[str, Any]:
    """Drive an engine through the probes, fit, and write the calibration file; return its contents.

    Raises:
        UserError: the engine cannot be loaded, or the file exists.
    """
    for path in filter(None, (config.out, config.steps)):
        if path.exists():
            raise UserError(f"{path} exists; choose another file, or remove it")
    with tempfile.TemporaryDirectory(prefix="dynabench-") as folder:
        base = Path(folder) / "steps"
        os.environ[LOG] = str(base)
        try:
            sent = asyncio.run(_drive(model, config, base, console))
        finally:
            del os.environ[LOG]
        logs = [read_step_log(path) for path in _log_paths(base)]
        if config.steps is not None:
            shutil.copytree(folder, config.steps)
    fit = fit_steps(logs, config.seed)
    found = calibration(logs[0], fit, overheads(logs, sent), model, config.workers)
    found["noise"] = noise(logs, sent, fit.costs)
    found["batches"] = batches(logs, sent, fit.costs)
    with new_file(config.out) as file:
        file.write((json.dumps(found, indent=1) + "\n").encode())
    return found


class SentProbe(NamedTuple):
    """The client's times of a probe's requests and first tokens, and the probe's start and end."""

    probe: Probe
    start_s: float
    end_s: float
    sent_s: np.ndarray
    first_token_s: np.ndarray


async def _drive(model: str, config: CalibrateConfig, base: Path, console: Terminal) -> list[SentProbe]:
    pool = Pool(
        replicas=config.workers,
        engine="vllm",
        worker=WorkerConfig(model_path=model, kv_events=False),
        run=ModelRunConfig(extra_engine_args=config.extra_engine_args),
        engine_args={"scheduler-cls": RECORDER},
    )
    router, frontend = MeasuredRouterConfig(), MeasuredFrontendConfig(migration_limit=None)
    deployment = Deployment(pools=(pool,), router=router, frontend=frontend)
    check_engines(deployment)
    tokens = await asyncio.to_thread(tokens_of_model, pool)
    stack = LocalStack(deployment)
    async with stack:
        target = MeasuredServer(stack.url, stack.model, is_ours=True, tokens=tokens)
        engine = _settings(_log_paths(base)[0])
        plan = probes(engine["max_num_seqs"], engine["max_num_batched_tokens"], engine["max_model_len"])
        plan = [probe._replace(concurrency=probe.concurrency * config.workers) for probe in plan]
        longest = max(probe.prompt[1] for probe in plan)
        warm_up = Probe("warm-up", 2 * config.workers, (1, longest), (1, 8))
        await _send(warm_up, target, 16 * config.workers, config.seed)
        each = config.duration_s / len(plan) / ROUNDS
        sent: list[SentProbe] = []
        for turn in range(ROUNDS):  # repeat each probe, so that drift of the machine favours none
            for number, probe in enumerate(plan):
                console.say(f"{turn * len(plan) + number + 1}/{ROUNDS * len(plan)} {probe.name}")
                count = probe.concurrency + 1
                if turn:
                    before = sent[number]
                    rate = len(before.sent_s) / (before.end_s - before.start_s)
                    count = max(int(rate * each), count)
                sent.append(await _send(probe, target, count, config.seed + turn * 1000 + number))
        return sent


async def _send(probe: Probe, target: MeasuredServer, count: int, seed: int) -> SentProbe:
    rng = random.Random(seed)
    ids = range(seed << 20, (seed << 20) + count)
    requests = [Request(0.0, rng.randint(*probe.prompt), rng.randint(*probe.output), (id,)) for id in ids]
    workload = Workload(probe.name, probe.prompt[1], requests)  # a block is a whole prompt, so none is shared
    start = clock() + 0.1
    order = Order(workload, target, LoadConfig(concurrency=probe.concurrency), "", 600.0)
    answer = await send_all(order, num_clients=1, stop=asyncio.Event(), start=start)
    if errors := [error for error in answer.requests.error if error]:
        raise UserError(f"calibrating with {probe.name}: {errors[0]}")
    return SentProbe(probe, start, clock(), answer.requests.sent_s.data, answer.requests.first_token_s.data)


def overheads(logs: list[EngineStepLog], sent: list[SentProbe]) -> dict[str, float]:
    """Return the overhead of a request outside the engine: before its queue, per prompt token, and after.

    Client and engine read the same clock. Requests are matched in order; medians limit the effect of wrong matches.
    Between vLLM's front end and its scheduler, only requests that arrive one at a time count: otherwise the scheduler
    accepts them between two steps, and that wait belongs to the engine. The same requests show the additional cost of
    longer prompts. Requests that a probe sends at once at its start wait for each other; `spacing` measures that.
    """
    rows = []
    for one in sent:
        parts = [log.between(one.start_s, one.end_s).firsts for log in logs]
        firsts = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        if len(firsts["added_s"]) != len(one.sent_s):
            continue
        is_alone = one.probe.concurrency <= len(logs)
        later = slice(0 if is_alone or one.probe.concurrency >= len(one.sent_s) else one.probe.concurrency, None)
        to_front = (np.sort(firsts["arrived_s"]) - np.sort(one.sent_s + one.start_s))[later]
        to_queue = np.sort(firsts["added_s"]) - np.sort(firsts["arrived_s"])
        back = np.sort(one.first_token_s + one.start_s) - np.sort(firsts["first_token_s"])
        length = float(firsts["prompt_tokens"].mean())
        rows.append((len(to_front), is_alone, length, *(float(np.median(part)) for part in (to_front, to_queue, back))))
    count, alone, length, to_front, to_queue, back = np.array(rows, float).T
    weight, alone = np.sqrt(count), alone > 0
    before = to_front + to_queue
    slope = max(float(np.polyfit(length[alone], before[alone], 1, w=weight[alone])[0]), 0.0)
    request = np.average(to_front - slope * length, weights=count) + np.average(to_queue[alone], weights=count[alone])
    return {
        "request_ms": round(max(float(request), 0.0) * 1e3, 4),
        "prompt_token_us": round(slope * 1e6, 4),
        "spacing_ms": round(spacing(logs, sent) * 1e3, 4),
        "answer_ms": round(max(float(np.average(back, weights=count)), 0.0) * 1e3, 4),
    }


def spacing(logs: list[EngineStepLog], sent: list[SentProbe]) -> float:
    """Return the time between arrivals at vLLM's front end of requests sent at once: the median over the probes (s)."""
    found = []
    for one in sent:
        arrived = np.sort(np.concatenate([log.between(one.start_s, one.end_s).firsts["arrived_s"] for log in logs]))
        together = one.probe.concurrency
        if together > len(logs) and len(arrived) >= together:
            found.append((arrived[together - 1] - arrived[0]) / (together - 1))
    return float(np.median(found)) if found else 0.0


def noise(logs: list[EngineStepLog], sent: list[SentProbe], costs: StepCosts) -> list[float]:
    """Return equally likely factors with mean 1 by which a step's time differs from similar steps at that time.

    Similar steps are those of one run of a probe, with or without prefill. So neither the model's error nor drift is
    counted.
    """
    found = []
    for one in sent:
        for part in (log.between(one.start_s, one.end_s) for log in logs):
            expected, took = predicted(costs, part.steps), part.duration_s
            usual = (took > 0) & (took < OUTLIER * expected)
            for of_kind in (part.steps["prefill_tokens"] > 0, part.steps["prefill_tokens"] == 0):
                kept = usual & of_kind
                if kept.sum() >= LEAST_STEPS:
                    found.append(took[kept] / expected[kept] * (expected[kept].sum() / took[kept].sum()))
    if not found:
        return []
    levels = np.quantile(np.concatenate(found), (np.arange(NOISE_LEVELS) + 0.5) / NOISE_LEVELS)
    return [round(float(level), 4) for level in levels / levels.mean()]


def batches(logs: list[EngineStepLog], sent: list[SentProbe], costs: StepCosts) -> list[dict[str, Any]]:
    """Return the measured and fitted median of each probe's steps, with and without prefill, and a 95% interval."""
    found = []
    for name in dict.fromkeys(one.probe.name for one in sent):
        parts = [log.between(one.start_s, one.end_s) for one in sent if one.probe.name == name for log in logs]
        duration = np.concatenate([part.duration_s for part in parts if len(part.steps["ended_s"])])
        steps = {key: np.concatenate([part.steps[key] for part in parts]) for key in parts[0].steps}
        fitted = predicted(costs, steps)
        for kind, chosen in (("prefill", steps["prefill_tokens"] > 0), ("decode", steps["prefill_tokens"] == 0)):
            count = int(chosen.sum())
            if count < LEAST_STEPS:
                continue
            reach = 0.98 / np.sqrt(count)
            low, middle, high = np.quantile(duration[chosen], [max(0.5 - reach, 0), 0.5, min(0.5 + reach, 1)]) * 1e3
            row = {"probe": name, "steps": f"{kind}: {count}", "median_ms": middle, "low_ms": low, "high_ms": high}
            row["fitted_median_ms"] = np.median(fitted[chosen]) * 1e3
            found.append({key: round(float(value), 4) if key.endswith("ms") else value for key, value in row.items()})
    return found


def calibration(log: EngineStepLog, fit: Fit, measured: dict[str, float], model: str, workers: int) -> dict[str, Any]:
    """Return the contents of a calibration file."""
    engine = {"name": "vllm"} | {name: value for name, value in log.engine.items() if name not in ("model", "device")}
    return {
        "schema": SCHEMA,
        "engine": engine,
        "model": Path(model).name,
        "hardware": log.engine["device"] or "cpu",
        "cores": os.cpu_count(),
        "workers": workers,
        "step": dataclasses.asdict(fit.costs),
        "overhead": measured,
        "held_out_percent": fit.held_out,
    }


def described(found: dict[str, Any], out: Path) -> list[str]:
    """Describe in a few lines the results of a calibration, and how to use them."""
    engine, error, overhead = found["engine"], found["held_out_percent"], found["overhead"]
    flags = " ".join(
        f"--{name.replace('_', '-')} {engine[name]}"
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len")
    )
    mode = "asynchronous" if engine["async_scheduling"] else "synchronous"
    return [
        f"{engine['name']} {engine['version']}, {mode} scheduling, {found['model']} on {found['hardware']}: "
        f"{error['steps']:.0f} steps",
        f"held-out error of a step: median {error['median']}%, mean {error['mean']}%; total time of all steps "
        f"{error['total']:+}%",
        f"outside the engine: {overhead['request_ms']} ms and {overhead['prompt_token_us']} us per prompt token "
        "before, "
        f"{overhead['answer_ms']} ms after; simultaneous requests reach the engine {overhead['spacing_ms']} ms apart",
        f"use it: dynabench simulate --timing-file {out} {flags}",
        f"for a router that predicts times (marginal-all and others): {router_flags(found, out)}",
    ]


def router_flags(found: dict[str, Any], out: Path) -> str:
    """Return the costs of the engine's steps as flags of a router."""
    names = ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_gpu_blocks")
    settings = {name: found["engine"][name] for name in names if found["engine"].get(name)}
    engine = EngineConfig(**settings, engine_version=NEWEST)  # costs of steps do not depend on it
    return step_costs_of(resolve(engine, TimingConfig(timing_file=str(out)))).flags


def _log_paths(base: Path) -> list[Path]:
    """Read the logs of the engine processes."""
    found = sorted(base.parent.glob(f"{base.name}.*"))
    if not found:
        raise UserError("no engine logged its steps; does its vLLM have --scheduler-cls (version 0.11 or later)?")
    return found


def _settings(path: Path) -> dict[str, Any]:
    with path.open() as lines:
        kind, row = json.loads(lines.readline())
    assert kind == "engine"
    settings: dict[str, Any] = row
    return settings
