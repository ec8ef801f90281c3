"""Measure how fast a router takes in the KV events of many workers, what they cost in memory, and look-ups meanwhile.

    python benchmarks/kv_events.py [--ranks 1000] [--blocks 1 8 64] [--messages 20000]

Each message is what a rank would send: it stores the next blocks of a prompt, which starts with a system prompt that it
shares with other ranks. Once the rank is full, it removes as many of its oldest prompt. The time counts from received
bytes to the index. A prompt of 128 k tokens (2,000 blocks) is looked up after every hundredth message; 50 ranks have some
of it. Each number of blocks per event runs in a process of its own.
"""

import argparse
import gc
import resource
import time
from collections import deque
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import msgspec
import numpy as np

from serving.router.blocks import PromptBlocks
from serving.router.events import BlocksCleared
from serving.router.follower import KvFollower
from serving.router.index import PrefixIndex
from serving.worker.kv_events import Event, KvEvents, read_kv_events

SYSTEM_BLOCKS, SYSTEM_PROMPTS = 32, 20
LONG_BLOCKS = 2_000
HOLDERS = 50
"""Ranks that have some of the long prompt."""
OWN_BLOCKS = 64
"""Blocks of each other prompt behind its system prompt."""
RANK_BLOCKS = 1_024
"""Blocks of these that a rank has room for."""


class Ranks:
    """Workers of which each caches prompts and evicts the oldest."""

    def __init__(self, num_ranks: int, num_blocks: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._num_blocks = num_blocks
        self._numbers = [0] * num_ranks
        self._prompts: list[deque[list[int]]] = [deque() for _ in range(num_ranks)]
        self._system = [self._hashes(SYSTEM_BLOCKS) for _ in range(SYSTEM_PROMPTS)]
        self.long = self._hashes(LONG_BLOCKS)

    def _hashes(self, count: int) -> list[int]:
        drawn: list[int] = self._rng.integers(1, 2**64, count, dtype=np.uint64).tolist()
        return drawn

    def first(self) -> Iterator[bytes]:
        """Yield a message of each rank that stores all system prompts, and of some that store the long one."""
        depths = self._rng.integers(1, LONG_BLOCKS + 1, HOLDERS).tolist()
        for rank in range(len(self._numbers)):
            long = [self.long[: depths[rank]]] if rank < HOLDERS else []
            yield self._message(rank, [[None, hashes] for hashes in self._system + long])

    def messages(self, count: int) -> Iterator[bytes]:
        """Yield messages of ranks in random order."""
        systems = self._rng.integers(0, SYSTEM_PROMPTS, count).tolist()
        for rank, system in zip(self._rng.integers(0, len(self._numbers), count).tolist(), systems, strict=True):
            yield self._message(rank, self._events(self._prompts[rank], self._system[system][-1]))

    def _events(self, prompts: deque[list[int]], parent: int) -> list[Event]:
        """Store the next blocks of a rank's latest prompt, or of a new one behind `parent`."""
        own = self._hashes(self._num_blocks)
        if prompts and len(prompts[-1]) < OWN_BLOCKS:
            parent = prompts[-1][-1]
            prompts[-1] += own
        else:
            prompts.append(list(own))
        events: list[Event] = [[parent, own]]
        if len(prompts) * OWN_BLOCKS > RANK_BLOCKS:
            oldest = prompts[0]
            events.append([oldest[: -self._num_blocks - 1 : -1]])
            del oldest[-self._num_blocks :]
            if not oldest:
                prompts.popleft()
        return events

    def _message(self, rank: int, events: list[Event]) -> bytes:
        message = KvEvents(rank, 0, 1, self._numbers[rank], events)
        self._numbers[rank] += 1
        return msgspec.msgpack.encode(message)


def count_blocks(data: bytes) -> int:
    """Return the number of blocks that a message stores or removes."""
    return sum(len(event.hashes) for event in read_kv_events(data)[1] if not isinstance(event, BlocksCleared))


def measure(options: argparse.Namespace, num_blocks: int) -> None:
    """Feed an index with events of so many blocks, and print a line."""
    ranks, index = Ranks(options.ranks, num_blocks, options.seed), PrefixIndex()
    follower = KvFollower(index)

    def take(data: bytes) -> None:
        message, events = read_kv_events(data)
        assert not follower.on_events(message.instance_id, message.epoch, message.number, events)

    for data in ranks.first():
        take(data)
    gc.collect()
    before = resident_bytes()
    filling = options.ranks * RANK_BLOCKS // num_blocks if options.fill else 0
    for data in ranks.messages(filling):
        take(data)
    gc.collect()
    held = len(index)
    room = (resident_bytes() - before) / held if filling else float("nan")
    prompt, looks, busy_s, blocks = PromptBlocks.of(ranks.long), [], 0.0, 0
    for batch in range(options.messages // 100):
        batch_of = list(ranks.messages(100))
        blocks += sum(map(count_blocks, batch_of))
        started = time.process_time()
        for data in batch_of:
            take(data)
        busy_s += time.process_time() - started
        started = time.perf_counter()
        found = index.overlaps(prompt)
        looks.append(time.perf_counter() - started)
        assert len(found) == HOLDERS, batch
    p50, p99 = np.percentile(looks, [50, 99]) * 1e6
    print(
        f"{num_blocks:4} blocks an event: {blocks / busy_s / 1e6:5.2f} M blocks/s  "
        f"{options.messages / busy_s / 1e3:6.0f} k messages/s  {room:4.0f} bytes a block ({held:,} blocks)  "
        f"look-up p50 {p50:.1f} us  p99 {p99:.1f} us",
        flush=True,
    )


def resident_bytes() -> int:
    """Return the memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 8, 64], help="blocks in an event")
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--no-fill", dest="fill", action="store_false", help="start with empty ranks")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for num_blocks in options.blocks:
        process = get_context("spawn").Process(target=measure, args=(options, num_blocks))
        process.start()
        process.join()


if __name__ == "__main__":
    main()
