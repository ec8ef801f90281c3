"""`dynabench vllm`, run as a user runs it."""

import json
import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from dynabench.reference.command import all_commands
from foundation.errors import UserError
from serving.stand_in.vllm.flags.arguments import arguments
from tests.support import warm
from tests.support.commands import dynabench, in_process
from tests.support.servers import free_port
from tests.support.waiting import until

LLAMA = "meta-llama/Llama-3.1-8B"


def test_flags_of_vllm_and_ours_stand_beside_each_other_in_any_order():
    config = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
    words = ("-tp", "2", "--gpu", "h100", LLAMA, "--max_model_len=8k", "--kv-transfer-config", config, "--api-key", "x")
    done = dynabench("vllm", *words, "--speedup-ratio=2", "--dry-run")
    found = json.loads(done.stdout)
    assert (found["timing"]["tensor_parallel_size"], found["timing"]["speedup_ratio"]) == (2, 2.0)
    assert (found["engine"]["max_model_len"], found["kv_handover"]["role"]) == (8000, "kv_both")
    assert found["http"]["api_keys"] == ["..."]


def test_what_is_wrong_is_said_in_one_line():
    done = dynabench("vllm", "--portt", "1")
    assert done.returncode == 2
    assert done.stderr == "dynabench: --portt: unknown to vllm serve 0.32.0; did you mean --port?\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("serve", LLAMA), "serve: leave it out; "),
        (("--gpuu", "h100"), "--gpuu: unknown to vllm serve 0.32.0; did you mean --gpu?"),
        ((LLAMA, "-pp", "2"), "--pipeline-parallel-size 2: this server has no stages yet; "),
        (("--help=zzz",), "--help=zzz: no group and no flag of vllm serve has this word; "),
    ],
)
def test_what_is_wrong_is_named_with_the_way_out(words, message):
    with pytest.raises(UserError, match=re.escape(message)):
        in_process("vllm", *words)


def test_what_keeps_it_from_starting_is_said_in_the_last_line_with_its_flag():
    port = str(free_port())
    taken = socket.create_server(("127.0.0.1", 0))
    busy = ("--host", "127.0.0.1", "--port", str(taken.getsockname()[1]))
    with taken:
        for words, message in (
            (
                ("--port", port, "--enable-lora", "--lora-modules", "a=/nope"),
                "dynabench: --lora-modules a=/nope: Loading",
            ),
            (("--port", port, "--ssl-certfile", "/nope"), "dynabench: --ssl-certfile /nope: expected a certificate"),
            (busy, "dynabench: port "),
        ):
            done = dynabench("vllm", LLAMA, *words)
            assert done.returncode == 2
            assert done.stderr.splitlines()[-1].startswith(message)
            assert "Traceback" not in done.stderr and "listening on" not in done.stderr
    assert done.stderr.rstrip().endswith("choose another with --port")


def test_the_help_leads_to_vllms_flags():
    text = " ".join(dynabench("vllm", "--help").stdout.split())
    assert "--gpu" in text and "Every flag of vllm serve 0.32.0 is known" in text and "SchedulerConfig (18)" in text


def test_the_help_of_vllms_flags_is_searched():
    assert "--watermark NUMBER" in in_process("vllm", "--help=watermark")


def test_no_flag_of_ours_has_the_name_of_one_of_vllms():
    (command,) = [each for each in all_commands() if each.name == "dynabench vllm"]
    ours = {name for group in command.groups.values() for setting in group for name in setting.names}
    assert not ours & {flag for argument in arguments().values() for flag in argument.flags}


def test_it_serves_until_a_signal_and_says_whose_step_times_they_are():
    port = free_port()
    command = [sys.executable, "-m", "dynabench", "vllm", LLAMA, "--port", str(port), "--enforce-eager"]
    with warm.start(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: _is_healthy(port), process)
        finally:
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate()
    assert process.returncode == 0
    assert "step times: generic" in log
    assert "accepted without effect: --enforce-eager" in log


def _is_healthy(port):
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.TransportError:
        return False
