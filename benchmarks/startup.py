"""Measure whole commands, in processor and wall seconds, and how well a sweep uses two cores.

    python benchmarks/startup.py [--rounds 3] [--trace FILE]

Each command is a fresh process, and its processes count; shown is the least of all rounds. On a busy machine wall times
say little. So two efficiencies of a sweep of 8 points are printed: that of its wall time, and that of a machine with
nothing else to do. The latter is the processor time with one job over twice that of the longest way through the sweep
with two jobs: what the first process does, and the busier one of the two that simulate.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

SWEEP = ("--router-mode", "kv", "--vary", "workers=4,5,6,7,8,9,10,11")
COMMANDS: dict[str, tuple[str, ...]] = {
    "dynabench --help": ("--help",),
    "dynabench simulate --help": ("simulate", "--help"),
    "dynabench simulate": ("simulate", "--out", "{out}"),
    "dynabench simulate --jobs 1": ("simulate", "--jobs", "1", "--out", "{out}"),
    "dynabench simulate --jobs 2": ("simulate", "--jobs", "2", "--out", "{out}"),
}
WATCH_EVERY_S = 0.02


class Spent(NamedTuple):
    """What a command took (s)."""

    cpu_s: float
    wall_s: float
    longest_s: float
    """Processor time of the first process and of the busiest one that it started."""


def measure(arguments: Sequence[str]) -> Spent:
    """Run a command in a fresh folder and return what it took."""
    with tempfile.TemporaryDirectory() as home:
        words = [word.format(out=Path(home) / "out") for word in arguments]
        before, began = os.times(), time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "dynabench", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        children: dict[int, float] = {}
        while process.poll() is None:
            children |= dict(_children(process.pid))
            time.sleep(WATCH_EVERY_S)
        wall_s, after = time.monotonic() - began, os.times()
    if process.returncode:
        raise SystemExit(f"dynabench {' '.join(words)} ended with {process.returncode}")
    cpu_s = after.children_user - before.children_user + after.children_system - before.children_system
    return Spent(cpu_s, wall_s, cpu_s - sum(children.values()) + max(children.values(), default=0.0))


def _children(pid: int) -> Iterator[tuple[int, float]]:
    """Yield the processes that a process started, with the processor time of each so far (Linux)."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            for child in task.read_text().split():
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                yield int(child), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except OSError:  # it has just ended
            continue


def least(arguments: Sequence[str], rounds: int) -> Spent:
    """Return the least of what a command took in several rounds."""
    found = [measure(arguments) for _ in range(rounds)]
    return Spent(*map(min, zip(*found, strict=True)))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trace", type=Path, help="what the sweep simulates (default: the bundled workload)")
    options = parser.parse_args()
    print("| command | processor | wall |\n|---|---|---|")
    for name, arguments in COMMANDS.items():
        spent = least(arguments, options.rounds)
        print(f"| `{name}` | {spent.cpu_s:.2f} s | {spent.wall_s:.2f} s |", flush=True)
    trace = [str(options.trace)] if options.trace else []
    alone, both = (
        least(["sweep", *trace, *SWEEP, "--jobs", jobs, "--out", "{out}"], options.rounds) for jobs in ("1", "2")
    )
    for name, spent in (("--jobs 1", alone), ("--jobs 2", both)):
        print(f"| sweep of 8 points, `{name}` | {spent.cpu_s:.2f} s | {spent.wall_s:.2f} s |")
    print(f"\nefficiency on two cores: {alone.cpu_s / (2 * both.wall_s):.0%} by wall time, ", end="")
    print(f"{alone.cpu_s / (2 * both.longest_s):.0%} by the longest way ({both.longest_s:.2f} s)")


if __name__ == "__main__":
    main()
