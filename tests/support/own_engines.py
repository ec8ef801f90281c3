"""A frontend and an engine of one's own in a Python file, as processes."""

import contextlib
import os
import sys
from pathlib import Path

import httpx

from tests.support import warm
from tests.support.servers import free_port
from tests.support.waiting import PATIENCE_S, until


@contextlib.contextmanager
def serving_engine(module, folder, models, *flags):
    """Run a module's file as a worker, and a frontend with these flags; give the frontend's URL once it serves so many models."""
    environment = os.environ | {"DYN_DISCOVERY_DIR": str(folder), "DYN_LOG": "off"}
    port = free_port()
    commands = [[Path(module.__file__)], ["-m", "serving.frontend", "--http-port", port, *flags]]
    processes = [warm.start([sys.executable, *map(str, command)], env=environment) for command in commands]
    url = f"http://127.0.0.1:{port}"

    def has_all():
        with contextlib.suppress(httpx.HTTPError):
            return len(httpx.get(f"{url}/v1/models").json()["data"]) == models
        return False

    try:
        until(has_all)
        yield url
    finally:
        for process in processes:
            process.terminate()
        assert [process.wait(PATIENCE_S) for process in processes] == [0, 0]
