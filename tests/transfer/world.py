"""Agents for tests: in this process, and in others that can be stopped and killed."""

import contextlib
import os
import random
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from serving.runtime.memory.network import Network
from serving.runtime.world import SeededWorld
from serving.transfer.make import make_agent
from tests.support import world
from tests.support.nodes import on

TOKEN = b"a token that the whole cluster knows"
MIB = 1 << 20
PATIENCE_S = 100.0

KINDS = ["shm", "tcp", "memory"]
"""`memory` is TCP between nodes of a memory network."""


def pattern(num_bytes, start=0):
    """Return what `fill` puts there: no two pages are the same."""
    words = np.arange(start // 8, (start + num_bytes) // 8 + 1, dtype="<u8") * np.uint64(0x9E3779B97F4A7C15)
    return words.view(np.uint8)[start % 8 : start % 8 + num_bytes].tobytes()


def fill(memory):
    memory[:] = pattern(len(memory))


class World(world.World):
    """A folder and the agents in it, or on a memory network."""

    def __init__(self, folder):
        super().__init__(folder)
        self.network = Network(random.Random(7), delay=lambda sender, receiver, rng: 0.001 * rng.random())

    def new_agent(self, kind, num_bytes=MIB, *, on_notice=lambda notice: None, token=TOKEN):
        """Return an agent that is not started."""
        if kind == "memory":
            return NodeAgent(self.network, num_bytes, on_notice, token)
        return make_agent(kind, num_bytes, on_notice=on_notice, folder=self.folder, token=lambda: token)

    @contextlib.asynccontextmanager
    async def agent(self, kind, num_bytes=MIB, **options):
        agent = self.new_agent(kind, num_bytes, **options)
        await agent.start()
        try:
            yield agent
        finally:
            await agent.close()

    async def process(self, kind, num_bytes=MIB):
        """Return an owner's process, and its address."""
        if kind == "memory":
            owner = self.new_agent(kind, num_bytes)
            await owner.start()
            fill(owner.memory)
            return owner, owner.address
        command = [sys.executable, "-m", "tests.transfer.owner_process", kind, str(num_bytes), self.folder]
        root = str(Path(__file__).parents[2])
        paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env={**os.environ, "PYTHONPATH": paths},
        )
        self.processes.append(process)
        return process, msgspec.json.decode(process.stdout.readline())


class NodeAgent:
    """An agent on a node of its own, which can be stopped and killed as a process can."""

    def __init__(self, network, num_bytes, on_notice, token):
        self.node = network.node(f"agent-{len(network.nodes)}")
        self._network = network
        self._world = SeededWorld(7, self.node.name)
        make = partial(make_agent, "auto", num_bytes, on_notice=on_notice, token=lambda: token)
        self._agent = self.node.context().run(make)

    @property
    def address(self):
        return self._agent.address

    @property
    def memory(self):
        return self._agent.memory

    async def start(self):
        await self._on(self._agent.start())

    async def read(self, owner, pieces, *, timeout_s):
        await self._on(self._agent.read(owner, pieces, timeout_s=timeout_s))

    async def notify(self, owner, notice, *, timeout_s):
        await self._on(self._agent.notify(owner, notice, timeout_s=timeout_s))

    async def close(self):
        await self._on(self._agent.close())

    def kill(self):
        self._network.kill(self.node)

    def wait(self):
        assert self.node.is_dead

    def send_signal(self, number):
        {signal.SIGSTOP: self._network.pause, signal.SIGCONT: self._network.resume}[number](self.node)

    def _on(self, work):
        return on(self.node, work, self._world)
