"""Compare planners by load and start-up time: every policy on the traces, and fleets of fixed size.

    python benchmarks/planner_study.py [--traces ../shared/traces] [--out planner-study.jsonl] [--hours 24] [--loads conv sine ...]
                                       [--planners hpa lead-time ...] [--startups 0 60 300] [--layouts aggregated disaggregated]

Each run adds a line to the file; existing runs are not repeated. `--hours` turns a trace of an hour into a day of
consecutive copies, whose rate varies between the full rate at the middle of the day and a quarter of it at the ends.
"""

import argparse
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import joblib
import msgspec
import numpy as np

from dynabench.arm import Arm, Run, Settings
from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.fleet import FleetConfig
from dynabench.experiment.oracle import oracles_of
from dynabench.interrupt import Interrupt
from dynabench.virtual.run import simulate
from mocker import EngineConfig
from mocker.timing.config import TimingConfig
from reports.figures.fleet import HOUR, against_oracle
from reports.figures.slo import good_requests, parse_slo
from reports.record.fleet import Oracle
from serving.planner import PLANNERS, PlannerConfig
from workloads import Request, Workload, formats
from workloads.shape import ShapeConfig, shape

SLO = ("ttft <= 2s", "tpot <= 50ms")
LIMITS = [parse_slo(text) for text in SLO]
TIMING = TimingConfig(model="meta-llama/Llama-3.1-70B", gpu="h100", tensor_parallel_size=4)
LAYOUTS = ("aggregated", "disaggregated")
TRACES = {
    "conversation": ("mooncake_conversation.jsonl.gz", 1),
    "conv": ("AzureLLMInferenceTrace_conv.csv.gz", 4),
    "code": ("AzureLLMInferenceTrace_code.csv.gz", 4),
}
"""Trace, and the number of copies that overlap."""
LOADS = (*TRACES, "sine", "spikes")
STATIC = ("static at the peak", "static at the mean")
TARGETS = {"hpa": {"hpa_metric": "concurrency", "hpa_target": 16.0}, "kpa": {"kpa_target_concurrency": 12.0}}
"""Targets without a default that fits every engine: 16 is about what a worker handles within the limits, and 12 leaves
room."""


def moved(request: Request, at: float, copy: int) -> Request:
    """Return a request at another time that shares prefixes with its own copy only."""
    ids = tuple((copy << 40) + id for id in request.hash_ids)
    return msgspec.structs.replace(request, arrival_s=at, hash_ids=ids, session="", after=())


def superposed(workload: Workload, count: int, hours: int, course: Callable[[float], float], seed: int) -> Workload:
    """Return overlapping copies of an hour, each rotated by its share, repeated hourly, and thinned by `course`."""
    rng, length = random.Random(f"study {seed}"), workload.requests[-1].arrival_s + 1.0
    requests = []
    for hour in range(hours):
        for copy in range(count):
            for request in workload.requests:
                at = (request.arrival_s + copy * length / count) % length + hour * length
                if rng.random() < course(at / (hours * length)):
                    requests.append(moved(request, at, hour * count + copy))
    return replace(workload, requests=sorted(requests, key=lambda request: request.arrival_s))


def day(share: float) -> float:
    """Return the share of the load at a point of the day: a quarter at midnight, all of it at noon."""
    return 0.625 - 0.375 * math.cos(2 * math.pi * share)


def load_of(name: str, traces: Path, hours: int, seed: int = 0) -> Workload:
    """Make a load."""
    if name in TRACES:
        file, count = TRACES[name]
        read = formats.read(traces / file)
        if name == "conversation":
            read = shape(read, ShapeConfig(spread_ticks=True))
        return superposed(read, count, hours, day if hours > 1 else lambda _: 1.0, seed)
    lengths = formats.read(traces / TRACES["conv"][0])
    if name == "sine":
        rates = [12 - 10 * math.cos(2 * math.pi * second / 1800) for second in range(3600 * hours)]
    else:
        rates = [24.0 if second % 900 in range(300, 420) else 6.0 for second in range(3600 * hours)]
    rng, requests = random.Random(f"{name} {seed}"), []
    for second, rate in enumerate(rates):
        for at in sorted(second + rng.random() for _ in range(np.random.default_rng([seed, second]).poisson(rate))):
            requests.append(moved(rng.choice(lengths.requests), at, len(requests)))
    return replace(lengths, requests=requests)


def deployment_of(layout: str, sizes: dict[str, int] | None = None) -> Deployment:
    """Return a deployment with a number of workers for each pool (default: two)."""
    roles = {"worker": "aggregated"} if layout == "aggregated" else {"prefill": "prefill", "decode": "decode"}
    pools = tuple(
        Pool(name=name, role=role, replicas=(sizes or {}).get(name, 2), mocker=EngineConfig(), timing=TIMING)
        for name, role in roles.items()
    )
    return Deployment(pools=pools, router_mode="kv")


def oracle_of(workload: Workload, layout: str) -> Oracle:
    """Return the fewest workers for each part of a load."""
    deployment = replace(deployment_of(layout), planner=PlannerConfig(planner="hpa"))
    with Interrupt() as interrupt:
        return oracles_of([Arm("a", Settings(deployment), {})], lambda _: workload, LIMITS, 1, interrupt)["a"]


def sizes_of(planner: str, oracle: Oracle) -> dict[str, int]:
    """Return the initial workers of a fleet: those that the first part needs, or the peak, or the mean."""
    if planner not in STATIC:
        return {pool: counts[0] for pool, counts in oracle.replicas.items()}
    pick = max if planner == STATIC[0] else np.mean
    return {pool: max(round(float(pick(counts))), 1) for pool, counts in oracle.replicas.items()}


def case(workload: Workload, layout: str, planner: str, startup_s: float, oracle: Oracle) -> dict[str, Any]:
    """Run one fleet, and summarise the results."""
    settings = {} if planner in STATIC else {"planner": planner, "planner_ttft_ms": 2000.0, "planner_itl_ms": 50.0}
    config = PlannerConfig(**settings, **TARGETS.get(planner, {}), max_replicas=64)
    deployment = replace(
        deployment_of(layout, sizes_of(planner, oracle)), planner=config, fleet=FleetConfig(startup_s=startup_s)
    )
    record = simulate(Run.alone(Settings(deployment)), workload)
    fleet, is_good = record.fleet, good_requests(record, LIMITS)
    assert fleet is not None
    compared = against_oracle(fleet, oracle, np.asarray(record.requests.intended_s))
    ttft = np.asarray((record.requests.first_token_s - record.requests.intended_s).filled(np.inf))
    return {
        "attainment": float(is_good.mean()),
        "possible": compared.possible,
        "gpu_h": fleet.gpu_s / HOUR,
        "oracle_gpu_h": compared.needed_gpu_h,
        "over_gpu_h": compared.over_gpu_s / HOUR,
        "under_gpu_h": compared.under_gpu_s / HOUR,
        "good_per_gpu_h": float(is_good.sum()) / (fleet.gpu_s / HOUR),
        "changes": len(fleet.changes),
        "ttft_p50_s": float(np.median(ttft)),
        "ttft_p99_s": float(np.quantile(ttft, 0.99)),
        "wall_s": record.wall_s,
    }


def cases(options: argparse.Namespace) -> Iterator[tuple[str, str, str, float]]:
    """Yield the requested (load, layout, planner, start-up time); fleets of fixed size have no starts."""
    for load in options.loads:
        for layout in options.layouts:
            for planner in (*STATIC, *options.planners):
                if layout == "aggregated" and planner == "dynamo-sla-2025":
                    continue  # it plans prefill and decode workers only
                for startup_s in [0.0] if planner in STATIC else options.startups:
                    yield load, layout, planner, startup_s


def one(options: argparse.Namespace, load: str, layout: str, todo: list[tuple[str, float]]) -> list[dict[str, Any]]:
    """Run the remaining cases of one load and layout."""
    workload = load_of(load, options.traces, options.hours)
    oracle, rows = oracle_of(workload, layout), []
    for planner, startup_s in todo:
        key = {"load": load, "layout": layout, "hours": options.hours, "planner": planner, "startup_s": startup_s}
        rows.append(key | case(workload, layout, planner, startup_s, oracle))
        with options.out.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        print(table([rows[-1]]), flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows as text."""
    return "\n".join(
        f"{row['load']:12} {row['layout'][:6]:6} {row['startup_s']:5.0f} s  {row['planner']:18} "
        f"{row['attainment'] / row['possible']:6.1%} good  {row['gpu_h']:7.2f} GPU-h (oracle {row['oracle_gpu_h']:6.2f}) "
        f"over {row['over_gpu_h']:6.2f} under {row['under_gpu_h']:5.2f}  {row['changes']:4} changes  p99 {row['ttft_p99_s']:6.1f} s"
        for row in rows
    )


def main() -> None:
    """Run all cases that are not in the file yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"))
    parser.add_argument("--out", type=Path, default=Path("planner-study.jsonl"))
    parser.add_argument("--hours", type=int, default=1)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--planners", nargs="+", default=[name for name in PLANNERS if name != "static"])
    parser.add_argument("--startups", nargs="+", type=float, default=[0.0, 30.0, 60.0, 120.0, 300.0])
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    known = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    keys = ("load", "layout", "planner", "startup_s")
    done = {tuple(row[key] for key in keys) for row in known if row["hours"] == options.hours}
    todo: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for load, layout, planner, startup_s in cases(options):
        if (load, layout, planner, startup_s) not in done:
            todo.setdefault((load, layout), []).append((planner, startup_s))
    joblib.Parallel(options.jobs)(joblib.delayed(one)(options, *key, rows) for key, rows in todo.items())


if __name__ == "__main__":
    main()
