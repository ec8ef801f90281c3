"""Measure how fast rehearsals are: seconds of virtual time, and tokens, for each second of CPU time, by number of workers.

    python benchmarks/rehearsal.py [--workers 4 16 64] [--seconds 20]

Each worker gets 4 requests per second (900 tokens in, 40 out, router mode kv), over HTTP from the load generator. Starting
the programs counts. `simulate` is the fast simulation of the same run.

Then: how many seeds `dynabench rehearse` rehearses in a minute with all cores, of each deployment that CI rehearses.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

from agreement_of_simulations import deployed, made

from dynabench.arm import Run, Settings
from dynabench.deployment.file import read_deployment
from dynabench.interrupt import Interrupt
from dynabench.rehearsal.agreement import rehearsed
from dynabench.rehearsal.all_seeds import Plan, rehearse_all
from dynabench.rehearsal.settings import RehearseConfig
from dynabench.virtual.run import simulate
from reports.record.records import Record
from workloads import Workload

RATE = 4.0
"""Requests per second for each worker."""
ROOT = Path(__file__).parents[1]
OF_CI = (
    ROOT / "examples/deployment.yaml",
    ROOT / "examples/prefill_decode.yaml",
    *sorted(ROOT.glob(".ci/rehearsed/*.yaml")),
)
"""The deployments of `.ci/rehearse`."""


def main() -> None:
    """Print a row for each number of workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--seconds", type=float, default=20.0, help="how long requests arrive (s of virtual time)")
    parser.add_argument("--seeds", type=int, default=40, help="seeds of each deployment, to count those in a minute")
    options = parser.parse_args()
    print("| workers | requests | virtual s | CPU s | virtual s per CPU s | tokens per CPU s | `simulate`: CPU s |")
    print("|---|---|---|---|---|---|---|")
    for workers in options.workers:
        run = Run.alone(Settings(deployed(workers=workers)))
        workload = made(round(RATE * workers * options.seconds), rate=RATE * workers, turns=1)
        cpu_s, found = timed(rehearsed, run, workload)
        fast_s, _ = timed(simulate, run, workload)
        virtual_s, tokens = float(found.requests.done_s.max()), int(found.requests.osl.sum())
        print(
            f"| {workers} | {len(workload):,} | {virtual_s:.1f} | {cpu_s:.1f} | {virtual_s / cpu_s:.1f} | "
            f"{tokens / cpu_s:,.0f} | {fast_s:.2f} |",
            flush=True,
        )
    print(f"\n| deployment | seeds a minute, {os.cpu_count()} cores |\n|---|---|")
    for file in OF_CI:
        print(f"| `{file.relative_to(ROOT)}` | {seeds_a_minute(file, options.seeds):.0f} |", flush=True)


def seeds_a_minute(file: Path, seeds: int) -> float:
    """Return how many seeds are rehearsed in a minute, with the default faults and requests."""
    config = RehearseConfig(seeds=str(seeds))
    plan = Plan(read_deployment(file), config.faults, config.requests, config.rate)
    started = time.monotonic()
    with Interrupt() as interrupt:
        rehearse_all(plan, config, interrupt, print)
    return seeds * 60 / (time.monotonic() - started)


def timed(carry_out: Callable[[Run, Workload], Record], run: Run, workload: Workload) -> tuple[float, Record]:
    """Return the CPU time of a run (s), and its record."""
    started = time.process_time()
    record = carry_out(run, workload)
    return time.process_time() - started, record


if __name__ == "__main__":
    main()
