"""Fit a step-time model to what clients measured at several loads: no access to the engine is needed.

    a load's requests --simulate with a model--> TTFT by prompt length, TPOT --compare--> the measured ones
                             ^-------------- a better model --------------------------------'

A client does not see steps. What it sees at one load is what few coefficients make of it, so only these are fitted: the
time of a step, of each sequence in it, of each prompt token and of each pair of them (attention), and the time of a request
outside the engine. The context's share of a sequence's time stays in that of the sequence, so it is that of the contexts seen.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dynabench.arm import Run, Settings
from dynabench.deployment.description import Deployment, Pool
from dynabench.fidelity.least_squares import fit
from dynabench.fidelity.measured_loads import MeasuredLoad, read_loads
from dynabench.terminal import Terminal
from dynabench.virtual.run import simulate
from foundation.errors import UserError
from foundation.files import new_file
from foundation.text import listed
from mocker import EngineConfig
from mocker.timing.calibrated import StepCosts
from mocker.timing.config import TimingConfig
from mocker.timing.files import SCHEMA
from reports.figures.metrics import of_each, share
from reports.record.records import Floats, Record

Rows = npt.NDArray[np.intp]
LEAST_LOADS = 2
THIRDS = 3
LEAST_EACH = 8
"""Fewest requests of a group of prompt lengths; with fewer, all prompts are one group."""
UNITS = ("step", "sequence", "prompt token", "pair of tokens", "request outside the engine")
HITS_OFF = 0.05
"""Hit shares that differ by more are of caches that differ."""
DISTINCT = 1.2
"""Two loads whose requests in flight differ by less than this factor are one load."""
MOST_NAMED = 3
"""The most folders of a server that an error names."""
TOLD = ("num_gpu_blocks", "async_scheduling")
"""Settings of the engine that a simulation takes from the file."""
AS_FLAGS = (
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "enable_prefix_caching",
    "long_prefill_token_threshold",
    "scheduling_policy",
)
"""Those that it is given."""


@dataclass(frozen=True, slots=True)
class LoadErrors:
    """How far the mean figures of one load are off, as shares of the measured ones."""

    name: str
    ttft: float
    tpot: float | None
    """None if no answer has two tokens."""
    hit_share: float | None = None
    """The share of prompt tokens that the simulation found in its prefix cache."""


class Fitting:
    """Simulates loads with candidate models."""

    def __init__(self, loads: Sequence[MeasuredLoad], engine: EngineConfig, workers: int, folder: Path) -> None:
        self.loads = loads
        self._pool = Pool(replicas=workers, mocker=engine)
        self._folder = Path(tempfile.mkdtemp(dir=folder))
        self._count = 0
        self._groups = [_groups(load) for load in loads]

    def residuals(self, values: Floats) -> Floats:
        """Return how far the figures of all loads are off with these coefficients, relative to the measured ones."""
        runs = self.simulated(values)
        parts = [_compared(load, run, groups) for load, run, groups in zip(self.loads, runs, self._groups, strict=True)]
        return np.concatenate(parts)

    def errors(self, values: Floats) -> list[LoadErrors]:
        """Return how far the mean TTFT and TPOT of each load are off with these coefficients."""
        return [_errors(load, run) for load, run in zip(self.loads, self.simulated(values), strict=True)]

    def simulated(self, values: Floats) -> list[Record]:
        """Simulate every load with these coefficients."""
        # Each model has a path of its own, because what is read from one is kept.
        file = self._folder / f"{self._count}.json"
        self._count += 1
        file.write_text(json.dumps(contents(values, self._pool.mocker, self._pool.replicas)))
        pool = replace(self._pool, timing=TimingConfig(timing_file=str(file)))
        deployment = Deployment(pools=(pool,))
        found = [simulate(Run.alone(Settings(deployment, load=load.load)), load.workload) for load in self.loads]
        file.unlink()
        return found


def fit_runs(
    folders: tuple[Path, ...], engine: EngineConfig, workers: int, out: Path, console: Terminal
) -> dict[str, Any]:
    """Fit step times to live runs at two or more loads, and write the calibration file; return its contents.

    Args:
        folders: results folders of live runs of one server.
        engine: the server's scheduler settings, as far as known.
        workers: its engines.
        out: the file to write.
        console: shows the progress.

    Raises:
        UserError: there are too few loads, they are of several servers or models, a folder cannot be used, or the file exists.
    """
    if out.exists():
        raise UserError(f"{out} exists; choose another file, or remove it")
    loads = read_loads(folders)
    _check_one_server(loads)
    levels = _levels(loads)
    _check_levels(levels)
    with tempfile.TemporaryDirectory(prefix="dynabench-") as folder:

        def fitted(chosen: Sequence[MeasuredLoad]) -> tuple[Fitting, Floats]:
            fitting = Fitting(chosen, engine, workers, Path(folder))
            return fitting, fit(fitting.residuals, _start(chosen))

        console.say(f"fitting {len(UNITS)} coefficients to {listed([load.name for load in loads])}")
        fitting, values = fitted(loads)
        errors = fitting.errors(values)
        held_out = []
        for level in levels[1:-1]:  # those at the ends would be extrapolated to
            console.say(f"held out: {listed([load.name for load in level])}")
            _, without = fitted([load for load in loads if load not in level])
            held_out += Fitting(level, engine, workers, Path(folder)).errors(without)
    found = contents(values, engine, workers) | {
        "model": loads[0].model,
        "fitted_to": f"what a client saw of {loads[0].server or 'a server'}",
        "covers": [_covered(load, error) for load, error in zip(loads, errors, strict=True)],
        "held_out_percent": _mean_errors(held_out),
    }
    with new_file(out) as file:
        file.write((json.dumps(found, indent=1) + "\n").encode())
    return found


def contents(values: Floats, engine: EngineConfig, workers: int) -> dict[str, Any]:
    """Return what a calibration file has of these coefficients."""
    step, sequence, token, pair, request = (float(f"{value:.6g}") for value in values)
    costs = StepCosts(
        fixed=step,
        mixed=step,
        tokens=((0.0, token),),
        sequence=sequence,
        prompt=0.0,
        pair=pair,
        context=0.0,
        kv=0.0,
        mixed_kv=0.0,
    )
    known = {name: value for name in (*TOLD, *AS_FLAGS) if (value := getattr(engine, name)) is not None}
    if engine.engine_version is not None:
        known["version"] = engine.engine_version
    return {
        "schema": SCHEMA,
        "engine": {"name": "vllm"} | known,
        "hardware": "a server of others",
        "workers": workers,
        "step": asdict(costs),
        "overhead": {"request_ms": request * 1e3, "prompt_token_us": 0.0, "spacing_ms": 0.0, "answer_ms": 0.0},
        "noise": [],  # of single steps, which a client does not see
    }


def described(found: dict[str, Any], out: Path) -> list[str]:
    """Describe in a few lines what was fitted, which loads it covers, and how to use it."""
    lines = [f"fitted to {found['fitted_to']}; errors of the simulated mean TTFT and TPOT:"]
    for load in found["covers"]:
        tpot = "n/a" if load["tpot_error_percent"] is None else f"{load['tpot_error_percent']:+.1f}%"
        lines.append(
            f"  {load['load']}: {load['in_flight']:.1f} in flight, prompts of {load['isl'][0]:,} to {load['isl'][1]:,} tokens: "
            f"TTFT {load['ttft_error_percent']:+.1f}%, TPOT {tpot}"
        )
    held, (first, *_, last) = found["held_out_percent"], found["covers"]
    lines.append(
        f"held out, each load between two others predicted from them: TTFT {held['ttft']:.1f}%, TPOT {held['tpot']:.1f}% off on average"
        if held
        else "no load was held out: measure a third between the two for the error at other loads"
    )
    lines.append(
        f"it covers {first['in_flight']:.1f} to {last['in_flight']:.1f} requests in flight; beyond them it extrapolates"
    )
    lines += _doubts(found["covers"])
    flags = "".join(f" {flag}" for flag in _flags(found["engine"]))
    return [*lines, f"use it: dynabench simulate --timing-file {out} --workers {found['workers']}{flags}"]


def _doubts(loads: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield what makes the fit doubtful, although its errors may be small."""
    for load in loads:
        real, simulated = load["hit_share"], load["simulated_hit_share"]
        if real is not None and simulated is not None and abs(real - simulated) > HITS_OFF:
            yield (
                f"{load['load']}: the server found {real:.0%} of the prompt tokens in its cache, the simulation {simulated:.0%}: do "
                "--enable-prefix-caching, --block-size and --num-gpu-blocks fit the server?"
            )


def _flags(engine: dict[str, Any]) -> Iterator[str]:
    """Yield the flags of settings of the engine that are not the defaults."""
    for name in AS_FLAGS:
        value, flag = engine.get(name), name.replace("_", "-")
        if value == getattr(EngineConfig(), name):
            continue
        yield f"--{flag} {value}" if not isinstance(value, bool) else f"--{'' if value else 'no-'}{flag}"


def _levels(loads: Sequence[MeasuredLoad]) -> list[list[MeasuredLoad]]:
    """Put runs at about the same load together; the loads are in order."""
    found: list[list[MeasuredLoad]] = []
    for load in loads:
        if found and load.in_system < DISTINCT * found[-1][0].in_system:
            found[-1].append(load)
        else:
            found.append([load])
    return found


def _check_one_server(loads: Sequence[MeasuredLoad]) -> None:
    for what, unnamed in (("server", "our own stack"), ("model", "no name")):
        places: dict[str, list[str]] = {}
        for load in loads:
            places.setdefault(getattr(load, what) or unnamed, []).append(str(load.folder))
        if len(places) > 1:
            found = [f"{one} ({_few(list(dict.fromkeys(folders)))})" for one, folders in places.items()]
            raise UserError(
                f"--from names runs of {len(places)} {what}s, and step times are those of one: {listed(found)}; "
                f"give --from only folders of the same {what}"
            )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST_NAMED]) + f" and {len(names) - MOST_NAMED:,} more" * (len(names) > MOST_NAMED)


def _check_levels(levels: Sequence[Sequence[MeasuredLoad]]) -> None:
    if len(levels) >= LEAST_LOADS:
        return
    seen = listed([f"{load.name} ({load.in_system:.1f} in flight)" for level in levels for load in level])
    raise UserError(
        f"--from names runs at one load only: {seen}; expected loads that differ, such as --concurrency 1 and 8"
    )


def _start(loads: Sequence[MeasuredLoad]) -> Floats:
    """Guess the coefficients: steps and sequences from TPOT at the lowest and highest load, the others from TTFT at the lowest."""
    low, high = loads[0], loads[-1]
    tpot = [float(np.nanmean(load.tpot_s)) if not np.isnan(load.tpot_s).all() else 0.0 for load in (low, high)]
    known = ~np.isnan(low.ttft_s)
    mean_s, isl = float(low.ttft_s[known].mean()), float(low.isl[known].mean())
    step = max(tpot[0], mean_s / 10, 1e-6)
    sequence = max((tpot[1] - tpot[0]) / max(high.in_system - low.in_system, 1.0), step / 100)
    token = max(mean_s - step, mean_s / 10) / max(isl, 1.0)
    return np.array([step, sequence, token, token / max(isl, 1.0) / 10, mean_s / 20])


def _groups(load: MeasuredLoad) -> list[Rows]:
    """Divide the requests with a TTFT by the length of their prompts, into thirds if there are enough."""
    known = np.flatnonzero(~np.isnan(load.ttft_s))
    known = known[np.argsort(load.isl[known], kind="stable")]
    return np.array_split(known, THIRDS) if len(known) >= THIRDS * LEAST_EACH else [known]


def _compared(load: MeasuredLoad, run: Record, groups: Sequence[Rows]) -> Floats:
    """Return the relative differences of a simulated run: of the mean TTFT of each group, and of the mean TPOT."""
    ttft, tpot = (_by_number(load, run, name) for name in ("ttft", "tpot"))
    found = [_off(ttft[group], load.ttft_s[group]) for group in groups]
    weight = np.sqrt(len(groups))  # both figures count alike
    if not np.isnan(load.tpot_s).all():
        found.append(weight * _off(tpot, load.tpot_s))
    return np.array(found)


def _errors(load: MeasuredLoad, run: Record) -> LoadErrors:
    ttft, tpot = (_by_number(load, run, name) for name in ("ttft", "tpot"))
    has_tpot = not np.isnan(load.tpot_s).all()
    hits = share(run.requests.cached_tokens, run.requests.isl)
    return LoadErrors(load.name, _off(ttft, load.ttft_s), _off(tpot, load.tpot_s) if has_tpot else None, hits)


def _by_number(load: MeasuredLoad, run: Record, name: str) -> Floats:
    found = np.full(len(load.workload), np.nan)
    found[run.requests.request] = of_each(run.requests, name)
    return found


def _off(simulated: Floats, measured: Floats) -> float:
    """Return the relative difference of the means of those that both have."""
    both = ~(np.isnan(simulated) | np.isnan(measured))
    if not both.any():
        raise UserError(
            "no request was answered both by the server and in simulation; are --max-model-len and others the server's?"
        )
    return float(simulated[both].mean() / max(float(measured[both].mean()), 1e-9)) - 1


def _covered(load: MeasuredLoad, errors: LoadErrors) -> dict[str, Any]:
    known = ~np.isnan(load.ttft_s)
    return {
        "load": load.name,
        "requests": load.count,
        "in_flight": round(load.in_system, 3),
        "isl": [int(load.isl[known].min()), int(load.isl[known].max())],
        "ttft_error_percent": round(errors.ttft * 100, 2),
        "tpot_error_percent": None if errors.tpot is None else round(errors.tpot * 100, 2),
        "prompts_share_nothing": load.shares_nothing,
        "hit_share": load.hit_share,
        "simulated_hit_share": errors.hit_share,
    }


def _mean_errors(errors: Sequence[LoadErrors]) -> dict[str, float]:
    if not errors:
        return {}
    tpot = [abs(one.tpot) for one in errors if one.tpot is not None]
    found = {"ttft": float(np.mean([abs(one.ttft) for one in errors]))}
    found["tpot"] = float(np.mean(tpot)) if tpot else 0.0
    return {name: round(value * 100, 2) for name, value in found.items()}
