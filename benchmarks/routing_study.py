"""The routing study: router modes on traces, real agent sessions and synthetic mixes, in virtual time.

    python benchmarks/routing_study.py --traces ../shared/traces --sessions kv-cache-tester/traces --out routing-study
    python benchmarks/routing_page.py routing-study/study.json docs/routing-study.md

Modes are picked on some cells, and the picks are tried on others: other sessions, another hour, other step times. The
fresh cells among them had not been simulated when the rule of picking was settled. For each workload it first searches for the highest rate at which a strong mode keeps up. The loads are shares of it.
`--sessions` is a folder of sessions as kv-cache-tester records them (github.com/callanjfox/kv-cache-tester, traces/).
It writes every figure to study.json as it goes, and a study that was cut short goes on from there, unless our code, the
traces or the number of requests are others now.
"""

import argparse
import json
import math
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dynabench.arm import Run, Settings
from dynabench.deployment.description import Deployment, Pool
from dynabench.experiment.store import PACKAGES
from dynabench.virtual.run import simulate
from foundation.files import replace_text
from foundation.identity import Identity
from mocker import EngineConfig
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig
from reports.figures import insight, metrics, slo
from reports.figures.stability import stability
from reports.record.records import Record
from serving.engines.mock.costs import step_costs_of
from serving.router import ROUTER_MODES, RouterConfig, StepCosts
from workloads import Request, Workload, formats
from workloads.merge import merge_workloads
from workloads.shape import ShapeConfig, shape
from workloads.synthesize import SynthConfig, synthesize
from workloads.workload import select

WORKERS = 8
LIMITS = [slo.parse_slo("ttft <= 2s"), slo.parse_slo("tpot <= 60ms")]
STRONG = "lmetric"
UNSPREAD = str(Path(__file__).with_name("unspread.py"))
LOWEST, HIGHEST = 1 / 64, 64.0
"""At the lowest scale of arrivals, requests are alone; beyond the highest, sessions all start at once."""
LONGEST = 120_000
"""Longer prompts are left out, because the models' context ends soon after: fresh sessions are those that have some."""
CALLS, PAUSE_S = 20, 30.0
"""Sessions are cut to so many calls, and pauses to so long, so that they meet within a short simulation."""

MODES = (
    "round-robin", "kv", "dynamo-kv-p8", "dynamo-lmetric", "sgl-cache-aware", "lmetric", "lmetric-new", "aibrix-prefix",
    "prodstack-loadaware", "llmd-weighted", "llumnix", "preble-e2", "marginal", "marginal-all",
)  # fmt: skip

ENGINES = {
    "bundled": (EngineConfig(num_gpu_blocks=8192), TimingConfig()),
    "70B on 4 H100": (
        EngineConfig(block_size=64),
        TimingConfig(timing="roofline", model="llama-3.1-70b", gpu="h100", tensor_parallel_size=4),
    ),
    "8B on H100": (EngineConfig(block_size=64), TimingConfig(timing="roofline", model="llama-3.1-8b", gpu="h100")),
}

MIXES = {
    "chat": SynthConfig(rate=10, turns=8, isl=400, osl=250, think_time_s=12, prefix_groups=16, prefix_blocks=2),
    # The shape of kv-cache-tester's sessions: prompts that begin with 15 k tokens and grow by 1,400 a call.
    "agents": SynthConfig(rate=1, turns=60, isl=1400, osl=430, spread=1.0, think_time_s=12, prefix_groups=40, prefix_blocks=30),
    "documents": SynthConfig(rate=8, isl=300, osl=120, prefix_groups=200, prefix_blocks=24),
    "no reuse": SynthConfig(rate=8, isl=4000, osl=200, prefix_blocks=0, spread=1.0),
}  # fmt: skip


PARTS = ("", ", other part", ", fresh")
"""Modes are picked on part 0 and tried on part 1. Part 2 was simulated once, after the rule of picking was settled."""


@dataclass(frozen=True)
class Case:
    """A workload on an engine; each part has other requests of the same kind."""

    workload: str
    part: int
    engine: str
    loads: tuple[float, ...]

    @property
    def name(self) -> str:
        """What the page calls it."""
        return f"{self.workload}{PARTS[self.part]}, {self.engine}"


UNSEEN = ("conversation", "sessions", "sessions and chat")
CASES = [
    *(Case(name, 0, "bundled", (0.7, 1.0)) for name in ("conversation", "synthetic", "sessions")),
    *(Case(name, 0, "bundled", (0.85,)) for name in (*MIXES, "sessions and chat")),
    *(Case(name, part, engine, (0.85,)) for part in (1, 2) for engine in ("bundled", "8B on H100") for name in UNSEEN),
]

COSTS_OF = ("sessions", "conversation")
"""Workloads on which the price of wrong costs is measured, on part 1 with `COSTS_ON`."""
COSTS_ON = "8B on H100"


@dataclass(frozen=True)
class Job:
    """One simulation."""

    workload: str
    part: int
    engine: str
    scale: float
    mode: str
    costs: str = ""
    """How the router's step costs differ from the engine's."""


@dataclass(frozen=True)
class Sources:
    """Where traces are, and how many requests of them to take."""

    traces: Path
    sessions: Path | None
    requests: int

    @property
    def identity(self) -> Identity:
        """What every figure depends on, besides its job."""
        files = [Path(__file__), Path(UNSPREAD), *sorted(self.traces.glob("mooncake_*"))]
        folders = [] if self.sessions is None else [self.sessions]
        return Identity.of({"--requests": self.requests}, files=[*files, *folders], packages=PACKAGES)


@lru_cache(maxsize=4)
def workload(name: str, part: int, sources: Sources) -> Workload:
    """Make or read a workload."""
    count = sources.requests
    match name:
        case "sessions":
            return _sessions(part, sources)
        case "sessions and chat":
            chat = workload("chat", part, sources)
            return merge_workloads(
                [workload("sessions", part, sources), shape(chat, ShapeConfig(max_requests=count // 2))]
            )
        case "burst" | "equal prompts":
            return _burst() if name == "burst" else _equal()
        case _ if name in MIXES:
            config = replace(MIXES[name], requests=count, seed=part)
            return Workload(name, config.block_size, synthesize(config))
    trace = formats.read(sources.traces / f"mooncake_{name}.jsonl.gz")
    is_coarse = name == "conversation"
    return shape(trace, ShapeConfig(spread_ticks=is_coarse, max_requests=count, start_s=part * 1500.0), seed=part)


def _sessions(part: int, sources: Sources) -> Workload:
    """Read every second session that fits, from the first or the second; or every second of the others, cut to fit."""
    assert sources.sessions is not None
    read = _read(sources.sessions, fit=part < 2)
    names = list(dict.fromkeys(request.session for request in read))[part % 2 :: 2]
    taken, kept = dict.fromkeys(names, 0), []
    for number, request in enumerate(read):
        if request.input_length > LONGEST:
            taken[request.session] = CALLS
        if taken.get(request.session, CALLS) < CALLS:
            taken[request.session] += 1
            kept.append(number)
    kept = kept[: sources.requests]
    requests = [
        msgspec.structs.replace(request, delay_s=min(request.delay_s, PAUSE_S))
        for request in select(read.requests, kept)
    ]
    made = Workload("sessions", read.block_size, requests)
    return shape(made, ShapeConfig(arrival="poisson", rate=0.5), seed=part)


@cache
def _read(folder: Path, *, fit: bool) -> Workload:
    """Read the sessions whose prompts stay within the context, or the others."""
    longest = {file: _longest(file) for file in sorted(folder.glob("*.json"))}
    return formats.read([file for file, most in longest.items() if most and (most <= LONGEST) == fit], format="weka")


def _longest(file: Path) -> int:
    """Return the length of a session's longest prompt; 0 if it has few."""
    calls = json.loads(file.read_text())["requests"]
    lengths = [call["in"] for entry in calls for call in (entry.get("requests") or [entry])]
    return max(lengths) if len(lengths) > 3 else 0


def _burst() -> Workload:
    """Return 500 prompts at once, 5 s after one with which they share 16,384 tokens."""
    shared = tuple(range(32))
    others = [Request(5.0, 16484, 100, (*shared, 100 + number)) for number in range(500)]
    return Workload("burst", 512, [Request(0.0, 16384, 10, shared), *others])


def _equal() -> Workload:
    """Return 500 equal prompts, 100 in a second, 5 s after the first."""
    prompts = [Request(5.0 + number / 100, 2048, 100, tuple(range(4))) for number in range(500)]
    return Workload("equal prompts", 512, [Request(0.0, 2048, 100, tuple(range(4))), *prompts])


def measure(job: Job, sources: Sources) -> dict[str, Any]:
    """Simulate and return the figures."""
    load = shape(workload(job.workload, job.part, sources), ShapeConfig(rate_scale=job.scale))
    engine, timing = ENGINES[job.engine]
    pool = Pool(replicas=WORKERS, mocker=engine, timing=timing)
    deployment = Deployment(pools=(pool,), router_mode=job.mode, router=router_of(job))
    run = simulate(Run.alone(Settings(deployment), seed=job.part), load)
    good = slo.good_requests(run, LIMITS)
    return (
        asdict(job)
        | _figures(run, good, np.ones(len(good), bool))
        | {
            "hit_share": metrics.cache(run).hit_share,
            "imbalance": insight.imbalance(run).work_max_over_mean,
            "most_requests": float(np.bincount(run.requests.worker.compressed()).max() / len(good) * WORKERS),
            "is_stable": stability(run).is_stable,
            "classes": {name: _figures(run, good, mask) for name, mask in classes(load).items() if mask.any()},
        }
    )


def _figures(run: Record, good: np.ndarray, mask: np.ndarray) -> dict[str, float]:
    values = {name: each[mask] for name, each in metrics.per_request(run.requests).items()}
    return {
        "requests": int(mask.sum()),
        "ttft_ms": float(np.nanmean(values["ttft"])) * 1000,
        "ttft_p99_ms": float(np.nanpercentile(values["ttft"], 99)) * 1000,
        "tpot_ms": float(np.nanmean(values["tpot"])) * 1000,
        "e2e_ms": float(np.nanmean(values["e2e"])) * 1000,
        "e2e_p99_ms": float(np.nanpercentile(values["e2e"], 99)) * 1000,
        "good": float(good[mask].mean()),
    }


def classes(load: Workload) -> dict[str, np.ndarray]:
    """Divide the requests by what a router treats differently: length, reuse, and source if there are two."""
    lengths = np.array([request.input_length for request in load])
    is_long = lengths > np.median(lengths)
    seen: set[int] = set()
    reuses = []
    for request in load:
        ids = request.hash_ids
        reuses.append(bool(ids) and ids[(len(ids) - 1) // 2] in seen)  # ids are chained: half of the prompt was seen
        seen.update(ids)
    is_reusing = np.array(reuses)
    found = {"short": ~is_long, "long": is_long, "new": ~is_reusing, "half or more seen before": is_reusing}
    if " and " in load.name or " + " in load.name:
        is_agent = np.array([request.session.startswith("0:") for request in load])
        found |= {"agents": is_agent, "chats": ~is_agent}
    return found


FACTORS = {
    "all x 2": (2, 2, 2, 2), "all x 0.5": (0.5, 0.5, 0.5, 0.5),
    "prefill x 2": (1, 2, 1, 1),
    "prefill x 0.5": (1, 0.5, 1, 1), "decode x 3": (1, 1, 3, 3), "decode x 0.33": (1, 1, 1 / 3, 1 / 3),
}  # fmt: skip
OF_OTHERS = {"of the bundled times": "bundled", "of 70B on 4 H100": "70B on 4 H100"}


def router_of(job: Job) -> RouterConfig:
    """Return the router's settings: the costs of the engine's steps, unless they are to be wrong."""
    if not job.costs:
        return RouterConfig()
    source = OF_OTHERS.get(job.costs, job.engine)
    *costs, budget = step_costs_of(resolve(*ENGINES[source]))
    factors = FACTORS.get(job.costs, (1, 1, 1, 1))
    wrong = StepCosts(*(cost * by for cost, by in zip(costs, factors, strict=True)), budget)
    return RouterConfig().with_costs(wrong)


class Study:
    """The figures so far, in a file."""

    def __init__(self, file: Path, sources: Sources, jobs: int) -> None:
        """Go on with the figures of a file.

        Raises:
            SystemExit: they were made of something else.
        """
        self._file = file
        self._sources = sources
        self._pool = ProcessPoolExecutor(jobs) if jobs > 1 else None
        self.data: dict[str, Any] = {"knees": {}, "cells": [], "bursts": [], "costs": [], "unspread": []}
        self.data["identity"] = asdict(sources.identity)
        if file.exists():
            earlier = json.loads(file.read_text())
            made = Identity(**earlier.get("identity", {"facts": {}}))
            if made != sources.identity:
                sys.exit(f"{file}: {sources.identity.difference(made)}; remove it, or write to another --out")
            self.data = earlier

    def measure(self, part: str, jobs: list[Job], **more: Any) -> None:
        """Add what is missing of some simulations."""
        there = {tuple(row[name] for name in asdict(jobs[0])) for row in self.data[part]}
        missing = [job for job in jobs if tuple(asdict(job).values()) not in there]
        self.data[part] += [row | more for row in self._map(missing)]
        self.save()

    def save(self) -> None:
        """Write what there is to the file."""
        replace_text(self._file, json.dumps(self.data, indent=1))

    def _map(self, jobs: list[Job]) -> list[dict[str, Any]]:
        return list((self._pool.map if self._pool else map)(measure, jobs, [self._sources] * len(jobs)))

    def knee(self, case: Case) -> float:
        """Search for the highest scale of the arrivals at which a strong mode keeps up, to 15%."""
        if case.name in self.data["knees"]:
            return self.data["knees"][case.name]
        low, high, scale = LOWEST, math.inf, 1.0
        alone = self._strong(case, LOWEST)
        while high / low > 1.15 and scale < HIGHEST:
            row = self._strong(case, scale)
            if row["is_stable"] and row["good"] >= 0.9 * alone["good"]:
                low = scale
            else:
                high = scale
            scale = scale * 2 if high == math.inf else math.sqrt(low * high)
            scale = float(f"{scale:.3g}")
        self.data["knees"][case.name] = low
        return low

    def _strong(self, case: Case, scale: float) -> dict[str, Any]:
        return self._map([Job(case.workload, case.part, case.engine, scale, STRONG)])[0]


def main() -> None:
    """Read the command line and simulate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"))
    parser.add_argument("--sessions", type=Path, help="without it, cells with real sessions are left out")
    parser.add_argument("--out", type=Path, default=Path("routing-study"))
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    study = Study(options.out / "study.json", Sources(options.traces, options.sessions, options.requests), options.jobs)
    bursts(study, options.modes)
    cases = [case for case in CASES if options.sessions is not None or not case.workload.startswith("sessions")]
    for case in cases:
        top = study.knee(case)
        for load in case.loads:
            scale = float(f"{top * load:.3g}")
            made = [Job(case.workload, case.part, case.engine, scale, mode) for mode in options.modes]
            study.measure("cells", made, case=case.name, load=load)
            if not case.part:
                ours = [replace(job, mode=mode) for job in made[:1] for mode in ("marginal-all", UNSPREAD)]
                study.measure("unspread", ours, case=case.name, load=load)
        print(f"{case.name}: {top:g} times its rate", flush=True)
        if case.part == 1 and case.workload in COSTS_OF and case.engine == COSTS_ON:
            names = ("", *FACTORS, *OF_OTHERS)
            made = [
                Job(case.workload, case.part, case.engine, scale, mode, costs)
                for mode in ("marginal-all", "marginal")
                for costs in names
            ]
            study.measure("costs", made, case=case.name)


def bursts(study: Study, modes: list[str]) -> None:
    """Send the bursts, to each mode that herds also with a bound."""
    named = [*modes, *(f"{mode}+bound(1.25)" for mode in modes if ROUTER_MODES[mode].herds)]
    for name in ("burst", "equal prompts"):
        study.measure("bursts", [Job(name, 0, "bundled", 1.0, mode) for mode in named])


if __name__ == "__main__":
    main()
