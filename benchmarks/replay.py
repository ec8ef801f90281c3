"""Measure the speed of virtual time on the Mooncake conversation trace: simulation time, requests/s and memory.

    python benchmarks/replay.py TRACE [--repeats 3]

Each case runs in its own process, so that its peak memory is measured separately.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

CASES = [
    {
        "workers": workers,
        "mode": mode,
        "block_size": block_size,
        "num_gpu_blocks": 2048 * 512 // block_size,
        "async_scheduling": is_async,
        "kv_offloading_size": host_gib,
    }
    for host_gib in (0, 1024)
    for block_size in (512, 16)
    for workers in (4, 8)
    for mode in ("round-robin", "kv")
    for is_async in (True, False)
    if is_async or not host_gib
]


def measure(trace: Path, case: dict[str, Any], repeats: int) -> dict[str, float]:
    """Run one case in this process."""
    from dynabench.arm import Run, Settings
    from dynabench.deployment.description import Deployment, Pool
    from dynabench.virtual.run import simulate
    from mocker import EngineConfig
    from workloads import formats

    workload = formats.read(trace, format="mooncake")
    workers, mode = case.pop("workers"), case.pop("mode")
    wanted = Run.alone(
        Settings(Deployment(pools=(Pool(replicas=workers, mocker=EngineConfig(**case)),), router_mode=mode))
    )
    times = []
    for _ in range(repeats):
        run = simulate(wanted, workload)
        times.append(run.wall_s)
    requests = run.requests
    return {
        "seconds": statistics.median(times),
        "requests_per_s": len(workload) / statistics.median(times),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "ttft_ms": float((requests.first_token_s - requests.sent_s).mean() * 1000),
        "hit_share": float(requests.cached_tokens.sum() / requests.isl.sum()),
    }


def main() -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.trace, options.case, options.repeats)))
        return
    from dynabench.experiment.manifest import is_compiled

    print(f"cores: {'compiled' if is_compiled() else 'interpreted'}")
    print("host GiB  block  workers  mode         async  seconds  requests/s  peak MB  TTFT mean ms  hit share")
    for case in CASES:
        command = [sys.executable, __file__, str(options.trace), "--repeats", str(options.repeats)]
        done = subprocess.run([*command, "--case", json.dumps(case)], check=True, capture_output=True, text=True)
        got = json.loads(done.stdout)
        print(
            f"{case['kv_offloading_size']:8}  {case['block_size']:5}  {case['workers']:7}  {case['mode']:12}  {'yes' if case['async_scheduling'] else 'no':5}  {got['seconds']:7.3f}  "
            f"{got['requests_per_s']:10,.0f}  {got['peak_mb']:7.0f}  {got['ttft_ms']:12.1f}  {got['hit_share']:9.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
