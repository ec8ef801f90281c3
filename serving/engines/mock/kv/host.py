"""The bytes of a rank's host memory: they follow the simulated core's events, and are verified in place.

TierStored     a slot of the arena is filled, in a thread
TierRemoved    the slot is free again; if it is being filled, once it is full
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass

from mocker import BlockChain
from mocker.events import KvEvent, TierRemoved, TierStored
from mocker.tiers.ranges import Range
from serving.kv_tiers.host import HostTier
from serving.kv_tiers.tier import ChunkFormat
from serving.kv_tiers.trouble import Trouble
from serving.runtime.threads import in_thread

Spawn = Callable[[Coroutine[None, None, None]], asyncio.Task[None]]


@dataclass(slots=True)
class Checking:
    """Chunks of a load to the GPU, and how many of them are right."""

    keys: list[int]
    num_good: int = 0
    fault: str = ""


class HostBytes:
    """See the module."""

    def __init__(self, format: ChunkFormat, num_chunks: int, spawn: Spawn) -> None:
        """Prepare an arena; `spawn` starts work that runs alongside the engine's steps."""
        self.arena = HostTier(format, num_chunks)
        self._format = format
        self._spawn = spawn
        self._filling: dict[int, asyncio.Task[None]] = {}
        self._leaving: set[int] = set()  # those of them that left host memory before they were filled
        self._spoilt = Trouble(
            "KV in host memory differs from what was written there", "KV in host memory is intact again"
        )

    def note(self, events: Iterable[KvEvent]) -> None:
        """Fill and free slots for what came into host memory and what left it."""
        fresh: dict[int, None] = {}
        for event in events:
            if isinstance(event, TierStored) and event.medium == "CPU":
                names = keys_of(event.chain, [(event.start, event.stop)], event.blocks_per_chunk)
                self._leaving.difference_update(names)
                fresh.update(dict.fromkeys(names))
            elif isinstance(event, TierRemoved) and event.medium == "CPU":
                for key in keys_of(event.chain, [(event.start, event.stop)], event.blocks_per_chunk):
                    fresh.pop(key, None)
                    self._leave(key)
        if fresh and (slots := self.arena.take(fresh)):
            task = self._spawn(self._fill(slots))
            self._filling.update(dict.fromkeys(slots, task))

    async def filled(self, keys: Several[int]) -> None:
        """Wait until none of these chunks is being filled any more."""
        await asyncio.gather(*{self._filling[key] for key in keys if key in self._filling})

    async def chunks(self, keys: Several[int]) -> list[memoryview]:
        """Return chunks in place in host memory; one that has left it is made again, as if it waited in a buffer."""
        found = {key: self.arena.slot(key) for key in keys}
        made = {key: memoryview(bytearray(self._format.chunk_bytes)) for key, slot in found.items() if slot is None}
        if made:
            await in_thread(lambda: self._make(made))
        return [found[key] or made[key] for key in keys]

    async def check(self, checking: Checking) -> None:
        """Verify chunks until one is wrong."""
        await self.filled(checking.keys)
        slots = [(key, self.arena.slot(key)) for key in checking.keys]
        await in_thread(lambda: self._find_fault(slots, checking))

    def checked(self, checking: Checking, num_asked: int) -> None:
        """Count verified chunks, and report what was wrong."""
        num_good = checking.num_good
        if checking.fault:
            self._spoilt.begin(f"chunk {checking.keys[num_good]:016x}: {checking.fault}")
        elif num_good:
            self._spoilt.end()
        self.arena.loaded(num_good, num_asked)

    async def _fill(self, slots: dict[int, memoryview]) -> None:
        try:
            await in_thread(lambda: self._make(slots))
        finally:
            for key in slots:
                del self._filling[key]
            self.arena.keep(slots)
            gone = self._leaving.intersection(slots)
            self.arena.discard(gone)
            self._leaving -= gone

    def _make(self, slots: dict[int, memoryview]) -> None:
        for key, slot in slots.items():
            self._format.write(slot, key)

    def _leave(self, key: int) -> None:
        if key in self._filling:
            self._leaving.add(key)
        else:
            self.arena.discard([key])

    def _find_fault(self, slots: list[tuple[int, memoryview | None]], checking: Checking) -> None:
        for key, slot in slots:
            checking.fault = "it is not there" if slot is None else self._format.find_fault(slot, key)
            if checking.fault:
                return
            checking.num_good += 1


def keys_of(chain: BlockChain, ranges: Several[Range], blocks_per_chunk: int) -> list[int]:
    """Name chunks, each by the sequence hash of its last block."""
    names = [chain.key((chunk + 1) * blocks_per_chunk - 1) for start, stop in ranges for chunk in range(start, stop)]
    return [name for name in names if isinstance(name, int)]
