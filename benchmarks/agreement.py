"""Check that `dynabench run` (real stack, speedup 1) and `dynabench simulate` agree: print the differences of metrics.

    python benchmarks/agreement.py [--repeats 1] [--workers 4]
    python benchmarks/agreement.py --apart [--prefill-workers 2] [--decode-workers 2] [--transfer shm] [--flow source-first]

There are three workloads of moderate load: the bundled one, and synthetic ones with longer prompts and with much
sharing. With --apart, prefill and decode run on separate workers, and the exit code is 1 unless TTFT agrees within 5%
or 3 ms and the mean ITL within 2%.

The overhead outside the engines on this machine (HTTP, routing, hops) is measured first, with requests that come one at
a time, and becomes a setting of the simulation; --bare leaves that out.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reports.figures.split import PARTS

METRICS = ("ttft", "itl", "tpot", "e2e")
FIGURES = ("mean", "p90")
MODES = ("round-robin", "kv")
WORKLOADS = {
    "bundled": None,
    "long prompts": ["--requests", "200", "--isl", "6000", "--rate", "4", "--seed", "1"],
    "much sharing": ["--requests", "200", "--isl", "512", "--prefix-blocks", "8", "--rate", "5", "--seed", "2"],
}
ALONE = ["--requests", "40", "--rate", "4", "--arrival", "constant", "--prefix-blocks", "0"]
ALONE += ["--isl-distribution", "constant", "--osl-distribution", "constant", "--osl", "8"]
SHORT, LONG = 256, 8000
"""Prompt lengths of requests that come one at a time."""
TTFT_SHARE, TTFT_S, ITL_SHARE = 0.05, 0.003, 0.02
"""Allowed differences between live and simulated runs with disaggregation."""


def dynabench(*arguments: object) -> None:
    """Run a command; show its output only if it fails."""
    done = subprocess.run([sys.executable, "-m", "dynabench", *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)


def flags_of(options: argparse.Namespace) -> dict[str, list[object]]:
    """Return the deployment as flags of each command; both have the same links."""
    if not options.apart:
        return {
            command: ["--workers", options.workers, "--repeats", options.repeats] for command in ("simulate", "run")
        }
    pools = ["--prefill-workers", options.prefill_workers, "--decode-workers", options.decode_workers]
    pools += ["--flow", options.flow]
    return {"simulate": pools, "run": [*pools, "--transfer", options.transfer]}


def made(folder: Path, name: str, synth: list[str] | None) -> list[Path]:
    """Return a workload as arguments of the command."""
    if synth is None:
        return []
    path = folder / f"{name.replace(' ', '-')}.jsonl"
    dynabench("workload", "synth", path, *synth)
    return [path]


def both(
    folder: Path, name: str, workload: list[Path], flags: dict[str, list[object]], modes: Sequence[str] = MODES
) -> dict[str, Any]:
    """Return the arms of a simulated and of a live run."""
    arms = {}
    for command in ("simulate", "run"):
        out = folder / f"{name}-{command}"
        chosen = [word for mode in modes for word in ("--router-mode", mode)]
        dynabench(command, *workload, *chosen, *flags[command], "--out", out)
        arms[command] = json.loads((out / "summary.json").read_text())["arms"]
    return arms


def overhead(folder: Path, flags: dict[str, list[object]]) -> list[object]:
    """Return the overhead outside the engines of this machine as flags: the delays of requests that come singly."""
    late = {}
    for length in (SHORT, LONG):
        name = f"alone-{length}"
        workload = made(folder, name, [*ALONE, "--isl", str(length)])
        arms = both(folder, name, workload, flags, ["kv"])
        there, here = (arms[command]["kv"]["split"] for command in ("simulate", "run"))
        late[length] = {part: here[part] - there[part] for part in PARTS if here[part] is not None}
    token_s = max(late[LONG]["queue"] - late[SHORT]["queue"], 0.0) / (LONG - SHORT)
    found = {
        "request-overhead-ms": (late[SHORT]["queue"] - SHORT * token_s) * 1e3,
        "prompt-overhead-us": token_s * 1e6,
        "handover-overhead-ms": late[SHORT].get("decode_queue", 0.0) * 1e3,
        "answer-overhead-ms": late[SHORT].get("first_step", late[SHORT]["prefill"]) * 1e3,
    }
    return [word for flag, value in found.items() for word in (f"--{flag}", round(max(value, 0.0), 3))]


def compare(simulated: dict[str, Any], live: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the differences of an arm's figures, and those that exceed the limits."""
    cells, beyond = [], []
    for metric in METRICS:
        for figure in FIGURES:
            expected, found = simulated[metric][figure], live[metric][figure]
            cells.append(f"{metric} {figure} {found * 1000:.2f} ms ({found / expected - 1:+.1%})")
            off = abs(found - expected)
            is_off = metric == "ttft" and off > max(TTFT_SHARE * expected, TTFT_S)
            if is_off or ((metric, figure) == ("itl", "mean") and off > ITL_SHARE * expected):
                beyond.append(cells[-1])
    return cells, beyond


def compare_split(simulated: dict[str, Any], live: dict[str, Any]) -> list[str]:
    """Return each part of the live mean TTFT, with its difference from the simulation."""
    found = [(part, simulated["split"][part], live["split"][part]) for part in PARTS]
    return [f"{part} {there * 1000:.2f} ms ({(there - here) * 1000:+.2f} ms)" for part, here, there in found]


def main() -> None:
    """Run and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--prefill-workers", type=int, default=2)
    parser.add_argument("--decode-workers", type=int, default=2)
    parser.add_argument("--flow", default="source-first")
    parser.add_argument("--transfer", default="shm")
    options = parser.parse_args()
    flags, beyond = flags_of(options), []
    with tempfile.TemporaryDirectory() as folder:
        if not options.bare:
            flags["simulate"] += overhead(Path(folder), flags)
            print("simulated with", *flags["simulate"], flush=True)
        for name in options.only:
            arms = both(Path(folder), name, made(Path(folder), name, WORKLOADS[name]), flags)
            for mode in MODES:
                cells, off = compare(arms["simulate"][mode], arms["run"][mode])
                print(f"{name:13} {mode:12} " + "  ".join(cells), flush=True)
                if options.apart:
                    parts = compare_split(arms["simulate"][mode], arms["run"][mode])
                    print(f"{'':13} {'TTFT is':12} " + "  ".join(parts), flush=True)
                    beyond += [f"{name}, {mode}: {cell}" for cell in off]
    for line in beyond:
        print(f"beyond the limits: {line}")
    sys.exit(1 if beyond else 0)


if __name__ == "__main__":
    main()
