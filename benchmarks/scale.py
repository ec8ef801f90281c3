"""How the cost of a simulated request grows: with workers, requests, output tokens and the length of prompts.

    python benchmarks/scale.py [--modes kv round-robin marginal-all] [--requests 20000] [--chart docs/scale.png]

Figures are CPU microseconds a request inside the simulation, each from a process of its own, for the same load on each
worker. The slope is that of a straight line through the logarithms: 0 if the cost does not grow, 1 if it is proportional.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

DEFAULT = {"workers": 64, "requests": 20_000, "output tokens": 64, "prompt tokens": 3_000}
GROWING = {
    "workers": (8, 64, 256, 1_000),
    "requests": (2_000, 20_000, 200_000),
    "output tokens": (16, 64, 256, 1_024),
    "prompt tokens": (1_000, 4_000, 16_000, 64_000),
}
"""What grows, and how far; all else is as in `DEFAULT`."""
SHARED = 0.7
"""Share of a prompt that is one of the common prefixes."""

Point = dict[str, int]


def measure(mode: str, point: Point) -> float:
    """Return the CPU time of a request (us), measured in this process."""
    from dynabench.arm import Run, Settings
    from dynabench.deployment.description import Deployment, Pool
    from dynabench.virtual.run import simulate
    from mocker import EngineConfig
    from workloads import Workload
    from workloads.synthesize import SynthConfig, synthesize

    workers, prompt, output = point["workers"], point["prompt tokens"], point["output tokens"]
    config = SynthConfig(
        requests=point["requests"],
        rate=workers * min(1, 3_000 / prompt) * min(1, 64 / output),
        isl=round(prompt * (1 - SHARED)),
        osl=output,
        prefix_groups=max(4 * workers, 8),
        prefix_blocks=max(round(prompt * SHARED / 512), 1),
        osl_distribution="constant",
    )
    workload = Workload("synthetic", 512, synthesize(config))
    engine = EngineConfig(block_size=64, num_gpu_blocks=16_384)
    run = Run.alone(Settings(Deployment(pools=(Pool(replicas=workers, mocker=engine),), router_mode=mode)))
    started = time.process_time()
    simulate(run, workload)
    return (time.process_time() - started) / point["requests"] * 1e6


def measured_alone(mode: str, point: Point) -> float:
    """Return the same, measured in a new process."""
    command = [sys.executable, __file__, "--point", json.dumps([mode, point])]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def slope(values: list[int], costs: list[float]) -> float:
    """Return the slope of the line through the logarithms."""
    return float(np.polyfit(np.log(values), np.log(costs), 1)[0])


def draw(path: Path, found: dict[str, dict[str, list[float]]]) -> None:
    """Draw all costs on logarithmic axes."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(found), figsize=(12, 3.2), sharey=True, layout="constrained")
    for axis, (name, costs) in zip(axes, found.items(), strict=True):
        for mode, each in costs.items():
            axis.loglog(GROWING[name], each, marker="o", label=f"{mode}: slope {slope(list(GROWING[name]), each):.2f}")
        axis.set_xlabel(name)
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize=7)
    axes[0].set_ylabel("CPU us a request")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, print a table, and draw it if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", nargs="+", default=["round-robin", "kv", "marginal-all"])
    parser.add_argument("--requests", type=int, default=DEFAULT["requests"])
    parser.add_argument("--grow", nargs="+", default=list(GROWING), choices=list(GROWING))
    parser.add_argument("--chart", type=Path)
    parser.add_argument("--point", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.point:
        print(measure(*options.point))
        return
    found: dict[str, dict[str, list[float]]] = {}
    for name in options.grow:
        for mode in options.modes:
            points = [DEFAULT | {"requests": options.requests} | {name: value} for value in GROWING[name]]
            costs = found.setdefault(name, {})[mode] = [measured_alone(mode, point) for point in points]
            row = "  ".join(f"{value:,}: {cost:.0f}" for value, cost in zip(GROWING[name], costs, strict=True))
            print(f"{name:14}  {mode:12}  {row}  slope {slope(list(GROWING[name]), costs):.2f}", flush=True)
    if options.chart:
        draw(options.chart, found)


if __name__ == "__main__":
    main()
