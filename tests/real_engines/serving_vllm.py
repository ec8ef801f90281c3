"""vLLM's own server on the CPU, as its command runs it."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
from importlib import metadata

import httpx

from mocker.vllm.versions import version_of
from tests.support.servers import free_port
from tests.support.waiting import until

VLLM_FLAGS = (
    "--dtype=float32",
    "--enforce-eager",
    "--num-gpu-blocks-override=200",
    "--gpu-memory-utilization=0.2",
    "--max-num-seqs=16",
    "--block-size=32",
    "--max-model-len=4096",
)

ONE_USE = httpx.Limits(max_keepalive_connections=0)
"""vLLM closes some connections on which it has failed, without saying so."""

START_S = 480.0
"""Patience with its start: on a busy machine it takes minutes."""


@functools.cache  # 2 s: all packages are read
def installed_version():
    """Return whose rules the installed vLLM follows, None without one; importing it to ask would take long."""
    found = metadata.packages_distributions().get("vllm")
    return version_of(metadata.version(found[0])) if found else None


@contextlib.contextmanager
def vllm_serve(folder, log, *flags):
    """Run vLLM's own server for a model, named `tiny`; give its URL, which answers soon, and its process."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={folder}"]
    command += ["--served-model-name=tiny", f"--port={port}", "--host=127.0.0.1", *VLLM_FLAGS, *flags]
    environment = os.environ | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "UCX_NET_DEVICES": "lo"}
    with log.open("w") as output:
        # A group, not a session of its own: Linux shares the CPU out by sessions, and threads that spin would starve the one
        # that answers how to get at the KV.
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, process_group=0)
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def until_ready(url, process, log):
    """Wait until a server answers."""
    until(lambda: process.poll() is not None or answers(url), patience_s=START_S)
    assert process.poll() is None, log.read_text()[-3000:]


def answers(url):
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health").status_code == 200
    return False
