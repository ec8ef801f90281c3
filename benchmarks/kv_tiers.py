"""Measure how fast KV is written to a store and read with verification, and how long verification takes.

    python -m benchmarks.kv_tiers [--kinds verify store] [--chunk-kib 20 640 20480]

Prints GB/s (the median of the rounds) and the CPU time of this process per GB.
"""

import argparse
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from serving.kv_tiers.store_client import StoreTier
from serving.kv_tiers.tier import HEADER, ChunkFormat

TOTAL_BYTES = 256 << 20
"""Bytes moved in a round."""

CALL_BYTES = 16 << 20
"""Bytes of one call, as for a long prompt."""


def cpu_s():
    """Return the CPU time of all threads of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def timed(move, lots, num_bytes):
    """Return GB/s, and CPU seconds per GB."""
    start_s, used_s = time.perf_counter(), cpu_s()
    for keys, memories in lots:
        assert await move(keys, memories) == len(keys)
    return num_bytes / (time.perf_counter() - start_s) / 1e9, (cpu_s() - used_s) / num_bytes * 1e9


class Verifying:
    """Only seals and verifies chunks in place."""

    def __init__(self, format):
        self.format = format

    async def start(self):
        """Do nothing."""

    async def write(self, keys, chunks):
        """Seal chunks in place."""
        for key, memory in zip(keys, chunks, strict=True):
            self.format.seal(memory, key)
        return len(keys)

    async def read(self, keys, chunks):
        """Verify chunks in place."""
        return sum(not self.format.find_fault(memory, key) for key, memory in zip(keys, chunks, strict=True))

    async def remove(self, keys):
        """Do nothing."""

    async def close(self):
        """Do nothing."""


def make(kind, format, folder, stack):
    """Return a tier."""
    if kind == "verify":
        return Verifying(format)
    command = [sys.executable, "-m", "serving.kv_store", "--port", "0", "--discovery-dir", str(folder / "d")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    while "GiB for KV at" not in (line := process.stderr.readline()):
        assert line, "the store did not start"
    token = (folder / "d" / "token").read_bytes()
    return StoreTier(line.split()[-1], format, lambda: token)


async def run(kind, chunk_bytes, rounds, folder):
    """Print a row."""
    format = ChunkFormat.of(chunk_bytes - HEADER.size, "benchmark")
    num_chunks = max(TOTAL_BYTES // chunk_bytes, 1)
    sources = [memoryview(bytearray(chunk_bytes)) for _ in range(num_chunks)]
    names = [random.Random(number).getrandbits(64) for number in range(num_chunks)]
    for key, memory in zip(names, sources, strict=True):
        format.seal(memory, key)
    targets = sources if kind == "verify" else [memoryview(bytearray(chunk_bytes)) for _ in range(num_chunks)]
    size = max(CALL_BYTES // chunk_bytes, 1)
    starts = range(0, num_chunks, size)
    async with AsyncExitStack() as stack:
        tier = make(kind, format, folder, stack)
        await tier.start()
        stack.push_async_callback(tier.close)
        written, read = [], []
        for _ in range(rounds + 1):
            await tier.remove(names)
            for done, move, memories in ((written, tier.write, sources), (read, tier.read, targets)):
                lots = [(names[start : start + size], memories[start : start + size]) for start in starts]
                done.append(await timed(move, lots, num_chunks * chunk_bytes))
    columns = [statistics.median(column) for done in (written, read) for column in zip(*done[1:], strict=True)]
    print(f"{kind:8} {chunk_bytes >> 10:>7} KiB " + "".join(f"{value:8.2f}" for value in columns), flush=True)


async def main(kinds, sizes, rounds):
    """Print the table."""
    print(f"{os.cpu_count()} CPU cores, load {os.getloadavg()[0]:.1f}")
    print("tier       chunk        write   CPU s    read   CPU s   (GB/s, and CPU seconds per GB)")
    for kind in kinds:
        for size in sizes:
            with tempfile.TemporaryDirectory(prefix="kv-") as place:
                await run(kind, size, rounds, Path(place))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["verify", "store"])
    parser.add_argument("--chunk-kib", nargs="+", type=int, default=[20, 640, 20480])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    uvloop.run(main(given.kinds, [size << 10 for size in given.chunk_kib], given.rounds))
