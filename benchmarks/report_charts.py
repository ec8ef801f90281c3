"""Measure the CPU time of a comparison's charts, and the size of its page; exit with 1 above 2 s or 1 MB.

    python benchmarks/report_charts.py [--arms 3] [--arms 7] [--requests 2000] [--workers 8]

Simulates this many settings of the bundled modes, then draws their charts once in a fresh process. The imports of the
charts are counted separately. The limit of 2 s is for 3 arms, that of 1 MB for 7.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

MOST_S, MOST_BYTES = 2.0, 1_000_000
DRAW = """
import sys, time
from pathlib import Path
before = time.process_time()
from reports import charts, folder
from reports.figures import slo
from reports.summarize import summarize
imported = time.process_time()
manifest, runs = folder.read(Path(sys.argv[1]))
shown = {run.arm: run.measured for run in runs}
figures = summarize(runs, [slo.parse_slo(text) for text in manifest["limits"]])
start = time.process_time()
charts.draw(shown, figures, Path(sys.argv[1]) / "again")
print(imported - before, time.process_time() - start)
"""


def measure(num_arms: int, options: argparse.Namespace) -> tuple[float, float, int]:
    """Return the CPU time of the charts and of their imports (s), and the size of the page."""
    values = ",".join(str(512 << number) for number in range(num_arms))
    with tempfile.TemporaryDirectory() as home:
        out = Path(home) / "out"
        trace = Path(home) / "trace.jsonl"
        load = ["--requests", options.requests, "--isl", 2000, "--rate", 2 * options.workers, "--prefix-blocks", 8]
        _run("-m", "dynabench", "workload", "synth", trace, *load)
        command = ["simulate", trace, "--workers", options.workers, "--router-mode", "kv", "--slo", "ttft.p99 <= 2s"]
        arguments = [*command, "--vary", f"max_num_batched_tokens={values}", "--out", out]
        _run("-m", "dynabench", *arguments)
        imported_s, drawn_s = map(float, _run("-c", DRAW, out).split())
        return drawn_s, imported_s, (out / "report.html").stat().st_size


def _run(*arguments: object) -> str:
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return done.stdout


def main() -> int:
    """Measure, print, and check the limits."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--arms", type=int, action="append")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=8)
    options = parser.parse_args()
    is_fine = True
    for num_arms in options.arms or [3, 7]:
        drawn_s, imported_s, size = measure(num_arms, options)
        print(f"{num_arms} arms: charts {drawn_s:.2f} s of CPU (imports {imported_s:.2f} s), page {size / 1e6:.2f} MB")
        is_fine &= (num_arms > 3 or drawn_s <= MOST_S) and size <= MOST_BYTES
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
