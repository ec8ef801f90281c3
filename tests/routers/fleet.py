"""Stand-ins for vLLM, started as a user starts them, and programs of others in front of them."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.servers import consecutive_ports, free_port
from tests.support.waiting import PATIENCE_S, until

STAND_IN = [sys.executable, "-m", "dynabench", "vllm"]
MODEL = "tiny"
SPEED = ("--speedup-ratio", "20")


class StandIn:
    """One that runs, and what its metrics say."""

    def __init__(self, process: subprocess.Popen, port: int) -> None:
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def count(self, name: str, **labels: str) -> float:
        """Return the sum of the samples with that name and these labels."""
        text = httpx.get(f"{self.url}/metrics").text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        found = [sample for sample in samples if sample.name == name and labels.items() <= sample.labels.items()]
        assert found, f"{name} {labels} is not among {sorted({sample.name for sample in samples})}"
        return sum(sample.value for sample in found)

    @property
    def num_answers(self) -> int:
        """Requests that it has completed."""
        return int(self.count("vllm:request_success_total"))

    @property
    def num_hits(self) -> int:
        """Tokens that it found in its cache."""
        return int(self.count("vllm:prefix_cache_hits_total"))

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Tokens of the prompts, and of the answers."""
        return int(self.count("vllm:prompt_tokens_total")), int(self.count("vllm:generation_tokens_total"))

    def kill(self) -> None:
        """End it as a crash does."""
        self.process.kill()
        self.process.wait()


def needs(program: str) -> pytest.MarkDecorator:
    """Skip tests by name where a program is not installed."""
    return pytest.mark.skipif(
        shutil.which(program) is None, reason=f"{program} is not installed: see .ci/engines routers"
    )


@contextlib.contextmanager
def stand_ins(*each: tuple[str, ...], model: str | Path = MODEL) -> Iterator[list[StandIn]]:
    """Run stand-ins, each with these flags; yield them once they answer /health."""
    with contextlib.ExitStack() as stack:
        found = []
        for flags in each:
            port = free_port()
            command = [*STAND_IN, str(model), "--host", "127.0.0.1", "--port", str(port), *SPEED, *flags]
            found.append(
                StandIn(stack.enter_context(running(command, VLLM_NIXL_SIDE_CHANNEL_PORT=str(free_port()))), port)
            )
        for each_one in found:
            until(lambda one=each_one: answers(f"{one.url}/health"), each_one.process)
        yield found


@contextlib.contextmanager
def three() -> Iterator[list[StandIn]]:
    """Run three alike behind one command, which end together; yield them once they answer /health."""
    ports = consecutive_ports(3)
    command = [*STAND_IN, MODEL, "--host", "127.0.0.1", "--port", str(ports[0]), *SPEED, "--replicas", "3"]
    with running(command) as process:
        found = [StandIn(process, port) for port in ports]
        for each in found:
            until(lambda one=each: answers(f"{one.url}/health"), process)
        yield found


@contextlib.contextmanager
def in_front(command: list[str], ready: str) -> Iterator[None]:
    """Run somebody's program until it is ready at a URL."""
    with running(command) as process:
        until(lambda: answers(ready), process)
        yield


@contextlib.contextmanager
def running(command: list[str], **environment: str) -> Iterator[subprocess.Popen]:
    """Run a command in a process group of its own; end the group on the way out."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, text=True, start_new_session=True, env=os.environ | environment
        )
        try:
            yield process
        except BaseException:
            log.seek(0)
            print(f"{' '.join(map(str, command))} said:\n{log.read()[-3000:]}")
            raise
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(PATIENCE_S)


def answers(url: str) -> bool:
    """Say whether a GET there succeeds."""
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url, timeout=5).status_code == 200
    return False


def run(*command: str | Path, **environment: str) -> str:
    """Run a program to its successful end; return what it printed."""
    done = subprocess.run(
        [*map(str, command)],
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout
