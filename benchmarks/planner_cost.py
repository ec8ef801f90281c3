"""Measure the cost of a planner: simulate an hour of traffic with an advisory planner and without one, alternately.

    python benchmarks/planner_cost.py [--traces ../shared/traces] [--loads conversation sine] [--planners hpa lead-time ...] [--rounds 5]

An advisory planner changes nothing, so both simulate the same. The times are CPU seconds of this process.
"""

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path

from planner_study import LAYOUTS, LOADS, TARGETS, deployment_of, load_of

from dynabench.arm import Run, Settings
from dynabench.virtual.run import simulate
from serving.planner import PLANNERS, PlannerConfig
from workloads import Workload

WORKERS = {"aggregated": {"worker": 8}, "disaggregated": {"prefill": 5, "decode": 3}}


def cpu_s(workload: Workload, layout: str, planner: str) -> float:
    """Simulate a load, and return the CPU time (s)."""
    config = PlannerConfig(
        planner=planner, advisory=True, planner_ttft_ms=2000.0, planner_itl_ms=50.0, **TARGETS.get(planner, {})
    )
    deployment = replace(deployment_of(layout, WORKERS[layout]), planner=config)
    begin = time.process_time()
    simulate(Run.alone(Settings(deployment)), workload)
    return time.process_time() - begin


def main() -> None:
    """Print the additional time of each planner on each load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"))
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=["conversation", "sine"])
    parser.add_argument("--layout", choices=LAYOUTS, default="aggregated")
    parser.add_argument("--planners", nargs="+", default=[name for name in PLANNERS if name != "static"])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for load in options.loads:
        workload = load_of(load, options.traces, 1)
        cpu_s(workload, options.layout, "static")  # for imports and caches
        for planner in options.planners:
            if options.layout == "aggregated" and planner == "dynamo-sla-2025":
                continue  # it plans prefill and decode workers only
            pairs = [
                [cpu_s(workload, options.layout, name) for name in ("static", planner)] for _ in range(options.rounds)
            ]
            without, with_it = zip(*pairs, strict=True)
            more = sorted(b / a - 1 for a, b in pairs)
            print(
                f"{load:12} {len(workload.requests):6,} requests  {planner:16} {statistics.median(without):6.2f} s without, "
                f"{statistics.median(with_it):6.2f} s with: {statistics.median(more):+6.1%} ({more[0]:+.1%} to {more[-1]:+.1%})",
                flush=True,
            )


if __name__ == "__main__":
    main()
