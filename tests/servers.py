"""Real etcd and NATS servers on free ports, for the tests that need them."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BIN = Path(sys.executable).parent


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A server process that can be stopped and started again on the same port with the same data."""

    def __init__(self):
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="dynabench-test-"))
        self.process = None

    def command(self):
        raise NotImplementedError

    def start(self):
        log = (self.folder / "log").open("ab")
        self.process = subprocess.Popen(self.command(), stdout=log, stderr=log, start_new_session=True)
        log.close()
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return self
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise RuntimeError(f"{self.command()[0]} did not start:\n{(self.folder / 'log').read_text()[-2000:]}")

    def stop(self):
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait()
            self.process = None

    def close(self):
        self.stop()
        shutil.rmtree(self.folder)

    __enter__ = start

    def __exit__(self, *_):
        self.close()


class Nats(Server):
    @property
    def url(self):
        return f"nats://127.0.0.1:{self.port}"

    def command(self):
        return [BIN / "nats-server", "-js", "-a", "127.0.0.1", "-p", str(self.port), "-sd", self.folder / "data"]


class Etcd(Server):
    def __init__(self):
        super().__init__()
        self.peer_port = free_port()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def command(self):
        peer = f"http://127.0.0.1:{self.peer_port}"
        return [
            BIN / "etcd",
            *("--data-dir", self.folder / "data"),
            *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"default={peer}", "--log-level", "error"),
        ]
