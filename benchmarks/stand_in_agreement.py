"""Compare stand-ins behind somebody else's router with a simulation of that router's mode, on the same workload.

    python benchmarks/stand_in_agreement.py --router PATH/vllm-router [--policy round_robin] [--mode round-robin]

Stand-ins run in real time on this host, vLLM's router (PyPI: vllm-router) sends them what `dynabench run --url` measures,
and `dynabench simulate` computes the same without either. What HTTP, the router and this host's timers add is measured
first, with requests that come one at a time; it is printed, and taken off the measured times.
"""

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

MODEL, GPU = "meta-llama/Llama-3.1-8B", "h100"
ALONE = ["--requests", "30", "--rate", "2", "--arrival", "constant", "--prefix-blocks", "0", "--osl", "8"]
ALONE += ["--isl-distribution", "constant", "--osl-distribution", "constant", "--isl", "2000"]
LOAD = ["--isl", "3000", "--prefix-blocks", "24", "--seed", "3"]
FIGURES = ("mean", "p50", "p90")


def dynabench(*words: object) -> str:
    """Run a command; return what it prints."""
    done = subprocess.run([sys.executable, "-m", "dynabench", *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return done.stdout


def free_ports(count: int) -> int:
    """Return the first of so many consecutive ports that are free now."""
    for first in range(21_000, 60_000, count):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return first
    raise SystemExit("no ports are free")


@contextlib.contextmanager
def running(command: Sequence[object], ready: str) -> Iterator[None]:
    """Run a program until the block ends; enter it once a URL answers 200."""
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError):
                if urllib.request.urlopen(ready, timeout=5).status == 200:
                    break
            if process.poll() is not None:
                raise SystemExit(f"{command[0]} ended with {process.returncode}")
            time.sleep(0.1)
        else:
            raise SystemExit(f"{ready} never answered")
        yield
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def behind_router(router: str, policy: str, workers: int) -> Iterator[str]:
    """Run stand-ins behind a router; yield its URL."""
    first = free_ports(workers + 2)
    urls = [f"http://127.0.0.1:{port}" for port in range(first, first + workers)]
    flags = ["--gpu", GPU, "--host", "127.0.0.1", "--port", first, "--replicas", workers]
    served = [sys.executable, "-m", "dynabench", "vllm", MODEL, *flags, "--enable-prompt-tokens-details"]
    port = first + workers
    routed = [router, "--host", "127.0.0.1", "--port", port, "--prometheus-port", port + 1]
    with (
        running(served, f"{urls[-1]}/health"),
        running([*routed, "--worker-urls", *urls, "--policy", policy], f"http://127.0.0.1:{port}/readiness"),
    ):
        yield f"http://127.0.0.1:{port}"


def engine_flags() -> list[object]:
    """Return the settings of the stand-ins' engines as flags of a simulation."""
    engine = json.loads(dynabench("vllm", MODEL, "--gpu", GPU, "--dry-run"))["engine"]
    names = ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len")
    return [word for name in names for word in (f"--{name.replace('_', '-')}", engine[name])]


def arm(folder: Path) -> dict[str, Any]:
    """Return the only arm of a results folder."""
    found: dict[str, Any] = next(iter(json.loads((folder / "summary.json").read_text())["arms"].values()))
    return found


def main() -> None:
    """Run and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", required=True)
    parser.add_argument("--policy", default="round_robin")
    parser.add_argument("--mode", default="round-robin")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rate", type=float, default=16.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dynabench("workload", "synth", folder / "alone.jsonl", *ALONE)
        dynabench(
            "workload", "synth", folder / "load.jsonl", "--requests", options.requests, "--rate", options.rate, *LOAD
        )
        simulated = ["--workers", options.workers, "--router-mode", options.mode, "--model", MODEL, "--gpu", GPU]
        for each in ("alone", "load"):
            dynabench("simulate", folder / f"{each}.jsonl", *simulated, *engine_flags(), "--out", folder / f"{each}-s")
            with behind_router(options.router, options.policy, options.workers) as url:
                dynabench(
                    "run", folder / f"{each}.jsonl", "--url", url, "--model", MODEL, "--out", folder / f"{each}-r"
                )
        added = arm(folder / "alone-r")["ttft"]["mean"] - arm(folder / "alone-s")["ttft"]["mean"]
        here, there = arm(folder / "load-r"), arm(folder / "load-s")
    print(f"HTTP, router and host add {1000 * added:.2f} ms to the TTFT of a lone request")
    for figure in FIGURES:
        measured, expected = here["ttft"][figure] - added, there["ttft"][figure]
        print(
            f"TTFT {figure}: {1000 * measured:.1f} ms measured, {1000 * expected:.1f} ms simulated ({measured / expected - 1:+.1%})"
        )
    for metric in ("tpot", "e2e"):
        measured, expected = here[metric]["mean"], there[metric]["mean"]
        print(
            f"{metric} mean: {1000 * measured:.2f} ms measured, {1000 * expected:.2f} ms simulated ({measured / expected - 1:+.1%})"
        )
    measured, expected = here["cache"]["hit_share"], there["cache"]["hit_share"]
    print(f"cache hit share: {measured:.1%} measured, {expected:.1%} simulated")


if __name__ == "__main__":
    main()
