"""Files as a tier: the folder of one worker, which finds its KV there again after a restart.

The index is in memory and belongs to the event loop; a few threads access the files. A thread that hangs on the disk is
given up: it still counts as busy, so that there are never many of them, and its result is discarded.

    absent --write--> being written --> there --evicted, or found corrupt--> leaving --> absent

If somebody removes or replaces the folder, all chunks are absent as soon as one of them is missed, and the next write makes
the folder again.
"""

import asyncio
import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import NamedTuple

from serving.kv_tiers.chunk_folder import ChunkFolder, Found
from serving.kv_tiers.tier import Changes, ChunkFormat, Tally, TierCounts, TierError
from serving.kv_tiers.trouble import Trouble
from serving.runtime.threads import in_thread

log = logging.getLogger(__name__)

MAX_THREADS = 4
"""Most threads of one tier at once."""

MAX_CALLS = 256
"""Most calls in progress or waiting for a thread; beyond that, nothing is read or written."""

TIMEOUT_S = 10.0
"""How long a read or write may take, including its wait for a thread."""

MAX_RENEWALS = 3
"""How often one write makes the folder again, if somebody keeps removing it."""

CLOSE_S = 5.0
"""How long to wait for threads when closing."""


class Done(NamedTuple):
    """The result of a thread."""

    num_chunks: int
    fault: str = ""
    bad: Sequence[int] = ()
    """Chunks that are missing or corrupt."""
    num_faults: int = 0
    """How many of these are corrupt."""
    is_lost: bool = False
    """Whether the folder is no longer at its path."""


class Turn:
    """The time in which one call may use the caller's memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.is_over = False

    def end(self) -> None:
        """Stop reading and writing that memory."""
        with self._lock:
            self.is_over = True

    def deliver(self, source: memoryview, target: memoryview) -> None:
        """Copy something into the memory, unless the turn is over."""
        with self._lock:
            if not self.is_over:
                target[:] = source


Call = Callable[[Turn], Awaitable[int]]


class FileTier:
    """See the module."""

    def __init__(self, folder: Path, format: ChunkFormat, num_chunks: int, *, timeout_s: float = TIMEOUT_S) -> None:
        """Prepare a folder of at most `num_chunks` chunks."""
        self._folder = ChunkFolder(folder, format)
        self._format = format
        self._timeout_s = timeout_s
        self.num_chunks = num_chunks
        self.changes = Changes()
        """What came and left, until somebody takes it."""
        self._there: OrderedDict[int, int] = OrderedDict()  # key -> which write, the least recently used first
        self._being_written: set[int] = set()
        self._leaving: set[int] = set()
        self._num_writes = 0
        self._threads = asyncio.Semaphore(MAX_THREADS)
        self._calls: set[asyncio.Task[int]] = set()
        self._is_closed = False
        self._tally = Tally(self.num_chunks)
        self._renewing = asyncio.Lock()
        self._losing = Trouble(
            f"{folder}: the folder for KV is gone, and its chunks count as absent",
            f"{folder}: the folder for KV has been made again",
        )
        self._reading = Trouble(f"{folder}: KV cannot be read and counts as absent", f"{folder}: KV can be read again")
        self._writing = Trouble(f"{folder}: KV cannot be written", f"{folder}: KV can be written again")

    @property
    def counts(self) -> TierCounts:
        """See `Tier`."""
        return self._tally.counts._replace(num_chunks=len(self._there))

    async def start(self) -> None:
        """See `Tier`. Chunks in the folder can be found again."""
        folder = self._folder
        await in_thread(folder.open)
        found = await in_thread(folder.scan)
        num_too_many = await self._adopt(found)
        log.info(
            "%s: found %d chunks of KV (at most %d fit); removed %d that were torn or of another format and %d that were too many; "
            "left alone %d unknown files",
            *(folder.path, len(self._there), self.num_chunks, found.num_removed, num_too_many, found.num_strange),
        )

    async def look_up(self, keys: Sequence[int]) -> int:
        """See `Tier`."""
        return self._tally.found(self._num_leading(keys), len(keys))

    async def read(self, keys: Sequence[int], into: Sequence[memoryview]) -> int:
        """See `Tier`."""
        targets = list(zip(keys, into, strict=True))[: self._num_leading(keys)]
        num_read = await self._do(partial(self._read, targets), self._reading) if targets else 0
        return self._tally.read(num_read, len(keys), self._format.chunk_bytes)

    async def write(self, keys: Sequence[int], chunks: Sequence[memoryview]) -> int:
        """See `Tier`."""
        wanted = dict(zip(keys, chunks, strict=True))
        if self._num_leading(keys) < len(keys):
            await self._do(partial(self._write, dict(islice(wanted.items(), self.num_chunks))), self._writing)
        self._touch(keys)
        num_refused = len([key for key in wanted if key not in self._there])
        self._tally.add(num_refused=num_refused)
        return self._num_leading(keys)

    async def remove(self, keys: Sequence[int]) -> None:
        """See `Tier`."""
        await self._do(partial(self._remove, keys), self._writing)

    async def close(self) -> None:
        """See `Tier`. The files stay."""
        self._is_closed = True
        if self._calls:
            await asyncio.wait(list(self._calls), timeout=CLOSE_S)
        if not self._calls:  # else a thread still uses the folder, which is released when the process ends
            self._folder.close()

    # Calls

    async def _do(self, call: Call, trouble: Trouble) -> int:
        """Do work in a thread; return its result, 0 if it is not done in time."""
        if self._is_closed or len(self._calls) >= MAX_CALLS:
            return 0
        turn = Turn()
        task = asyncio.create_task(self._in_turn(call, turn))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        try:
            await asyncio.wait([task], timeout=self._timeout_s)
        finally:
            turn.end()
        if task.done():
            return task.result()
        self._fault(trouble, f"no answer within {self._timeout_s:g} s")
        return 0

    async def _in_turn(self, call: Call, turn: Turn) -> int:
        async with self._threads:
            return 0 if turn.is_over else await call(turn)

    async def _read(self, targets: list[tuple[int, memoryview]], turn: Turn) -> int:
        writes, num_renewals = {key: self._there.get(key) for key, _ in targets}, self._folder.num_renewals
        done = await in_thread(partial(_read, self._folder, targets, self._format.chunk_bytes, turn))
        self._touch([key for key, _ in targets[: done.num_chunks]])
        if done.is_lost and num_renewals == self._folder.num_renewals:
            self._forget()
        if done.fault:
            self._fault(self._reading, done.fault, done.num_faults)
        elif done.num_chunks == len(targets):
            self._reading.end()
        # A chunk may have been written since.
        await self._leave([key for key in done.bad if key in self._there and self._there[key] == writes[key]])
        return done.num_chunks

    async def _write(self, wanted: dict[int, memoryview], turn: Turn) -> int:
        done = await self._write_new(wanted, turn)
        for _ in range(MAX_RENEWALS):
            if not done.is_lost:
                break
            fault = await self._renew()
            done = Done(0, fault) if fault else await self._write_new(wanted, turn)
        if done.fault:
            self._fault(self._writing, done.fault)
        elif done.num_chunks:
            self._writing.end()
        return done.num_chunks

    async def _write_new(self, wanted: dict[int, memoryview], turn: Turn) -> Done:
        """Write the chunks that are not there; none of them counts if the folder is lost, or was made again meanwhile."""
        async with self._renewing:
            num_renewals = self._folder.num_renewals
        self._touch(list(wanted))
        new, victims = self._make_room(wanted)
        self._being_written.update(new)
        self._leaving.update(victims)
        for victim in victims:
            del self._there[victim]
        removed = await in_thread(partial(_remove, self._folder, victims))
        self._gone(victims, removed.num_chunks)
        self._tally.add(num_evicted=removed.num_chunks)
        done = Done(0, removed.fault)
        if not done.fault:
            done = await in_thread(partial(_write, self._folder, [(key, wanted[key]) for key in new], turn))
        self._being_written.difference_update(new)
        if done.is_lost or num_renewals != self._folder.num_renewals:
            return Done(0, "somebody keeps removing the folder", is_lost=True)
        self._num_writes += 1
        for key in reversed(new[: done.num_chunks]):
            self._there[key] = self._num_writes
        self.changes.came(new[: done.num_chunks])
        self._tally.written(done.num_chunks, 0, self._format.chunk_bytes)
        return done

    async def _renew(self) -> str:
        """Make the folder again, unless another call has done so; return why that is not possible."""
        async with self._renewing:
            try:
                if not await in_thread(lambda: self._folder.is_lost):
                    return ""
                self._forget()
                found = await in_thread(self._folder.renew)
            except (TierError, OSError) as error:
                return str(error)
            self._forget()  # what was written until now
            await self._adopt(found)
            self._losing.end()
            return ""

    async def _adopt(self, found: Found) -> int:
        """Note what a folder contains; remove what is too much, and return how many chunks that is."""
        num_too_many = max(len(found.keys) - self.num_chunks, 0)
        self._there = OrderedDict.fromkeys(found.keys[num_too_many:], 0)
        self.changes.came(self._there)
        await in_thread(partial(_remove, self._folder, found.keys[:num_too_many]))
        return num_too_many

    def _forget(self) -> None:
        """Count all chunks as absent: the folder is lost."""
        self.changes.left(self._there)
        self._there.clear()
        self._losing.begin("somebody removed or replaced it")

    async def _remove(self, keys: Sequence[int], turn: Turn) -> int:
        await self._leave([key for key in dict.fromkeys(keys) if key in self._there])
        return 0

    # How it is done

    def _num_leading(self, keys: Sequence[int]) -> int:
        return sum(1 for _ in takewhile(self._there.__contains__, keys))

    def _touch(self, keys: Sequence[int]) -> None:
        for key in reversed(keys):  # the beginning of a prompt is evicted last
            if key in self._there:
                self._there.move_to_end(key)

    def _make_room(self, wanted: dict[int, memoryview]) -> tuple[list[int], list[int]]:
        """Return which chunks to write (if there is not room for all, the first ones) and which to evict."""
        new = [key for key in wanted if key not in self._there]
        num_kept = len(wanted) - len(new)
        busy = self._being_written | self._leaving
        new = list(takewhile(lambda key: key not in busy, new))
        num_others = len(self._being_written) + num_kept
        new = new[: max(self.num_chunks - num_others, 0)]
        num_free = self.num_chunks - len(self._being_written) - len(self._there)
        return new, list(islice(self._there, max(len(new) - num_free, 0)))  # the wanted chunks are the last ones there

    async def _leave(self, keys: list[int]) -> None:
        for key in keys:
            del self._there[key]
        self._leaving.update(keys)
        removed = await in_thread(partial(_remove, self._folder, keys))
        self._gone(keys, removed.num_chunks)
        if removed.fault:
            self._fault(self._writing, removed.fault)

    def _gone(self, keys: list[int], num_removed: int) -> None:
        """Forget chunks whose files were removed; the others still take up room."""
        self._leaving.difference_update(keys)
        self.changes.left(keys[:num_removed])
        for key in keys[num_removed:]:
            self._there[key] = 0
            self._there.move_to_end(key, last=False)

    def _fault(self, trouble: Trouble, why: str, num_faults: int = 1) -> None:
        self._tally.add(num_faults=num_faults)
        trouble.begin(why)


# In threads


def _read(folder: ChunkFolder, targets: list[tuple[int, memoryview]], chunk_bytes: int, turn: Turn) -> Done:
    """Read chunks until one is bad, and verify those after it: all that are bad are found at once."""
    num_read, num_faults, fault = 0, 0, ""
    bad: list[int] = []
    with memoryview(bytearray(chunk_bytes)) as memory:  # the turn may end while we wait for the disk
        for key, target in targets:
            if turn.is_over:
                break
            try:
                wrong = folder.read(key, memory)
            except FileNotFoundError:
                if not bad and _is_lost(folder):
                    return Done(num_read, is_lost=True)
                bad.append(key)
                continue
            except OSError as error:  # perhaps all reads would fail now
                return Done(num_read, f"chunk {key:016x}: {error.strerror}", [*bad, key], num_faults + 1)
            if wrong:
                bad.append(key)
                num_faults += 1
                fault = fault or f"chunk {key:016x}: {wrong}"
            elif not bad:
                turn.deliver(memory, target)
                num_read += 1
    return Done(num_read, fault, bad, num_faults)


def _write(folder: ChunkFolder, chunks: list[tuple[int, memoryview]], turn: Turn) -> Done:
    if chunks and _is_lost(folder):
        return Done(0, is_lost=True)
    for number, (key, chunk) in enumerate(chunks):
        if turn.is_over:
            return Done(number)
        try:
            folder.write(key, chunk)
        except OSError as error:
            return Done(number, f"chunk {key:016x}: {error.strerror}", is_lost=_is_lost(folder))
    return Done(len(chunks))


def _is_lost(folder: ChunkFolder) -> bool:
    """Return whether a folder is lost, as far as the disk lets us see."""
    with contextlib.suppress(OSError):
        return folder.is_lost
    return False


def _remove(folder: ChunkFolder, keys: list[int]) -> Done:
    for number, key in enumerate(keys):
        try:
            folder.remove(key)
        except OSError as error:
            return Done(number, f"chunk {key:016x}: {error.strerror}")
    return Done(len(keys))
