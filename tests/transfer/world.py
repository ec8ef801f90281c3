"""Agents for tests: in this process, and in others that can be stopped and killed."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np

from serving.transfer.make import make_agent
from tests.support import world

TOKEN = b"a token that the whole cluster knows"
MIB = 1 << 20
PATIENCE_S = 100.0

KINDS = ["shm", "tcp"]


def pattern(num_bytes, start=0):
    """Return what `fill` puts there: no two pages are the same."""
    words = np.arange(start // 8, (start + num_bytes) // 8 + 1, dtype="<u8") * np.uint64(0x9E3779B97F4A7C15)
    return words.view(np.uint8)[start % 8 : start % 8 + num_bytes].tobytes()


def fill(memory):
    memory[:] = pattern(len(memory))


class World(world.World):
    """A folder and the agents in it."""

    @contextlib.asynccontextmanager
    async def agent(self, kind, num_bytes=MIB, *, on_notice=lambda notice: None, token=TOKEN):
        agent = make_agent(kind, num_bytes, on_notice=on_notice, folder=self.folder, token=lambda: token)
        await agent.start()
        try:
            yield agent
        finally:
            await agent.close()

    def process(self, kind, num_bytes=MIB):
        """Return an owner's process, and its address."""
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
