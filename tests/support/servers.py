"""Real etcd and NATS servers on free ports, for the tests that need them."""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

from tests.support.commands import BIN
from tests.support.waiting import until


def free_port():
    """Return a port below those that the system hands out by itself, so that nobody takes it before its server does."""
    while True:
        port = random.randrange(12_000, 30_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def consecutive_ports(count):
    """Return ports that follow each other, free all of them."""
    while True:
        first = free_port()
        ports = range(first, first + count)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in ports:
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return ports


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
        try:
            until(self.is_listening, self.process)
        except AssertionError as error:
            said = (self.folder / "log").read_text()[-2000:]
            self.close()
            raise RuntimeError(f"{self.command()[0]} did not start:\n{said}") from error
        return self

    def is_listening(self):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
            return True
        return False

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
    def __init__(self, *flags, scheme="nats"):
        super().__init__()
        self.flags = flags
        self.scheme = scheme

    @property
    def url(self):
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def command(self):
        where = ["-a", "127.0.0.1", "-p", str(self.port), "-sd", self.folder / "data"]
        return [BIN / "nats-server", "-js", *where, *self.flags]


class Etcd(Server):
    def __init__(self, *flags, scheme="http"):
        super().__init__()
        self.flags = flags
        self.scheme = scheme
        self.peer_port = free_port()

    @property
    def url(self):
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def command(self):
        peer = f"http://127.0.0.1:{self.peer_port}"
        return [
            BIN / "etcd",
            *("--data-dir", self.folder / "data"),
            *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"default={peer}", "--log-level", "error"),
            *self.flags,
        ]


class Proxy:
    """Passes connections on to a port of this host, until told to forget those that there are, as a NAT does."""

    def __init__(self, port):
        self._target = port
        self._writers = []
        self._mute = set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for writer in self._writers:
            writer.close()

    def forget(self):
        """Let nothing through on the connections of now; they stay open."""
        self._mute.update(self._writers)

    async def _pass_on(self, reader, writer):
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers += [writer, far_writer]
        await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))

    async def _pump(self, reader, writer):
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if writer not in self._mute:
                    writer.write(data)
            if writer not in self._mute:
                writer.close()
