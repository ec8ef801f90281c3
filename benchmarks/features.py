"""What a feature of engines costs a simulation: time and memory of a replay with it, beside the plain one.

    python benchmarks/features.py TRACE [--requests 12031] [--repeats 3]

A trace in Mooncake's format on 8 workers, router mode kv. Each run is a process of its own, plain ones between the others.
Times are CPU seconds of the simulation alone.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ON_GPUS = {"model": "meta-llama/Llama-3.1-8B", "gpu": "h100"}
GROUPED = {"model": "google/gemma-3-27b-it", "gpu": "h100", "tensor_parallel_size": 2}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "speculation": {"engine": {"num_speculative_tokens": 3, "acceptance_length": 2.4, "drafting_ms": 1.0}},
    "16 adapters": {"engine": {"enable_lora": True, "max_loras": 4, "lora_load_ms": 20.0}, "adapters": 16},
    "plain, Llama-3.1-8B": {"timing": ON_GPUS},
    "two stages": {"timing": ON_GPUS | {"pipeline_parallel_size": 2}},
    "gemma-3-27b's groups": {"timing": GROUPED},
}
"""Settings of engines, and of their step times, by the name of what they turn on; and the adapters that requests ask for."""


def measure(trace: Path, name: str, requests: int) -> dict[str, float]:
    """Replay once in this process."""
    from msgspec import structs

    from dynabench.arm import Run, Settings
    from dynabench.deployment.description import Deployment, Pool
    from dynabench.virtual.run import simulate
    from mocker import EngineConfig
    from mocker.timing.config import TimingConfig
    from workloads import formats

    workload = formats.read(trace, format="mooncake")
    workload = replace(workload, requests=workload.requests[:requests])
    changes = FEATURES[name]
    if count := changes.get("adapters"):
        requests_of = [
            structs.replace(each, adapter=f"a{number % count}") for number, each in enumerate(workload.requests)
        ]
        workload = replace(workload, requests=requests_of)
    engine = EngineConfig(**({"block_size": 16, "num_gpu_blocks": 65_536} | changes.get("engine", {})))
    pool = Pool(replicas=8, mocker=engine, timing=TimingConfig(**changes.get("timing", {})))
    wanted = Run.alone(Settings(Deployment(pools=(pool,), router_mode="kv")))
    before = time.process_time()
    simulate(wanted, workload)
    return {
        "seconds": time.process_time() - before,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    """Measure all features."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=1 << 40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--feature", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.feature:
        print(json.dumps(measure(options.trace, options.feature, options.requests)))
        return
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in FEATURES}
    for _ in range(options.repeats):
        for name in FEATURES:
            command = [
                sys.executable,
                __file__,
                str(options.trace),
                "--requests",
                str(options.requests),
                "--feature",
                name,
            ]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            rounds[name].append(json.loads(done.stdout))
    for name, found in rounds.items():
        seconds, megabytes = (statistics.median([one[key] for one in found]) for key in ("seconds", "peak_mb"))
        print(f"{name:22}  {seconds:7.2f} s  {megabytes:6.0f} MB")


if __name__ == "__main__":
    main()
