"""Tiers for tests, and what is kept in them."""

import contextlib
import os
import socket
import subprocess
import sys

from serving.kv_tiers.blocks import KvLayout
from serving.kv_tiers.files import FileTier
from serving.kv_tiers.host import HostTier
from serving.kv_tiers.store import StoreServer
from serving.kv_tiers.store_client import StoreTier
from serving.kv_tiers.tier import ChunkFormat
from serving.kv_tiers.wire import ENTRY_BYTES
from tests.support import world

TOKEN = b"a token that the whole cluster knows"
KINDS = ["host", "files", "store"]
PATIENCE_S = 100.0

FORMAT = ChunkFormat.of(KvLayout(8000, 160, 4), "a model")
BIG = ChunkFormat.of(KvLayout(3_000_000), "a model")


def chunk(key, format=FORMAT):
    """Return a chunk as the mocker makes it."""
    memory = memoryview(bytearray(format.chunk_bytes))
    format.write(memory, key)
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
    """A folder, and the tiers and stores in it."""

    @contextlib.asynccontextmanager
    async def tier(self, kind, num_chunks, format=FORMAT, **options):
        """A tier with room for so many chunks."""
        async with contextlib.AsyncExitStack() as stack:
            if kind == "host":
                tier = HostTier(format, num_chunks)
            elif kind == "files":
                tier = FileTier(self.folder / "kv", format, num_chunks, **options)
            else:
                _, port = await stack.enter_async_context(self.store(num_chunks, format))
                tier = self.client(port, format, **options)
            await tier.start()
            stack.push_async_callback(tier.close)
            yield tier

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
