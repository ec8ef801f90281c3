"""Simulate the cases by which AISimulate's authors guard its speed, as far as they can be expressed here.

    python benchmarks/gate_cases.py [--scale 1.0] [CASE ...]

Each case runs in its own process. Its figure is requests for each CPU second inside the simulation, without start-up and
report. AISimulate's are published by its authors for their CI machine (October 2026); nobody else has measured them.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """A workload, and how it is served."""

    requests: int
    isl: int
    osl: int
    published_s: float | None = None
    """What AISimulate takes for it."""
    concurrency: int = 64
    lengths: str = "constant"
    is_apart: bool = False
    engine: dict[str, Any] = field(default_factory=dict)


CASES = {
    "dense": Case(131_072, 1024, 128, 2.99),
    "dense, log-normal lengths": Case(131_072, 1024, 128, lengths="lognormal"),
    "long prefill": Case(16_384, 32_768, 32, 3.09),
    "long decode": Case(4_096, 1024, 2048, 3.30),
    "cache pressure": Case(16_384, 1024, 128, 2.46, engine={"num_gpu_blocks": 800}),
    "prefill and decode apart": Case(65_536, 1024, 128, 2.37, is_apart=True),
}


def measure(case: Case, scale: float) -> float:
    """Return the CPU seconds of one case in this process, and how many requests it had."""
    from dynabench.arm import Run, Settings
    from dynabench.deployment.description import Deployment, Pool
    from dynabench.virtual.run import simulate
    from mocker import EngineConfig
    from workloads import Workload
    from workloads.pacing import LoadConfig
    from workloads.synthesize import SynthConfig, synthesize

    shape = {"isl_distribution": case.lengths, "osl_distribution": case.lengths}
    synth = SynthConfig(requests=int(case.requests * scale), isl=case.isl, osl=case.osl, prefix_blocks=0, **shape)  # type: ignore[arg-type]
    workload = Workload("gate", 512, synthesize(synth))
    engine = EngineConfig(block_size=64, **({"num_gpu_blocks": 65_536} | case.engine))
    roles = ("prefill", "decode") if case.is_apart else ("aggregated",)
    pools = tuple(Pool(name=role, role=role, mocker=engine) for role in roles)  # type: ignore[arg-type]
    settings = Settings(Deployment(pools=pools, router_mode="round-robin"), load=LoadConfig(concurrency=case.concurrency))
    run = Run.alone(settings)
    started = time.process_time()
    simulate(run, workload)
    return time.process_time() - started


def main() -> None:
    """Measure all cases, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(CASES), metavar="CASE")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the requests of each case")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure(CASES[options.names[0]], options.scale)))
        return
    print(f"{'case':28}  requests  CPU s  requests/s  AISimulate's")
    for name in options.names:
        case = CASES[name]
        command = [sys.executable, __file__, name, "--here", "--scale", str(options.scale)]
        seconds = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        count = int(case.requests * options.scale)
        published = "" if case.published_s is None else f"{case.requests / case.published_s:,.0f}"
        print(f"{name:28}  {count:8,}  {seconds:5.2f}  {count / seconds:10,.0f}  {published:>12}", flush=True)


if __name__ == "__main__":
    main()
