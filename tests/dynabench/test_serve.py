"""`dynabench serve`: one command starts, keeps and stops a whole stack."""

import os
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path

import httpx
import pytest

from tests.support import warm
from tests.support.commands import dynabench
from tests.support.model import write_model
from tests.support.processes import children
from tests.support.servers import free_port
from tests.support.waiting import PATIENCE_S, instances, until, wait_for

EXAMPLE = Path(__file__).parents[2] / "examples" / "deployment.yaml"


def start(tmp_path, *arguments):
    environment = os.environ | {"DYN_DISCOVERY_DIR": str(tmp_path / "d")}
    command = [sys.executable, "-m", "dynabench", "serve", *map(str, arguments)]
    return warm.start(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process, number):
    pids = [*children(process)]
    process.send_signal(number)
    log, _ = process.communicate(timeout=PATIENCE_S)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert process.returncode == 0, log
    assert "Traceback" not in log
    return log


def test_the_example_serves_two_models_restarts_what_dies_and_stops_clean(tmp_path):
    port = free_port()
    file = tmp_path / "deployment.yaml"
    file.write_text(EXAMPLE.read_text().replace("8080", str(port)))
    process = start(tmp_path, "--deployment", file)
    url = f"http://127.0.0.1:{port}"
    wait_for(url, 3, process)
    assert [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]] == ["chatty", "parrot"]
    body = {"model": "parrot", "messages": [{"role": "user", "content": "say this"}]}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "say this"
    before = instances(url)
    os.kill(next(iter(children(process))), signal.SIGKILL)
    until(lambda: len(instances(url)) == 3 and instances(url) != before, process)
    log = finish(process, signal.SIGINT)
    assert "chatty-0 ended with code -9; restarting it" in log


def test_several_frontends_share_the_port(tmp_path):
    port = free_port()
    process = start(tmp_path, "--http-port", port, "--http-workers", 2, "--workers", 1, "--speedup-ratio", 0)
    listening = (line.split()[0] for line in process.stdout if f"listening on http://127.0.0.1:{port}" in line)
    assert set(islice(listening, 2)) == {"frontend-0", "frontend-1"}
    finish(process, signal.SIGTERM)


def test_flags_alone_start_a_stack_with_a_router_of_its_own(tmp_path):
    port = free_port()
    process = start(
        tmp_path,
        "--http-port",
        port,
        "--workers",
        2,
        "--router-mode",
        "kv",
        "--standalone-router",
        "--speedup-ratio",
        20,
    )
    url = f"http://127.0.0.1:{port}"
    wait_for(url, 1, process)  # the router is what the frontend sees
    answer = httpx.post(f"{url}/v1/completions", json={"model": "mock", "prompt": "x", "max_tokens": 4})
    assert len(answer.json()["choices"][0]["text"]) == 4
    finish(process, signal.SIGTERM)


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ("pools: {a: {block_sise: 3}}", (), "pools.a.block_sise is unknown; did you mean block_size?"),
        ("pools: {a: {}}\nfrontend: {http_port: 99999}", (), "frontend.http_port is 99999; expected from 0 to 65535"),
        ("pools: {a: {engine: vllm, model: gone, max_num_seqs: 3}}", (), "pools.a.max_num_seqs is unknown"),
        ("pools: {a: {}}", ("--workers", 3), "--workers cannot be used with --deployment "),
        (
            "pools: {a: {}}",
            ("--http-port", 0, "--speedup-ratio", 3),
            "--speedup-ratio, --http-port cannot be used with --deployment",
        ),
        ("pools: {a: {}}", ("--standalone-router",), "--standalone-router cannot be used with --deployment"),
        ("pools: {a: {}}", ("--router-mode", "kv"), "--router-mode cannot be used with --deployment"),
        ("workers: [{count: 2}]", (), "expected pools: the list of workers is now a mapping of pools"),
        (None, (), "deployment.yaml: cannot be read (No such file or directory)"),
    ],
)
def test_a_deployment_that_cannot_be_is_one_line(tmp_path, text, flags, message):
    path = tmp_path / "deployment.yaml"
    if text is not None:
        path.write_text(text)
    process = start(tmp_path, "-f", path, *flags)
    said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2, said
    assert message in said
    assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (None, "does not exist; expected a folder, a GGUF file or a Hugging Face id"),
        ("tokenizer.json", "tokenizer"),
        ("chat_template.jinja", "the model's chat template is not valid: line 1: unexpected '}'"),
    ],
)
def test_a_worker_that_cannot_start_ends_the_stack_and_says_why(tmp_path, broken, message):
    if broken is not None:
        write_model(tmp_path / "model")
        (tmp_path / "model" / broken).write_text("{{ x } }")
    process = start(tmp_path, "--http-port", 0, "--model-path", tmp_path / "model")
    log, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2, log
    last = log.splitlines()[-1]
    assert last.startswith("dynabench: worker-")
    assert "does not start: " in last
    assert message in last
    assert "Traceback" not in log


def test_the_second_ctrl_c_ends_everything_at_once_and_leaves_nothing(tmp_path):
    port = free_port()
    process = start(
        tmp_path, "--http-port", port, "--timing", "constant", "--constant-decode-ms", 50, "--speedup-ratio", 1
    )
    url = f"http://127.0.0.1:{port}"
    wait_for(url, 2, process)
    pids = [*children(process)]
    body = {"model": "mock", "prompt": "x", "max_tokens": 5000, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as answer:
        pieces = answer.iter_lines()
        next(pieces)
        process.send_signal(signal.SIGINT)
        log = []
        while (
            not (line := process.stdout.readline()).startswith("  frontend")
            or "waiting for requests in progress (1)" not in line
        ):
            assert line
            log.append(line)
        assert any("Ctrl-C again stops at once" in line for line in log)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=PATIENCE_S)
        assert "error" in "".join(pieces)  # told, not cut
    assert process.returncode == 130
    assert "Traceback" not in "".join(log) + rest
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not list((tmp_path / "d").iterdir())


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&- 2>&-"])
def test_a_stack_runs_without_its_standard_streams(tmp_path, closed):
    port = free_port()
    environment = os.environ | {"DYN_DISCOVERY_DIR": str(tmp_path / "d")}
    command = f'exec "$0" -m dynabench serve --http-port {port} --workers 1 {closed}'
    process = subprocess.Popen(
        ["/bin/sh", "-c", command, sys.executable], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    wait_for(f"http://127.0.0.1:{port}", 1, process)
    process.terminate()
    log, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, log
    assert b"Traceback" not in log


def test_kv_survives_its_worker_in_the_store_and_the_store_may_die(tmp_path):
    port = free_port()
    tiers = ["--kv-offloading-size", 1, "--kv-disk-size", 4, "--kv-store-size", 4]
    flags = ["--http-port", port, "--workers", 1, "--block-size", 16, "--speedup-ratio", 20, "--num-gpu-blocks", 100]
    process = start(tmp_path, *flags, *tiers)
    url = f"http://127.0.0.1:{port}"
    wait_for(url, 1, process)

    def ask():
        body = {"model": "mock", "prompt": "a" * 641, "max_tokens": 3, "seed": 1}
        answer = httpx.post(f"{url}/v1/completions", json=body).json()
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def kill(number):
        before = instances(url)
        pid = [*children(process)][number]
        os.kill(pid, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{pid}").exists() and len(instances(url)) == 1, process)
        return before

    text, cached = ask()
    assert cached == 0

    def survives():
        before = kill(1)
        until(lambda: len(instances(url)) == 1 and instances(url) != before, process)
        return ask() == (text, 640)

    assert any(survives() for _ in range(5))  # a worker that is killed too early has not written it yet
    kill(0)
    assert ask() == (text, 640)
    log = finish(process, signal.SIGINT)
    assert "kv-store ended with code -9; restarting it" in log
    assert "is not there" not in log.partition("stopping: ")[2]  # the store ends after its workers


def logged(process, text):
    """Return the first line of a log with a text."""
    return next(line for line in process.stdout if text in line)


STACK = ("--workers", 1, "--speedup-ratio", 0, "--http-port")


def test_a_stack_that_finds_workers_of_another_says_where_and_how_to_be_alone(tmp_path):
    ports = free_port(), free_port()
    first = start(tmp_path, *STACK, ports[0])
    wait_for(f"http://127.0.0.1:{ports[0]}", 1, first)
    second = start(tmp_path, *STACK, ports[1])
    line, told = logged(second, "not started by this command"), logged(first, "not started by this command")
    assert "1 worker of mock was" in told
    assert "1 worker of mock was" in line
    assert f"namespace dynamo of folder {tmp_path / 'd'}" in line
    assert "--discovery-dir or --namespace (DYN_NAMESPACE" in line
    finish(second, signal.SIGTERM)
    finish(first, signal.SIGTERM)


def test_v_makes_the_processes_log_more_and_vvv_is_refused(tmp_path):
    process = start(tmp_path, *STACK, free_port(), "-v")
    assert logged(process, "DEBUG").split()[0] in ("worker-0", "frontend", "frontend-0")
    finish(process, signal.SIGTERM)
    refused = dynabench("serve", "-vvv")
    assert (refused.returncode, refused.stderr) == (2, "dynabench: expected at most -vv\n")


def test_a_stack_with_a_namespace_of_its_own_is_alone_and_says_nothing(tmp_path):
    ports = free_port(), free_port()
    stacks = []
    for port, name in zip(ports, ("one", "two"), strict=True):
        stacks.append(start(tmp_path, *STACK, port, "--namespace", name))
        wait_for(f"http://127.0.0.1:{port}", 1, stacks[-1])
    assert [len(instances(f"http://127.0.0.1:{port}")) for port in ports] == [1, 1]
    os.kill(next(iter(children(stacks[1]))), signal.SIGKILL)
    before = instances(f"http://127.0.0.1:{ports[1]}")
    until(lambda: instances(f"http://127.0.0.1:{ports[1]}") not in ([], before), stacks[1])
    for process in stacks:
        assert "not started by this command" not in finish(process, signal.SIGTERM)
