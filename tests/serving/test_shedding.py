"""Load shedding over HTTP: what finds every worker full is refused at once, and nothing that was accepted is."""

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.serving.test_commands import free_port, terminal
from tests.serving.test_faults import ENDLESS, are_beginnings, ask, busy, expected, whole
from tests.support.stacks import running
from tests.support.waiting import until, wait_for

SMALL = {
    "timing": "constant",
    "constant_decode_ms": 10.0,
    "constant_prefill_ms": 10.0,
    "speedup_ratio": 1.0,
    "max_num_seqs": 2,
}
"""An engine that runs two at once: by default two more may wait."""


def answers(url, prompts, max_tokens):
    """Ask for completions at once; return what came."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: whole(url, prompt, max_tokens), prompts))


def test_more_than_run_and_may_wait_are_refused_at_once_and_taken_again_afterwards():
    with running(1, engine=SMALL) as stack:
        refused = {}

        def one_more():
            until(lambda: busy(stack.url) == 4)
            body = {"model": "mock", "prompt": "one more", "n": 2, "max_tokens": 5}
            answer = httpx.post(f"{stack.url}/v1/completions", json=body)
            refused.update(status=answer.status_code, retry=answer.headers["retry-after"], **answer.json()["error"])
            where = {"model": "mock", "prompt": "x", "nvext": {"annotations": ["query_instance_id"]}}
            assert "worker_instance_id" in httpx.post(f"{stack.url}/v1/completions", json=where).text

        prompts = [f"prompt {number}" for number in range(4)]
        assert are_beginnings(ask(stack.url, prompts, ENDLESS, one_more, more=1, num_begun=2), prompts)
        assert (refused["status"], refused["retry"], refused["type"]) == (429, "1", "rate_limit_error")
        assert refused["message"] == "all workers are full, please retry later"
        metrics = httpx.get(f"{stack.url}/metrics").text
        assert 'dynamo_frontend_model_rejection_total{endpoint="completions",model="mock"} 1.0' in metrics
        assert answers(stack.url, prompts, 5) == [expected(prompt, 5) for prompt in prompts]


def test_with_the_limit_off_all_are_taken():
    with running(1, engine=SMALL, router={"max_queue_depth": None}) as stack:
        prompts = [f"prompt {number}" for number in range(20)]
        assert answers(stack.url, prompts, 20) == [expected(prompt, 20) for prompt in prompts]


def test_a_request_of_more_choices_than_there_is_room_for_is_accepted_whole():
    with running(1, engine=SMALL) as stack:
        body = {"model": "mock", "prompt": "many", "n": 10, "max_tokens": 5}
        answer = httpx.post(f"{stack.url}/v1/completions", json=body)
        assert len(answer.json()["choices"]) == 10


def test_what_a_lost_worker_had_goes_to_another_though_that_is_full():
    with running(2, engine=SMALL) as stack:
        victim = stack.group.processes["worker-0"]
        prompts = [f"prompt {number}" for number in range(8)]

        def kill():
            until(lambda: busy(stack.url) == 8)
            os.kill(victim, signal.SIGKILL)

        assert are_beginnings(ask(stack.url, prompts, ENDLESS, kill, more=20, num_begun=4), prompts)


def test_a_router_of_its_own_sheds_alike(tmp_path):
    with terminal(tmp_path) as shell:
        port = free_port()
        engine = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
        worker = ["--endpoint", "dyn://workers.backend.generate", "--model-name", "mock"]
        shell.run(sys.executable, "-m", "serving.mocker", *worker, *engine)
        shell.run(sys.executable, "-m", "serving.router_service", "--workers", "dyn://workers.backend.generate")
        shell.run(sys.executable, "-m", "serving.frontend", "--http-port", port, "--namespace", "dynamo")
        url = f"http://127.0.0.1:{port}"
        wait_for(url, 1)

        def status(number):
            body = {"model": "mock", "prompt": f"prompt {number}", "max_tokens": 300}
            return httpx.post(f"{url}/v1/completions", json=body).status_code

        def statuses():
            with ThreadPoolExecutor(8) as pool:
                return sorted(pool.map(status, range(8)))

        until(lambda: statuses() == [200] * 4 + [429] * 4)  # once the router has the worker's first report
