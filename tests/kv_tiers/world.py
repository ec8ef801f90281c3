"""Stores for tests, and what is kept in them."""

import contextlib
import os
import random
import socket
import subprocess
import sys

from serving.kv_tiers.store import StoreServer
from serving.kv_tiers.store_client import StoreTier
from serving.kv_tiers.tier import ChunkFormat
from serving.kv_tiers.wire import ENTRY_BYTES
from tests.support import world

TOKEN = b"a token that the whole cluster knows"
PATIENCE_S = 100.0

NUM_BYTES = 8160
FORMAT = ChunkFormat.of(NUM_BYTES, "a model")
BIG = ChunkFormat.of(3_000_000, "a model")


def chunk(key, format=FORMAT):
    """Return a chunk whose bytes nobody would guess."""
    memory = memoryview(bytearray(random.Random(key).randbytes(format.chunk_bytes)))
    format.seal(memory, key)
    return memory


def chunks(keys, format=FORMAT):
    return [chunk(key, format) for key in keys]


def room(count, format=FORMAT):
    """Return memory for so many chunks."""
    return [memoryview(bytearray(format.chunk_bytes)) for _ in range(count)]


async def write(tier, keys, format=FORMAT):
    return await tier.write(keys, chunks(keys, format))


async def read(tier, keys, format=FORMAT):
    """Return how many chunks came, all of which are right."""
    into = room(len(keys), format)
    num_read = await tier.read(keys, into)
    for key, memory in zip(keys[:num_read], into, strict=False):
        assert memory == chunk(key, format)
    return num_read


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class World(world.World):
    """A folder, and stores and their users."""

    @contextlib.asynccontextmanager
    async def tier(self, num_chunks, format=FORMAT, **options):
        """A worker's side of a store with room for so many chunks."""
        async with self.store(num_chunks, format) as (_, port):
            tier = self.client(port, format, **options)
            await tier.start()
            try:
                yield tier
            finally:
                await tier.close()

    @contextlib.asynccontextmanager
    async def store(self, num_chunks, format=FORMAT):
        """A store in this process; yields it and its port."""
        server = StoreServer(num_chunks * (format.chunk_bytes + ENTRY_BYTES), lambda: TOKEN)
        port = await server.open("127.0.0.1", 0)
        try:
            yield server, port
        finally:
            await server.close()

    def client(self, port, format=FORMAT, token=TOKEN, **options):
        return StoreTier(f"127.0.0.1:{port}", format, lambda: token, **options)

    def process(self, port, *flags, num_gib=1):
        """Return a store's process, which may not listen yet."""
        command = [sys.executable, "-m", "serving.kv_store", "--kv-store-size", str(num_gib), "--port", str(port)]
        process = subprocess.Popen(
            [*command, "--discovery-dir", str(self.folder / "discovery"), *flags],
            stderr=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if not name.startswith(("ETCD", "NATS"))},
        )
        self.processes.append(process)
        return process
