"""Measure what a plan costs: CPU time of the whole command, simulations, those that were cut, and requests simulated.

    python benchmarks/plan.py ../shared/traces/AzureLLMInferenceTrace_conv.csv.gz [--against PATH] [--rounds 3] [--jobs 1]

`--against` is another tree or build of this project (what PYTHONPATH needs): both take turns, and the answers are compared.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

QUESTION = (
    "--model",
    "meta-llama/Llama-3.1-70B",
    "--gpu",
    "h100",
    "--slo",
    "ttft.p99 <= 2s",
    "--slo",
    "itl.p99 <= 60ms",
)


class Cost(NamedTuple):
    """What a plan cost, and what it chose."""

    cpu_s: float
    points: int
    cut: int
    requests: int
    """Requests that had ended when the simulations did; of a run that was cut by an older version, none is known."""
    chosen: str
    gpus_by_load: str


def cost_of(tree: Path, trace: Path, jobs: int) -> Cost:
    """Plan with the code of a tree, in a process and a folder of their own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "plan"
        words = (str(trace), *QUESTION, "--jobs", str(jobs), "--out", str(out))
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "dynabench", "plan", *words],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(tree)},
            check=True,
            capture_output=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        answer = json.loads((out / "plan.json").read_text())
        points = [json.loads(file.read_text()) for file in (out / "points").iterdir()]
    best = answer["layouts"][0]
    return Cost(
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        len(points),
        sum(point["kind"] == "cut" for point in points),
        sum(point.get("requests") or 0 for point in points),
        f"{best['name']}, {best['workers']} workers, {best['gpus']} GPUs",
        ", ".join(f"{at['load']:g}x: {at['gpus']}" for at in answer["loads"]),
    )


def main() -> None:
    """Print a line for each tree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    trees = [tree.resolve() for tree in (options.tree, options.against) if tree is not None]
    found: dict[Path, list[Cost]] = {tree: [] for tree in trees}
    for number in range(options.rounds):
        for tree in trees if number % 2 == 0 else trees[::-1]:
            found[tree].append(cost_of(tree, options.trace.resolve(), options.jobs))
    for tree, costs in found.items():
        times = sorted(cost.cpu_s for cost in costs)
        one = costs[0]
        print(
            f"{tree}: {statistics.median(times):.1f} CPU s ({times[0]:.1f} to {times[-1]:.1f}), {one.points} simulations, "
            f"{one.cut} of them cut, {one.requests:,} requests; {one.chosen}; GPUs by load: {one.gpus_by_load}"
        )


if __name__ == "__main__":
    main()
