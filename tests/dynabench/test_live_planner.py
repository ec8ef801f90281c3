"""A planner of real workers: it scales them, loses nothing, and changes nothing while it cannot see.

Each starts a stack and loads it for many of the planner's intervals. So what fails beside the planner is tested in the long run;
tests/dynabench/test_planner_hands.py tests the same decisions without processes.
"""

import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import httpx
import pytest

from dynabench.arm import ClientConfig, Run, Settings
from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.flags import MeasuredFrontendConfig, MeasuredRouterConfig
from dynabench.live.run import measure
from mocker import EngineConfig
from mocker.timing.config import TimingConfig
from reports import folder as results
from serving.planner import PlannerConfig
from tests.dynabench.test_handover import workload as requests
from tests.support import warm
from tests.support.commands import dynabench
from tests.support.model import write_model
from tests.support.processes import children
from tests.support.servers import free_port
from tests.support.waiting import PATIENCE_S, instances, until, wait_for
from workloads.pacing import LoadConfig

ENGINE = ("--num-gpu-blocks", 200, "--block-size", 16, "--timing", "constant", "--constant-decode-ms", 20)
ALL = ("--max-queue-depth", "none")
PLANNER = ("--planner", "dynamo-load", "--planner-interval-s", 0.2, "--max-replicas", 2)


class Served:
    """`dynabench serve` of one worker, with a planner."""

    def __init__(self, process, log, url, model):
        self.process = process
        self.url = url
        self.model = model
        self._log = log

    @property
    def log(self):
        return self._log.read_text()

    def until(self, condition, *, patience_s=PATIENCE_S):
        return until(condition, self.process, patience_s=patience_s)

    def until_says(self, text, count=1, *, patience_s=PATIENCE_S):
        self.until(lambda: self.log.count(text) >= count, patience_s=patience_s)

    def wait_for(self, count):
        wait_for(self.url, count, self.process)

    def pid_of(self, module):
        [pid] = [pid for pid, words in children(self.process).items() if module in words]
        return pid

    def body(self, prompt, max_tokens):
        return {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}

    def ask(self, prompt, max_tokens=4):
        answer = httpx.post(f"{self.url}/v1/completions", json=self.body(prompt, max_tokens), timeout=PATIENCE_S)
        return answer.json()["choices"][0]["text"]

    def num_inflight(self):
        rows = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(row.split()[-1]) for row in rows if row.startswith("dynamo_frontend_inflight_requests{"))

    @contextmanager
    def streaming(self, prompt, max_tokens):
        """Take the first piece of an answer, and hang up at the end."""
        body = self.body(prompt, max_tokens) | {"stream": True}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
            lines = answer.iter_lines()  # once it is gone, so is the answer
            next(lines)
            yield

    @contextmanager
    def load(self):
        """Keep a worker's KV more than full: all three begin, and soon there is no room for their answers."""
        with ExitStack() as stack:
            for number in range(3):
                stack.enter_context(self.streaming(f"{number}" * 1000, 2000))
            yield


@contextmanager
def serving(tmp_path, *flags, model="mock", environment=()):
    port = free_port()
    environment = os.environ | {"DYN_DISCOVERY_DIR": str(tmp_path / "d")} | dict(environment)
    command = [sys.executable, "-m", "dynabench", "serve", "--http-port", port, "--workers", 1, *ENGINE, *PLANNER, *ALL]
    log = tmp_path / "log"
    with log.open("w") as file:
        process = warm.start([*map(str, (*command, *flags))], env=environment, stdout=file, stderr=file)
    served = Served(process, log, f"http://127.0.0.1:{port}", model)
    try:
        served.wait_for(1)
        served.until_says("planning worker with dynamo-load")
        yield served
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0, served.log
        assert "Traceback" not in served.log
    finally:
        process.kill()
        process.wait()


def test_workers_come_under_load_and_leave_after_it_without_losing_a_token(tmp_path):
    prompts = ("a" * 300, "b" * 300)
    with serving(tmp_path) as served, ThreadPoolExecutor() as asking:
        with served.load():
            served.wait_for(2)
            answers = [asking.submit(served.ask, prompt, 300) for prompt in prompts]  # one goes to each
            served.until(lambda: served.num_inflight() == 5)
        served.wait_for(1)
        texts = [answer.result() for answer in answers]
        assert "waiting for requests in progress (1)" in served.log  # a worker left while it was answering
        assert texts == [served.ask(prompt, 300) for prompt in prompts]
        served.until_says("worker: 2 -> 1 workers (KV usage of all ranks is at most ")
    assert "worker: 1 -> 2 workers (KV usage of a rank is " in served.log


def test_decisions_are_logged_with_what_was_seen(tmp_path):
    with serving(tmp_path, environment={"DYN_LOG": "debug"}) as served:
        with served.load():
            served.wait_for(2)
        lines = [line for line in served.log.splitlines() if '"changes":{"worker"' in line]
        line = json.loads(lines[0][lines[0].index("{") :])
        served.until_says(": worker: 1 -> 2 (KV usage of a rank is ")
        served.until_says("; worker: 1 ready, 0 starting, 0 draining, ")
    assert line["changes"]["worker"]["replicas"] == 2
    assert line["seen"]["pools"]["worker"]["num_ready"] == 1
    [load] = line["seen"]["pools"]["worker"]["loads"]
    assert load["queued_prefill_tokens"] + load["decode_kv_tokens"] + load["queued_decode_kv_tokens"] > 3000
    assert line["seen"]["traffic"]["duration_s"] > 0


@pytest.mark.long
def test_a_planner_that_is_killed_changes_nothing_and_goes_on_once_it_is_back(tmp_path):
    with serving(tmp_path) as served:
        with served.load():
            served.wait_for(2)
            before = instances(served.url)
            os.kill(served.pid_of("dynabench.planner"), signal.SIGKILL)
            served.until_says("planner ended with code -9; restarting it")
            served.until_says("planning worker with dynamo-load", 2)
            assert instances(served.url) == before
        served.wait_for(1)


@pytest.mark.long
def test_a_planner_that_hangs_changes_nothing(tmp_path):
    with serving(tmp_path) as served:
        with served.load():
            served.wait_for(2)
            pid = served.pid_of("dynabench.planner")
            os.kill(pid, signal.SIGSTOP)
        assert served.ask("x" * 20, 100)  # longer than a planner that runs needs
        assert len(instances(served.url)) == 2
        os.kill(pid, signal.SIGCONT)
        served.wait_for(1)


@pytest.mark.long
def test_a_worker_that_does_not_start_is_tried_again_and_nothing_else_ends(tmp_path):
    model = write_model(tmp_path / "model")
    tokenizer = (model / "tokenizer.json").read_bytes()
    with serving(tmp_path, "--model-path", model, model="model") as served:
        (model / "tokenizer.json").write_text("{{ x } }")
        with served.load():
            served.until_says("worker-1 does not start: ", 3)
            assert len(instances(served.url)) == 1
            (model / "tokenizer.json").write_bytes(tokenizer)
            served.wait_for(2)


@pytest.mark.long
def test_a_start_that_hangs_is_given_up_and_another_one_is_made(tmp_path):
    model = write_model(tmp_path / "model")
    tokenizer = (model / "tokenizer.json").read_bytes()
    began_s = time.monotonic()
    with serving(tmp_path, "--model-path", model, model="model"):
        timeout_s = max(
            10, round(2 * (time.monotonic() - began_s))
        )  # a start now, on this machine, takes less than that
    with serving(tmp_path, "--model-path", model, "--startup-timeout-s", timeout_s, model="model") as served:
        (model / "tokenizer.json").unlink()
        os.mkfifo(model / "tokenizer.json")  # who reads it waits forever
        with served.load():
            served.until_says("worker: 1 -> 2 workers")
            given_up = f"1 start took longer than {timeout_s} s and is given up"
            served.until_says(given_up, patience_s=timeout_s + PATIENCE_S)
            (model / "tokenizer.json").unlink()
            (model / "tokenizer.json").write_bytes(tokenizer)
            served.wait_for(2)


@pytest.mark.long
def test_an_advisory_planner_logs_what_it_would_do_and_changes_nothing(tmp_path):
    with serving(tmp_path, "--advisory") as served, served.load():
        served.until_says("advisory: worker would have 2 workers")
        served.until_says(": worker: 1 -> 2 (KV usage of a rank is ", 3)
        assert ": advice " in served.log
        assert len(instances(served.url)) == 1
    assert "does not" not in served.log
    assert "worker-1" not in served.log


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--planner", "hpaa"), "planner 'hpaa' is unknown; did you mean hpa?"),
        (("--planner", "dynamo-sla"), "planner dynamo-sla needs a TTFT limit"),
        (
            ("--planner", "hpa", "--url", "http://127.0.0.1:1"),
            "--planner applies to dynabench's own stack, but --url measures another server",
        ),
        (
            ("--vary", "events=none"),
            "fleet.events applies only to virtual time; vary it with dynabench simulate: real processes take",
        ),
        (
            ("--planner", "hpa", "--engine", "llamacpp", "--model", "x"),
            "expected 'mocker': a planner cannot start and stop other",
        ),
    ],
)
def test_a_planner_that_cannot_plan_is_refused_in_one_line(tmp_path, flags, message):
    done = dynabench("run", *flags, "--out", tmp_path / "out")
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_record_of_a_live_run_has_what_its_planner_changed():
    engine = EngineConfig(num_gpu_blocks=100, block_size=16)
    timing = TimingConfig(timing="constant", constant_decode_ms=5)
    planner = PlannerConfig(planner="dynamo-load", planner_interval_s=0.2, max_replicas=2)
    pool = Pool(mocker=engine, timing=timing)
    deployment = Deployment(
        pools=(pool,), planner=planner, router=MeasuredRouterConfig(), frontend=MeasuredFrontendConfig()
    )
    load = LoadConfig(concurrency=12)
    workload = requests(*[(0.0, 200, 150)] * 120)
    record = measure(Run.alone(Settings(deployment, load=load, client=ClientConfig())), workload)
    assert record.requests.succeeded.all()
    assert record.fleet.planner == "dynamo-load"
    first = record.fleet.changes[0]
    assert (first.pool, first.before, first.after) == ("worker", 1, 2)
    assert record.fleet.decisions > 0
    [pool] = record.fleet.pools
    assert pool.history[0].ready == 1
    assert all(before.time_s <= after.time_s for before, after in pairwise(pool.history))
    assert max(row.ready for row in pool.history) == 2
    assert record.fleet.length_s < pool.gpu_s < 2 * record.fleet.length_s
    assert set(record.requests.worker.compressed()) == {0, 1}
    assert record.num_workers == 2


@pytest.mark.long
def test_planners_are_compared_live(tmp_path):
    flags = ["--workers", 1, "--router-mode", "round-robin", "--vary", "planner=static,dynamo-load", *PLANNER[2:]]
    done = dynabench("run", *flags, "--speedup-ratio", 20, "--max-requests", 10, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert [run.arm for run in results.read(tmp_path / "out")[1]] == ["planner static", "planner dynamo-load"]
