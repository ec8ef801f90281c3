"""Do the same seeds still give the same bytes? Simulates every router mode in four deployments, and prints a digest of each run.

    python benchmarks/same.py > before.txt      # at one commit
    python benchmarks/same.py > after.txt       # at another: diff the two

Deployments: aggregated, disaggregated with faults, KV tiers, a planner. Workloads: shared prefixes, long prompts, and
requests under pressure. Digests are of all columns of all requests, of the gaps between tokens, and of the fleet's changes.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

from serving.router.policies.modes import ROUTER_MODES

SYNTH = {
    "prefixes": ("--requests", "250", "--rate", "20", "--seed", "1"),
    "long": ("--requests", "120", "--rate", "6", "--isl", "6000", "--osl", "300", "--seed", "2"),
    "pressure": ("--requests", "250", "--rate", "200", "--isl", "900", "--osl", "200", "--seed", "3"),
}
POOL = {"model": "meta-llama/Llama-3.1-8B", "gpu": "h100"}
DEPLOYMENTS: dict[str, dict[str, object]] = {
    "aggregated": {"pools": {"worker": {"replicas": 4, "num_gpu_blocks": 3000}}},
    "apart": {
        "pools": {"prefill": {"role": "prefill", "replicas": 2}, "decode": {"role": "decode", "replicas": 3}},
        "transfer": {"bandwidth_gb_s": 20},
        "fleet": {"events": "at 2s: kill worker 2; at 3s: kill worker 1; at 4s: +1 decode; at 5s: slow worker 3 x2"},
    },
    "tiers": {
        "pools": {
            "worker": {
                "replicas": 3, "num_gpu_blocks": 2000, "kv_offloading_size": 2, "kv_disk_size": 8,
                "kv_disk_bandwidth_gb_s": 3, "kv_prefetch_policy": "timeout",
            }
        },
        "kv_store": {"kv_store_size": 64, "kv_store_bandwidth_gb_s": 5},
    },
    "planner": {
        "pools": {"worker": {"replicas": 2}},
        "fleet": {"startup_fixed_s": 1, "drain_policy": "hand-over"},
        "planner": {"planner": "hpa", "planner_interval_s": 1.0, "max_replicas": 5},
    },
}  # fmt: skip


def digest(columns: pd.DataFrame) -> str:
    """Return a digest of all values."""
    return hashlib.sha256(columns.to_csv(float_format="%.17g").encode()).hexdigest()[:16]


def runs(folder: Path, workload: str, deployment: str) -> list[str]:
    """Simulate every mode and return a line for each."""
    trace, file, out = folder / f"{workload}.jsonl", folder / f"{deployment}.json", folder / f"{workload}-{deployment}"
    if not trace.exists():
        dynabench("workload", "synth", trace, *SYNTH[workload])
    file.write_text(json.dumps(POOL | DEPLOYMENTS[deployment]))
    able = [mode for mode in ROUTER_MODES if deployment == "aggregated" or not mode.startswith("oracle")]
    modes = [word for mode in able for word in ("--router-mode", mode)]
    dynabench("simulate", trace, "-f", file, *modes, "--jobs", "2", "--out", out, "--no-noise-floor")
    requests = pd.read_parquet(out / "requests.parquet")
    gaps = np.load(out / "gaps.npz")
    lines = [f"{workload} {deployment} {arm}: {len(rows)} {digest(rows)}" for arm, rows in requests.groupby("arm")]
    gap_digest = hashlib.sha256(b"".join(gaps[name].tobytes() for name in sorted(gaps))).hexdigest()[:16]
    fleets = [run.get("fleet") for run in json.loads((out / "experiment.json").read_text())["runs"]]
    fleet_digest = hashlib.sha256(json.dumps(fleets, sort_keys=True).encode()).hexdigest()[:16]
    return [*lines, f"{workload} {deployment} gaps {gap_digest} fleet {fleet_digest}"]


def dynabench(*words: object) -> None:
    """Run a command, or end with what it said."""
    done = subprocess.run([sys.executable, "-m", "dynabench", *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for workload in SYNTH:
            for deployment in sys.argv[1:] or DEPLOYMENTS:
                print("\n".join(runs(Path(folder), workload, deployment)), flush=True)
