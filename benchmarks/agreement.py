"""Do `dynabench run` (real stack, speedup 1) and `dynabench simulate` agree? Prints the relative difference of each metric.

    python benchmarks/agreement.py [--repeats 1] [--workers 4]

Three workloads of moderate load: the bundled one, and synthetic ones with longer prompts and with much sharing.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

METRICS = ("ttft", "itl", "tpot", "e2e")
FIGURES = ("mean", "p90")
WORKLOADS = {
    "bundled": None,
    "long prompts": ["--requests", "200", "--isl", "6000", "--rate", "4", "--seed", "1"],
    "much sharing": ["--requests", "200", "--isl", "512", "--prefix-blocks", "8", "--rate", "5", "--seed", "2"],
}


def dynabench(*arguments: object) -> None:
    """Run a command; its output matters only if it fails."""
    done = subprocess.run([sys.executable, "-m", "dynabench", *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)


def main() -> None:
    """Run and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, synth in WORKLOADS.items():
            workload = []
            if synth is not None:
                path = Path(folder) / f"{name.replace(' ', '-')}.jsonl"
                dynabench("workload", "synth", path, *synth)
                workload = [path]
            summaries = {}
            for command in ("simulate", "run"):
                out = Path(folder) / f"{name}-{command}"
                common = ["--workers", options.workers, "--repeats", options.repeats, "--out", out]
                dynabench(command, *workload, "--router-mode", "round-robin", "--router-mode", "kv", *common)
                summaries[command] = json.loads((out / "summary.json").read_text())["arms"]
            for arm in ("round-robin", "kv"):
                cells = []
                for metric in METRICS:
                    for figure in FIGURES:
                        simulated, live = (summaries[command][arm][metric][figure] for command in ("simulate", "run"))
                        cells.append(f"{metric} {figure} {live * 1000:.2f} ms ({live / simulated - 1:+.1%})")
                print(f"{name:13} {arm:12} " + "  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
