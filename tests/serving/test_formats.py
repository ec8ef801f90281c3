"""`--tool-call-parser` and `--reasoning-parser`: the formats of a model's answers, on every command line that serves one."""

import re
from pathlib import Path

import httpx
import pytest

from serving.cli import dynamo_run as program
from serving.cli.dynamo_run import split_ways
from serving.cli.job import Job, check_job
from tests.dynabench.test_serve import finish, start
from tests.support.commands import dynabench, dynamo_run
from tests.support.servers import free_port
from tests.support.waiting import wait_for

DOCS = Path(__file__).parents[2] / "docs"
FORMATS = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


class StoppedError(Exception):
    """What a job would do is known."""


def documented():
    """Return the lines of the docs that name formats for dynamo-run."""
    lines = [line.strip().removeprefix("$ ") for page in DOCS.glob("*.md") for line in page.read_text().splitlines()]
    return [line for line in lines if line.startswith("dynamo-run ") and "-parser " in line]


@pytest.mark.parametrize("line", documented())
def test_the_command_lines_of_the_docs_parse(line):
    _, *words = line.split()
    shown = dynamo_run(*words, "--dry-run")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "AsyncEngineArgs" in shown.stdout


def test_the_docs_name_formats_for_dynamo_run():
    assert len(documented()) >= 2


def job_of(monkeypatch, *words):
    """Return the job that dynamo-run would do."""
    seen = []

    def stop(job: Job):
        check_job(job)
        seen.append(job)
        raise StoppedError

    monkeypatch.setattr(program, "check_job", stop)
    way_in, way_out, flags = split_ways([*words])
    command, bound, _ = program.app.parse_args(flags, exit_on_error=False, print_error=False)
    with pytest.raises(StoppedError):
        command(*bound.args, way_in=way_in, way_out=way_out, engine_arguments=(), **bound.kwargs)
    return seen[0]


@pytest.mark.parametrize("way_in", ["in=http", "in=dyn://a.b.c", "in=text"])
@pytest.mark.parametrize(
    "way_out", ["mocker", "vllm", "sglang", "llamacpp", "mistralrs", "trtllm", "pystr:x.py", "http://127.0.0.1:1"]
)
def test_the_worker_of_every_engine_gets_both_formats(monkeypatch, way_in, way_out):
    worker = job_of(monkeypatch, way_in, f"out={way_out}", "--model-path", "x", *FORMATS).worker
    assert (worker.tool_call_parser, worker.reasoning_parser) == ("hermes", "qwen3")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["in=http", "out=mocker", "--tool-call-parser", "nonsense"], "'nonsense' is unknown: expected one of .*hermes"),
        (["in=dyn://", "out=mocker", "--reasoning-parser", "nonsense"], "'nonsense' is unknown: .*qwen3"),
        (["in=http", "out=dyn", "--tool-call-parser", "hermes"], "--tool-call-parser is for workers, not for the frontend"),
        (["in=http", "out=echo_full", "--model-name", "m", "--tool-call-share", "1"], "--tool-call-share is for out=mocker"),
    ],
)  # fmt: skip
def test_formats_that_nobody_reads_are_refused(words, message):
    refused = dynamo_run(*words)
    assert refused.returncode == 2
    assert re.fullmatch(f"dynamo-run: .*{message}.*\n", refused.stderr)


@pytest.mark.parametrize("command", ["serve", "run"])
@pytest.mark.parametrize("flag", ["--tool-call-parser", "--reasoning-parser"])
def test_dynabench_names_the_formats_that_it_knows(command, flag):
    refused = dynabench(command, flag, "nonsense")
    assert refused.returncode == 2
    assert re.search(r"_parser 'nonsense' is unknown: expected one of deepseek_", refused.stderr)


def answer(url):
    body = {"model": "mock", "messages": [{"role": "user", "content": "x"}], "tools": [TOOL], "max_tokens": 200}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]


def test_the_engines_of_dynabench_serve_call_tools_in_the_format_that_is_named(tmp_path):
    port = free_port()
    words = ("--workers", 1, "--tool-call-share", 1, "--tool-call-parser", "mistral", "--speedup-ratio", 0)
    process = start(tmp_path, "--http-port", port, *words)
    url = f"http://127.0.0.1:{port}"
    wait_for(url, 1, process)
    said = answer(url)
    finish(process, 2)
    assert said["finish_reason"] == "tool_calls"
    assert said["message"]["tool_calls"][0]["function"]["name"] == "weather"


def test_dynabench_run_measures_with_the_formats_that_are_named(tmp_path):
    words = ("--workers", 1, "--max-requests", 3, "--rate-scale", 50, "--router-mode", "random", *FORMATS)
    done = dynabench("run", *words, "--out", tmp_path / "r", "--speedup-ratio", 0)
    assert done.returncode == 0, done.stderr


def test_a_mocker_behind_dynamo_run_calls_tools(monkeypatch):
    job = job_of(monkeypatch, "in=http", "out=mocker", "--tool-call-share", "0.5")
    assert job.answers.tool_call_share == 0.5
