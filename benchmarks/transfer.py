"""Measure how fast KV moves between two processes of this host, next to a memcpy and a plain socket.

    python -m benchmarks.transfer [--ways shm tcp] [--sizes-kib 64 1024 65536 1048576]

Prints GB/s (the median of the rounds) and the CPU time of the reader and of the owner per GB. On a machine that does
other work, too, CPU time is more reliable than the clock.
"""

import argparse
import asyncio
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import uvloop

from serving.transfer.agent import Piece, TransferError
from serving.transfer.make import make_agent

TOKEN = b"a token of the benchmark's own"
MIN_ROUND_BYTES = 64 << 20
"""Small sizes are repeated until a round has this many bytes."""


def cpu_s(pid=None):
    """Return the CPU time of all threads of a process."""
    if pid is None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def owner(way, num_bytes, folder):
    """Own memory until standard input ends."""
    if way == "socket":
        await asyncio.to_thread(serve_plainly, num_bytes)
        return
    agent = make_agent(way, num_bytes, on_notice=bool, folder=Path(folder), token=lambda: TOKEN)
    await agent.start()
    np.frombuffer(agent.memory, np.uint8)[:] = 7
    print(json.dumps(agent.address), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await agent.close()


def serve_plainly(num_bytes):
    """Repeatedly send as many bytes as an 8-byte request asks for."""
    data = memoryview(np.full(num_bytes, 7, np.uint8))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(json.dumps(listener.getsockname()), flush=True)
        connection, _ = listener.accept()
        while request := connection.recv(8, socket.MSG_WAITALL):
            connection.sendall(data[: int.from_bytes(request, "little")])


async def measure(move, size, rounds, pid):
    """Return GB/s, and CPU seconds per GB of this process and of the other."""
    repeats = max(1, MIN_ROUND_BYTES // size)
    await move(size)
    speeds, ours, theirs = [], cpu_s(), cpu_s(pid) if pid else 0.0
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(repeats):
            await move(size)
        speeds.append(size * repeats / (time.perf_counter() - start) / 1e9)
    moved = size * repeats * rounds / 1e9
    return statistics.median(speeds), (cpu_s() - ours) / moved, ((cpu_s(pid) if pid else 0.0) - theirs) / moved


async def run(way, sizes, rounds):
    """Print a row for each size."""
    largest = max(sizes)
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        process = None
        if way != "memcpy":
            command = [sys.executable, "-m", "benchmarks.transfer", "--owner", way, str(largest), folder]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            async with mover(way, largest, folder, process) as move:
                for size in sizes:
                    speed, ours, theirs = await measure(move, size, rounds, process and process.pid)
                    print(f"{way:8} {size >> 10:>9} KiB {speed:8.2f} GB/s {ours:8.2f} {theirs:8.2f}", flush=True)
        finally:
            if process is not None:
                process.communicate()


class mover:  # noqa: N801 (used as a function)
    """A way to move a number of bytes."""

    def __init__(self, way, num_bytes, folder, process):
        self.way, self.num_bytes, self.folder, self.process = way, num_bytes, folder, process
        self.close = None

    async def __aenter__(self):
        if self.way in ("memcpy", "socket"):
            target = np.zeros(self.num_bytes, np.uint8)
        if self.way == "memcpy":
            source = np.full(self.num_bytes, 7, np.uint8)

            async def copy(size):
                np.copyto(target[:size], source[:size])

            return copy
        address = json.loads(self.process.stdout.readline())
        if self.way == "socket":
            connection = socket.create_connection(address)
            self.close = lambda: asyncio.to_thread(connection.close)

            async def receive(size):
                connection.sendall(size.to_bytes(8, "little"))
                connection.recv_into(target, size, socket.MSG_WAITALL)

            return receive
        agent = make_agent(self.way, self.num_bytes, on_notice=bool, folder=Path(self.folder), token=lambda: TOKEN)
        await agent.start()
        self.close = agent.close

        async def read(size):
            await agent.read(address, [Piece(0, 0, size)], timeout_s=600)

        return read

    async def __aexit__(self, *_):
        if self.close is not None:
            await self.close()


async def main(ways, sizes, rounds):
    """Print the table."""
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} CPU cores, load {load:.1f}; CPU seconds per GB of the reader and of the owner")
    for way in ways:
        try:
            await run(way, sizes, rounds)
        except (TransferError, json.JSONDecodeError) as error:
            print(f"{way:8} did not run: {error}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--owner"]:
        uvloop.run(owner(sys.argv[2], int(sys.argv[3]), sys.argv[4]))
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--ways", nargs="+", default=["memcpy", "socket", "shm", "tcp"])
        parser.add_argument("--sizes-kib", nargs="+", type=int, default=[64, 1024, 16384, 262144, 1048576])
        parser.add_argument("--rounds", type=int, default=5)
        given = parser.parse_args()
        uvloop.run(main(given.ways, [size << 10 for size in given.sizes_kib], given.rounds))
