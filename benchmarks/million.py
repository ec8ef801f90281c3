"""A million synthetic requests on 64 workers, by the whole command: CPU, wall time and peak memory, stage by stage.

    python benchmarks/million.py [--requests 1000000] [--workers 64] [--mode kv] [--osl 64] [--charts]

The workload is written to a file first. `dynabench simulate` then reads it, simulates it, computes statistics and writes its
results folder, in a process of its own. Prompts have about 3,000 tokens on average and share their beginning with others; the
rate is about one request a second for each worker.
"""

import argparse
import contextlib
import functools
import importlib
import io
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

STAGES = {
    "read": ("dynabench.experiment.source", "read_workload"),
    "fit": ("dynabench.experiment.run", "_possible"),
    "simulate": ("dynabench.virtual.cluster", "Cluster.run"),
    "record": ("dynabench.virtual.run", "_requests"),
    "bounds": ("dynabench.experiment.run", "bounds_of"),
    "write": ("reports.folder", "_write_runs"),
    "statistics": ("reports.folder", "summary_of"),
    "charts": ("reports.charts", "draw"),
}
"""The functions of which the CPU time is taken; the rest is `other`, such as imports and the page."""


class Spent(NamedTuple):
    """What a stage cost."""

    cpu_s: float
    peak_mb: float
    """The highest memory of the process up to its end."""


def main() -> None:
    """Measure the command in a process of its own."""
    options = _options()
    if options.command:
        print(json.dumps(measured(options.command, with_charts=options.charts)))
        return
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "million.jsonl"
        _report("synthesis", options.requests, *_run(_synthesis(trace, options)))
        command = f"simulate {trace} --workers {options.workers} --router-mode {options.mode} --out {folder}/out"
        command += " --block-size 64 --num-gpu-blocks 16384 --jobs 1"
        charts = ["--charts"] * options.charts
        cpu_s, wall_s, peak_mb, out = _run([sys.executable, __file__, *charts, "--command", *command.split()])
        for stage, spent in json.loads(out.splitlines()[-1]).items():
            print(
                f"  {stage:10} {spent[0]:8.2f} s CPU {spent[0] / options.requests * 1e6:8.2f} us each, up to {spent[1]:,.0f} MB"
            )
        _report("whole command", options.requests, cpu_s, wall_s, peak_mb, out)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--mode", default="kv")
    parser.add_argument("--osl", type=int, default=64)
    parser.add_argument("--charts", action="store_true", help="draw the report's charts, too")
    parser.add_argument("--command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser.parse_args()


def _synthesis(trace: Path, options: argparse.Namespace) -> list[str]:
    """Return the command that writes the workload; its load and reuse by worker do not depend on the number of workers."""
    groups, rate = max(200 * options.workers // 64, 10), 60 * options.workers / 64
    words = f"workload synth {trace} --requests {options.requests} --rate {rate} --isl 1000 --osl {options.osl}"
    words += f" --prefix-groups {groups} --osl-distribution constant"
    return [sys.executable, "-m", "dynabench", *words.split()]


def _run(command: list[str]) -> tuple[float, float, float, str]:
    """Run a command; return its CPU seconds, wall seconds, peak memory (MB) and output."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu_s, time.perf_counter() - started, after.ru_maxrss / 1024, done.stdout  # so far: the last needs the most


def _report(name: str, requests: int, cpu_s: float, wall_s: float, peak_mb: float, _: str) -> None:
    each = cpu_s / requests * 1e6
    print(f"{name}: {cpu_s:.1f} s CPU ({each:.1f} us a request), {wall_s:.1f} s, {peak_mb:,.0f} MB", flush=True)


def measured(command: list[str], *, with_charts: bool) -> dict[str, Spent]:
    """Run a command in this process and return what its stages cost."""
    spent: dict[str, Spent] = {}
    for stage, (module, name) in STAGES.items():
        *outer, last = name.split(".")
        place: Any = functools.reduce(getattr, outer, importlib.import_module(module))
        function = getattr(place, last) if stage != "charts" or with_charts else lambda *_: []
        setattr(place, last, _timed(function, stage, spent))
    from dynabench.cli.app import main as run_command

    sys.argv = ["dynabench", *command]
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            run_command()
        except SystemExit as end:
            if end.code:
                raise
    return spent | {"other": Spent(time.process_time() - _sum_s(spent), _peak_mb())}


def _sum_s(spent: dict[str, Spent]) -> float:
    return sum(each.cpu_s for each in spent.values())


def _timed(function: Callable[..., Any], stage: str, spent: dict[str, Spent]) -> Callable[..., Any]:
    def timed(*args: Any, **more: Any) -> Any:
        started, others_s = time.process_time(), _sum_s(spent)
        result = function(*args, **more)
        inside_s = _sum_s(spent) - others_s  # of stages within this one
        before = spent[stage].cpu_s if stage in spent else 0.0
        spent[stage] = Spent(before + time.process_time() - started - inside_s, _peak_mb())
        return result

    return timed


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
