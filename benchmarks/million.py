"""A million synthetic requests on 64 workers, at two output lengths: memory must not grow with tokens.

python benchmarks/million.py [--requests 1000000]
"""

import argparse
import json
import resource
import subprocess
import sys


def measure(requests: int, osl: int) -> dict[str, float]:
    """Simulate in this process."""
    from dynabench.arm import Run, Settings
    from dynabench.deployment.description import Deployment, Pool
    from dynabench.virtual.run import simulate
    from mocker import EngineConfig
    from workloads import Workload
    from workloads.synthesize import SynthConfig, synthesize

    config = SynthConfig(requests=requests, rate=60, isl=1000, osl=osl, prefix_groups=200, osl_distribution="constant")
    workload = Workload("synthetic", 512, synthesize(config))
    engine = EngineConfig(block_size=64, num_gpu_blocks=16384)
    deployment = Deployment(pools=(Pool(replicas=64, mocker=engine),), router_mode="kv")
    run = simulate(Run.alone(Settings(deployment)), workload)
    return {"seconds": run.wall_s, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def main() -> None:
    """Measure both output lengths, each in its own process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--osl", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.osl:
        print(json.dumps(measure(options.requests, options.osl)))
        return
    for osl in (50, 500):
        command = [sys.executable, __file__, "--requests", str(options.requests), "--osl", str(osl)]
        got = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(
            f"{options.requests:,} requests of {osl} tokens: {got['seconds']:.1f} s, {got['peak_mb']:.0f} MB",
            flush=True,
        )


if __name__ == "__main__":
    main()
