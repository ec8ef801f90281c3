"""The routing study: every router mode on real traces and synthetic mixes at several loads, in virtual time.

    python benchmarks/routing_study.py [--traces ../shared/traces] [--out FOLDER] [--modes kv lmetric ...] [--seeds 1]

For each workload it first searches for the highest rate at which any of a few strong modes keeps the queue from growing
and 90% of the requests within the limits. The loads are shares of that rate. It prints the tables of
docs/routing-study.md and writes every figure to FOLDER/study.json, in some minutes on two cores.
"""

import argparse
import json
import math
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from dynabench.deployment.description import Deployment, Pool
from dynabench.experiment.bounds import Prompts, hit_shares, lower_bound, tiers_of
from dynabench.plan import Plan, Settings
from dynabench.virtual.run import run as simulate
from mocker import EngineConfig
from mocker.timing.choose import resolve
from reports import insight, metrics, slo
from reports.stability import stability
from serving.router import ROUTER_MODES
from workloads import Workload, formats
from workloads.shape import ShapeConfig, shape
from workloads.synthesize import SynthConfig, synthesize

WORKERS = 8
ENGINE = EngineConfig(num_gpu_blocks=8192)
LIMITS = [slo.parse("ttft <= 2s"), slo.parse("tpot <= 60ms")]
LOADS = (0.5, 0.8, 1.0)
STRONG = ("lmetric", "llmd-weighted", "marginal")

MIXES = {
    "chat": SynthConfig(requests=4000, rate=10, turns=8, isl=400, osl=250, think_time_s=12, prefix_groups=16, prefix_blocks=2),
    "agents": SynthConfig(requests=4000, rate=2, turns=30, isl=900, osl=120, think_time_s=4, prefix_groups=6, prefix_blocks=16, max_isl=65536),
    "documents": SynthConfig(requests=4000, rate=8, isl=300, osl=120, prefix_groups=200, prefix_blocks=24),
    "no reuse": SynthConfig(requests=4000, rate=8, isl=4000, osl=200, prefix_blocks=0, spread=1.0),
    "long outputs": SynthConfig(requests=3000, rate=8, isl=1200, osl=1200, prefix_groups=8, prefix_blocks=4, spread=0.8),
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One simulation."""

    workload: str
    scale: float
    mode: str
    seed: int
    traces: str


@lru_cache(maxsize=4)
def workload(name: str, scale: float, seed: int, traces: str) -> Workload:
    """Make or read a workload, its arrivals scaled."""
    if name in MIXES:
        config = MIXES[name]
        made = Workload(name, config.block_size, synthesize(SynthConfig(**(asdict(config) | {"seed": seed}))))
        return shape(made, ShapeConfig(rate_scale=scale))
    spread = name == "conversation"
    trace = formats.read(Path(traces) / f"mooncake_{name}.jsonl.gz")
    start = min(seed * 1200.0, trace.duration_s / 2)
    return shape(trace, ShapeConfig(rate_scale=scale, spread_ticks=spread, max_requests=4000, start_s=start), seed=seed)


def measure(job: Job) -> dict[str, Any]:
    """Simulate and return the figures."""
    load = workload(job.workload, job.scale, job.seed, job.traces)
    deployment = Deployment(pools=(Pool(replicas=WORKERS, mocker=ENGINE),), router_mode=job.mode)
    run = simulate(Plan.alone(Settings(deployment), seed=job.seed), load)
    values = metrics.per_request(run.requests)
    good = metrics.goodput(run, slo.good(run, LIMITS))
    return asdict(job) | {
        "ttft_ms": float(np.mean(values["ttft"])) * 1000,
        "ttft_p90_ms": float(np.percentile(values["ttft"], 90)) * 1000,
        "tpot_ms": float(np.nanmean(values["tpot"])) * 1000,
        "e2e_ms": float(np.mean(values["e2e"])) * 1000,
        "attainment": good.attainment,
        "hit_share": metrics.cache(run).hit_share,
        "imbalance": insight.imbalance(run).work_max_over_mean,
        "is_stable": stability(run).is_stable,
    }


def knee(name: str, traces: str, pool: ProcessPoolExecutor, seed: int) -> float:
    """Search for the highest scale of the arrivals at which a strong mode keeps up, to 5%."""
    low, high = 0.0, math.inf
    scale = 1.0
    while high / max(low, 1e-9) > 1.05:
        rows = list(pool.map(measure, [Job(name, scale, mode, seed, traces) for mode in STRONG]))
        if any(row["is_stable"] and row["attainment"] >= 0.9 for row in rows):
            low = scale
        else:
            high = scale
        scale = scale * 2 if high == math.inf else math.sqrt(low * high) if low else high / 2
        scale = float(f"{scale:.3g}")
    return low


def main() -> None:
    """Read the command line, simulate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"))
    parser.add_argument("--out", type=Path, default=Path("routing-study"))
    parser.add_argument(
        "--modes",
        nargs="+",
        default=[mode for mode in ROUTER_MODES if mode != "session" and not mode.startswith("oracle-ro")],
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument(
        "--first-seed", type=int, default=0, help="of the mixes; the traces' part that is taken moves with it"
    )
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--workloads", nargs="+", default=["conversation", "synthetic", *MIXES])
    options = parser.parse_args()
    traces = str(options.traces)
    names = [
        name for name in options.workloads if name in MIXES or (options.traces / f"mooncake_{name}.jsonl.gz").exists()
    ]
    for name in set(options.workloads) - set(names):
        print(f"{name}: the trace is not in {options.traces} and is left out")
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    pool = ProcessPoolExecutor(options.jobs or None)
    for name in names:
        top = knee(name, traces, pool, options.first_seed)
        jobs = [
            Job(name, float(f"{top * load:.3g}"), mode, seed, traces)
            for load in LOADS
            for mode in options.modes
            for seed in range(options.first_seed, options.first_seed + options.seeds)
        ]
        found = list(pool.map(measure, jobs))
        rows += found
        _print(name, top, found, options)
        (options.out / "study.json").write_text(json.dumps(rows, indent=1))
    _print_ranks(rows, options.modes)


def _print(name: str, top: float, rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print a workload's table: per load mean TTFT, mean E2E and attainment."""
    scales = sorted({row["scale"] for row in rows})
    print(f"\n### {name}\n")
    for scale, load in zip(scales, LOADS, strict=True):
        made = workload(name, scale, options.first_seed, str(options.traces))
        engine = resolve(ENGINE)
        prompts = Prompts(made, engine.config.block_size)
        bound = lower_bound(prompts, engine, WORKERS)
        (hits,) = hit_shares(prompts, tiers_of([engine] * WORKERS)).values()
        rate = (len(made) - 1) / made.duration_s
        print(
            f"{load:.0%} load: {rate:.1f} requests/s. No router can get a mean TTFT below {bound * 1000:.0f} ms, or more than "
            f"{hits:.0%} hits."
        )
    print()
    print("| mode | " + " | ".join(f"{load:.0%}: TTFT / E2E ms, good" for load in LOADS) + " | hits | max/mean |")
    print("|---|" + "---|" * (len(LOADS) + 2))
    for mode in options.modes:
        cells = []
        for scale in scales:
            mine = [row for row in rows if row["mode"] == mode and row["scale"] == scale]
            mean = {key: float(np.mean([row[key] for row in mine])) for key in ("ttft_ms", "e2e_ms", "attainment")}
            grew = "" if all(row["is_stable"] for row in mine) else " (grew)"
            cells.append(f"{mean['ttft_ms']:,.0f} / {mean['e2e_ms']:,.0f}, {mean['attainment']:.0%}{grew}")
        last = [row for row in rows if row["mode"] == mode and row["scale"] == scales[-1]]
        hits, uneven = (float(np.mean([row[key] for row in last])) for key in ("hit_share", "imbalance"))
        print(f"| {mode} | " + " | ".join(cells) + f" | {hits:.1%} | {uneven:.2f} |", flush=True)


def _print_ranks(rows: list[dict[str, Any]], modes: list[str]) -> None:
    """Print how far each mode is from the best over all cases: geometric mean and worst of E2E and TTFT."""
    best: dict[tuple[str, float], dict[str, float]] = {}
    for row in rows:
        key = (row["workload"], row["scale"])
        known = best.setdefault(key, {"ttft_ms": math.inf, "e2e_ms": math.inf, "attainment": 0.0})
        known["ttft_ms"] = min(known["ttft_ms"], row["ttft_ms"])
        known["e2e_ms"] = min(known["e2e_ms"], row["e2e_ms"])
        known["attainment"] = max(known["attainment"], row["attainment"])
    print("\n### All together: how far from the best mode of each workload and load\n")
    print("| mode | E2E, geometric mean | worst | TTFT, geometric mean | worst | attainment lost, mean | worst |")
    print("|---|---|---|---|---|---|---|")
    lines = []
    for mode in modes:
        mine = [row for row in rows if row["mode"] == mode]
        ratios = {
            name: np.array([row[name] / best[row["workload"], row["scale"]][name] for row in mine])
            for name in ("e2e_ms", "ttft_ms")
        }
        lost = np.array([best[row["workload"], row["scale"]]["attainment"] - row["attainment"] for row in mine])
        e2e, ttft = (float(np.exp(np.log(ratios[name]).mean())) for name in ("e2e_ms", "ttft_ms"))
        line = f"| {mode} | {e2e:.3f} | {ratios['e2e_ms'].max():.2f} | {ttft:.3f} | {ratios['ttft_ms'].max():.2f} | {lost.mean():.1%} | {lost.max():.0%} |"
        lines.append((e2e, line))
    for _, line in sorted(lines):
        print(line)


if __name__ == "__main__":
    main()
