"""SDKs that agents are written with, against the mocker. `.ci/engines clients` makes their environment and runs these tests."""

import contextlib
import importlib.util
import os
import sys

import httpx
import pytest

from tests.support import warm
from tests.support.servers import free_port
from tests.support.waiting import PATIENCE_S, until

if importlib.util.find_spec("langchain_openai") is None:
    collect_ignore_glob = ["test_*"]

SHARE = 0.5
"""Share of the answers that call a tool, if they may: an agent calls some, and comes to an end."""


@pytest.fixture(scope="session")
def url(tmp_path_factory):
    port = free_port()
    environment = os.environ | {"DYN_DISCOVERY_DIR": str(tmp_path_factory.mktemp("d"))}
    command = ["-m", "dynabench.cli.app", "serve", "--workers", "1", "--http-port", str(port), "--speedup-ratio", "20"]
    process = warm.start([sys.executable, *command, "--tool-call-share", str(SHARE)], env=environment)

    def serves():
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        return False

    try:
        until(serves)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


@pytest.fixture(scope="session", autouse=True)
def environment(url):
    """The environment variables that SDKs read."""
    os.environ |= {"OPENAI_API_KEY": "x", "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
