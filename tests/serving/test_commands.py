"""The commands that serve, run as a user runs them."""

import asyncio
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from serving.router.hashing import block_hashes, sequence_hashes
from serving.runtime.address import EndpointAddress
from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import DistributedRuntime
from tests.support import warm
from tests.support.commands import DYNAMO_RUN, dynamo_run, run
from tests.support.servers import Etcd, Nats, free_port
from tests.support.waiting import PATIENCE_S, until, wait_for

ROOT = Path(__file__).parents[2]
EXTRA = {"speedup_ratio": 10.0, "block_size": 16, "num_gpu_blocks": 500}


class Terminal:
    """Processes started one after the other, all ended by SIGTERM; each must end by itself with 0."""

    def __init__(self, folder, environment):
        self.processes = []
        self.environment = os.environ | {"DYN_DISCOVERY_DIR": str(folder / "d")} | environment

    def run(self, *command, start=warm.start):
        process = start([str(part) for part in command], env=self.environment, stderr=subprocess.PIPE, text=True)
        self.processes.append(process)
        return process

    def stop(self):
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        codes = []
        for process in self.processes:
            _, errors = process.communicate(timeout=PATIENCE_S)
            codes.append(process.returncode)
            assert "Traceback" not in errors, errors[-3000:]
        return codes


@contextlib.contextmanager
def terminal(folder, environment=None):
    shell = Terminal(folder, environment or {})
    try:
        yield shell
        assert shell.stop() == [0] * len(shell.processes)
    finally:
        for process in shell.processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("with_servers", [False, True], ids=["no server", "etcd and NATS"])
def test_the_guides_four_terminals(tmp_path, model_path, with_servers):
    extra = tmp_path / "mocker_args.json"
    extra.write_text(json.dumps(EXTRA))
    with contextlib.ExitStack() as stack:
        environment = {"ETCD_ENDPOINTS": "", "NATS_SERVER": ""}
        if with_servers:
            environment["ETCD_ENDPOINTS"] = stack.enter_context(Etcd()).url
            environment["NATS_SERVER"] = stack.enter_context(Nats()).url
        shell = stack.enter_context(terminal(tmp_path, environment))
        port = free_port()
        for _ in range(2):
            shell.run(
                DYNAMO_RUN, "in=dyn://dynamo.mocker.generate", "out=mocker",
                "--model-path", model_path, "--extra-engine-args", extra,
            )  # fmt: skip
        flags = [
            "--router-mode",
            "kv",
            "--kv-overlap-score-weight=1.0",
            "--router-temperature=0.0",
            "--use-kv-events=true",
        ]
        shell.run(DYNAMO_RUN, "in=http", "out=dyn", *flags, "--http-port", port, "-v")
        url = f"http://127.0.0.1:{port}"
        wait_for(url, 2)
        messages = [{"role": "user", "content": "once upon a time there was a small server " * 6}]
        workers, overlaps = set(), []

        def ask(max_tokens, **nvext):
            body = {"model": "tiny", "messages": messages, "max_tokens": max_tokens, "nvext": nvext}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            return answer

        for _ in range(3):
            answer = ask(20)
            worker = answer.headers["x-worker-id"]
            workers.add(worker)
            overlaps.append(int(answer.headers["x-overlap-tokens"]))
            again = functools.partial(ask, 1, backend_instance_id=int(worker, 16))
            until(lambda again=again: int(again().headers["x-overlap-tokens"]) > overlaps[-1])  # the router has heard
            messages.append(answer.json()["choices"][0]["message"])
            messages.append({"role": "user", "content": "and then"})
        assert len(workers) == 1
        assert 0 == overlaps[0] < overlaps[1] < overlaps[2]


def test_an_engine_of_ones_own(tmp_path, model_path):
    with terminal(tmp_path) as shell:
        port = free_port()
        shell.run(sys.executable, ROOT / "examples" / "own_engine.py", model_path)
        shell.run(DYNAMO_RUN, "in=http", "out=dyn", "--http-port", port)
        wait_for(f"http://127.0.0.1:{port}", 1)
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            answer = client.completions.create(model="reverse", prompt=[70, 71, 72], max_tokens=2)
            backwards = client.completions.create(model="reverse", prompt=[72, 71], max_tokens=10)
        assert answer.usage.completion_tokens == 2
        assert answer.choices[0].text == backwards.choices[0].text[::-1] or len(answer.choices[0].text) == 2


@pytest.mark.parametrize("engine", ["echo_core", "echo_full", "mocker"])
def test_an_engine_and_http_in_one_process(tmp_path, model_path, engine):
    with terminal(tmp_path, {"DYN_TOKEN_ECHO_DELAY_MS": "1"}) as shell:
        port = free_port()
        shell.run(DYNAMO_RUN, "in=http", f"out={engine}", "--http-port", port, model_path)
        wait_for(f"http://127.0.0.1:{port}", 1)
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            asked = {"model": "tiny", "messages": [{"role": "user", "content": "héllo 🙂"}], "max_tokens": 50}
            ignoring = {"extra_body": {"nvext": {"ignore_eos": True}}}
            whole = client.chat.completions.create(**asked, **ignoring).choices[0].message.content
            chunks = client.chat.completions.create(**asked, **ignoring, stream=True)
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert streamed == whole
        if engine == "echo_full":
            assert whole == "héllo 🙂"
        elif engine == "echo_core":
            assert whole == "user\nhéllo 🙂\nassistant\n"


async def known_blocks(folder, prompt):
    """Ask the stand-alone router how many blocks of a prompt it knows some worker to hold."""
    config = RuntimeConfig(etcd_endpoints="", nats_server="", discovery_dir=str(folder / "d"))
    tokens = np.frombuffer(prompt.encode(), np.uint8).astype(np.uint32)
    asked = {"num_tokens": len(tokens), "sequence_hashes": sequence_hashes(block_hashes(tokens, 16))}
    async with await DistributedRuntime.connect(config) as runtime:
        client = await runtime.client(EndpointAddress("dynamo", "router", "best_worker"))
        await client.wait_for_instances()
        (told,) = [item async for item in client.generate(asked)]
    return told["overlap_blocks"]


def test_a_router_of_its_own_between_frontend_and_workers(tmp_path):
    with terminal(tmp_path) as shell:
        port = free_port()
        workers = ["--endpoint", "dyn://workers.backend.generate", "--model-name", "m", "--block-size", "16"]
        for _ in range(2):
            shell.run(sys.executable, "-m", "serving.mocker", *workers, "--speedup-ratio", "20")
        shell.run(sys.executable, "-m", "serving.router_service", "--workers", "dyn://workers.backend.generate")
        shell.run(sys.executable, "-m", "serving.frontend", "--http-port", port, "--namespace", "dynamo")
        url = f"http://127.0.0.1:{port}"
        wait_for(url, 1)
        cached = []
        for turn in range(3):
            prompt = "a prompt of some length to be cached " * (4 + turn)
            answer = httpx.post(f"{url}/v1/completions", json={"model": "m", "prompt": prompt, "max_tokens": 5}).json()
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            until(lambda prompt=prompt: asyncio.run(known_blocks(tmp_path, prompt)) == len(prompt) // 16)
        assert 0 == cached[0] < cached[1] < cached[2]


def test_several_frontend_processes_share_a_port_and_add_up_their_counts(tmp_path):
    with terminal(tmp_path) as shell:
        port = free_port()
        shell.run(sys.executable, "-m", "serving.mocker", "--model-name", "m", "--speedup-ratio", "0")
        shell.run(sys.executable, "-m", "serving.frontend", "--http-port", port, "--http-workers", "3")
        url = f"http://127.0.0.1:{port}"
        wait_for(url, 1)

        def is_answered():
            body = {"model": "m", "prompt": "x", "max_tokens": 2}
            return httpx.post(f"{url}/v1/completions", json=body).status_code == 200

        for _ in range(40):  # each on a connection of its own, to a process that may not know the model yet
            until(is_answered)
        counts = set()
        for _ in range(10):
            lines = httpx.get(f"{url}/metrics").text.splitlines()
            counts.add(next(line for line in lines if line.startswith("dynamo_frontend_output_tokens_total")))
        assert counts == {'dynamo_frontend_output_tokens_total{model="m"} 80.0'}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["in=dyn://a", "out=dyn"], "cannot use an endpoint for both in and out"),
        (["foo=bar"], "must start with in= or out="),
        (["in=ftp", "out=mocker"], "invalid in= option 'ftp'; expected one of text, stdin, http"),
        (["in=http", "out=magic"], "invalid out= option 'magic'"),
        (["in=http", "out=dyn", "--context-length", "5"], "--context-length is for workers"),
        (
            ["in=dyn://a", "out=mocker", "--tensor-parallel-size", "2"],
            "--tensor-parallel-size is for engines that run models",
        ),
        (["in=http", "out=echo_core"], "needs a tokenizer: pass --model-path; out=mocker needs none"),
        (["in=http", "out=echo_full"], "so that we know which model to imitate"),
        (["in=http", "out=dyn", "--http-port", "99999"], "http_port must be from 0 to 65535"),
        (["in=http", "out=mocker", "--max-inflight-requests", "0"], "max_inflight_requests must be from 1"),
        (["in=dyn://a", "out=mocker", "--migration-limit", "1024"], "migration_limit must be from 0 to 1023"),
        (["in=dyn://a", "out=mocker", "--bogus"], "Unknown option"),
        (["in=http", "out=mocker", "--role", "prefill"], "--role prefill is for workers on the network (in=dyn://)"),
        (["in=http", "out=dyn", "--role", "decode"], "--role decode is for workers on the network (in=dyn://)"),
        (
            ["in=dyn://", "out=echo_full", "--role", "prefill", "--model-name", "x"],
            "role is 'prefill'; expected 'aggregated' with out=echo_full: only mocker, vllm, sglang, trtllm hand KV over",
        ),
        (
            ["in=dyn://", "out=llamacpp", "--role", "decode", "x.gguf"],
            "role is 'decode'; expected 'aggregated' with llamacpp: only mocker, vllm, sglang, trtllm hand KV over",
        ),
        (["in=dyn://", "out=mocker", "--role", "both"], 'Invalid value "both" for --role'),
        (
            ["in=dyn://a", "out=mistralrs", "--tensor-parallel-size", "256"],
            "tensor_parallel_size must be from 1 to 255",
        ),
        (["in=stdin", "out=echo_full", "--batch-concurrency", "0"], "batch_concurrency must be at least 1, not 0"),
        (["in=http", "out=mocker", "m", "--", "--x", "1"], "out=mocker takes no arguments after --"),
        (["in=dyn://a", "out=mocker", "--extra-engine-args", "none.json"], "a JSON file was expected"),
        (
            ["in=http", "out=dyn", "--http-port", "0", "--etcd-endpoints", "127.0.0.1:1"],
            "etcd does not answer at http://127.0.0.1:1",
        ),
        (
            ["in=http", "out=dyn", "--http-port", "0", "--nats-server", "nats://127.0.0.1:1"],
            "NATS does not answer at nats://127.0.0.1:1",
        ),
        (["in=http", "out=dyn", "-v", "-v", "-v"], "at most -vv"),
        (["in=http", "out=dyn", "--http-port", "PORT"], "Address already in use; choose another with --http-port"),
    ],
)
def test_what_does_not_fit_is_told_in_one_line(tmp_path, arguments, message):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = [str(taken.getsockname()[1]) if word == "PORT" else word for word in arguments]
        done = dynamo_run(*words, env={"DYN_DISCOVERY_DIR": str(tmp_path / "d")}, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_worker_says_what_it_serves_and_where_once_it_is_ready(tmp_path):
    with terminal(tmp_path) as shell:
        worker = shell.run(DYNAMO_RUN, "in=dyn://x", "out=mocker")
        assert "serving mock at dyn://dynamo.x.generate" in worker.stderr.readline()


@pytest.mark.parametrize(
    "words",
    [
        ["in=http", "out=mocker", "--http-port", "0"],
        ["in=stdin", "out=echo_full", "--model-name", "m"],
        ["in=dyn://x", "out=mocker", "--discovery-dir", "FOLDER"],
    ],
)
def test_a_folder_whose_name_is_too_long_for_a_socket_is_named_in_one_line(tmp_path, words):
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    words = [str(folder) if word == "FOLDER" else word for word in words]
    environment = os.environ | {"TMPDIR": str(folder), "DYN_DISCOVERY_DIR": str(tmp_path / "d")}
    done = subprocess.run(
        [DYNAMO_RUN, *words], input="", capture_output=True, text=True, timeout=PATIENCE_S, env=environment
    )
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert f"{folder}" in done.stderr
    assert "choose a shorter --discovery-dir or TMPDIR" in done.stderr


def test_help_shows_no_secrets_and_children_are_started_without_them_in_their_arguments(tmp_path):
    secrets = {"DYN_API_KEY": "xyzzy", "ETCD_AUTH_PASSWORD": "plugh", "NATS_AUTH_TOKEN": "plover"}
    shown = run(sys.executable, "-m", "serving.frontend", "--help-all", env=secrets).stdout
    assert "--api-key" in shown
    assert not [secret for secret in secrets.values() if secret in shown]
    with terminal(tmp_path, secrets) as shell:
        port = free_port()
        parent = shell.run(
            sys.executable, "-m", "serving.frontend", "--http-port", port, "--http-workers", "2", start=subprocess.Popen
        )
        url = f"http://127.0.0.1:{port}"

        def asks_for_the_key():
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"{url}/v1/models").status_code == 401

        until(asks_for_the_key, parent)
        pids = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        assert len(pids) == 2
        arguments = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids).decode()
        assert not [secret for secret in secrets.values() if secret in arguments]
        assert httpx.get(f"{url}/v1/models", headers={"authorization": "Bearer xyzzy"}).status_code == 200


def test_a_question_in_the_terminal_passes_the_key_of_the_frontend_that_it_starts(tmp_path):
    words = ["in=stdin", "out=echo_full", "--model-name", "parrot", "--api-key", "xyzzy"]
    done = dynamo_run(*words, input="say this")
    assert (done.returncode, done.stdout, done.stderr) == (0, "say this\n", "")


def test_dynamo_run_without_arguments_shows_its_help_and_can_say_its_version():
    shown = dynamo_run(check=True).stdout
    assert "--router-mode" in shown
    assert "in=" in shown
    assert dynamo_run("--version").stdout.startswith("dynamo-run ")


@pytest.mark.parametrize(
    "module", ["serving.cli.dynamo_run", "serving.vllm", "serving.mocker", "serving.frontend", "dynabench"]
)
def test_no_box_of_the_help_is_empty(module):
    done = run(sys.executable, "-m", module, "--help", check=True)
    lines = done.stdout.splitlines()
    boxes = [place for place, line in enumerate(lines) if line.startswith("╭")]
    assert boxes
    for place in boxes:
        assert lines[place + 1].strip("│ "), "\n".join(lines[place : place + 3])
        assert not lines[place + 1].startswith("╰")
