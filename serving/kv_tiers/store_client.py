"""A worker's side of the store that all workers share, for the mocker and for engines of one's own.

Its methods do not raise, and need a running event loop.

    down --`_reach`, in the background, again and again--> up --a call that fails, or takes too long--> down

While it is down, everything is an immediate miss: no request waits for a store.

The store's answers report what it has. A worker learns of evictions caused by others only when it asks for a chunk.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from serving.kv_tiers.tier import Changes, ChunkFormat, Tally, TierCounts
from serving.kv_tiers.trouble import Trouble
from serving.kv_tiers.wire import (
    COUNTS,
    ENTRY_BYTES,
    GROUP_BYTES,
    KEY_BYTES,
    LOOK_UP,
    MAX_COUNTS_BYTES,
    MAX_KEYS,
    READ,
    REMOVE,
    TOUCH,
    WELCOME,
    WRITE,
    group_size,
    lot_size,
    pack_request,
    place_of,
    receive_group,
    receive_number,
    send_chunks,
    unpack_keys,
)
from serving.runtime.threads import in_thread
from serving.runtime.world import world
from serving.transfer.agent import TransferError
from serving.transfer.network import connect
from serving.transfer.proven import Token, prove
from serving.transfer.stream import Stream
from serving.transfer.wire import ID_BYTES

MAX_LINKS = 4
"""Most connections of one worker."""

MAX_CALLS = 256
"""Most calls in progress or waiting for a connection; beyond that, nothing is found, read or written."""

LOOK_UP_S = 0.5
"""How long a look-up may take, including its wait for a connection."""

TIMEOUT_S = 10.0
"""How long anything else may take."""

BACKOFF_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Pauses between attempts to reach a store; the last one is repeated."""

Result = TypeVar("Result")
Item = TypeVar("Item")


class StoreTier:
    """See the module."""

    def __init__(
        self,
        address: str,
        format: ChunkFormat,
        token: Token,
        *,
        look_up_s: float = LOOK_UP_S,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Prepare to use the store at HOST:PORT.

        Raises:
            ValueError: the address is not valid.
        """
        self._host, self._port = parse_address(address)
        self._format = format
        self._token = token
        self._look_up_s = look_up_s
        self._timeout_s = timeout_s
        self._id = world().entropy.randbytes(ID_BYTES)
        self._links = asyncio.Semaphore(MAX_LINKS)
        self._idle: list[Stream] = []
        self._num_calls = 0
        self._is_up = False
        self._capacity = 0
        self._reaching: asyncio.Task[None] | None = None
        self._tally = Tally()
        self.changes = Changes()
        """Chunks that came and left, as far as this worker knows, until somebody takes them."""
        self._known: OrderedDict[int, None] = OrderedDict()  # what the store reported that it has, the oldest first
        name = f"the KV store at {address}"
        self._absence = Trouble(
            f"{name} cannot be reached, and its KV counts as absent", f"{name} can be reached again"
        )
        self._spoilt = Trouble(f"{name} has corrupt KV, which counts as absent", f"{name} has intact KV again")

    @property
    def counts(self) -> TierCounts:
        """What it contains and did for this worker; these are only the chunks that this worker knows of."""
        return self._tally.counts._replace(num_chunks=len(self._known), capacity=self._capacity)

    @property
    def is_up(self) -> bool:
        """Whether the store is in use now."""
        return self._is_up

    async def start(self) -> None:
        """Start; a store that cannot be reached yet is used as soon as it can."""
        self._reaching = asyncio.create_task(self._reach())
        await asyncio.wait([self._reaching], timeout=self._look_up_s)

    async def look_up(self, keys: Sequence[int]) -> int:
        """Return how many of the first keys are there."""

        async def look_up(lot: Sequence[int], link: Stream) -> int:
            num_found = await self._ask(LOOK_UP, lot, link)
            self._note(lot[:num_found], gone=lot[num_found : num_found + 1])
            return num_found

        num_found = await self._in_lots(look_up, keys, MAX_KEYS, self._look_up_s)
        return self._tally.found(num_found, len(keys))

    async def read(self, keys: Sequence[int], into: Sequence[memoryview]) -> int:
        """Return how many of the first chunks arrived complete and right; the content of the other memories is undefined.

        A chunk that is missing, short or corrupt is dropped, and so are those after it that are: the next write brings all
        of them back. Once this has returned or was cancelled, nothing is written into the memories any more.
        """
        targets = list(zip(keys, into, strict=True))
        size = lot_size(self._format.chunk_bytes)
        num_read = await self._in_lots(self._read_lot, targets, size, self._timeout_s)
        if num_read > size:
            await self.touch(keys[:num_read])
        self._tally.add(num_read=num_read)
        return num_read

    async def write(self, keys: Sequence[int], chunks: Sequence[memoryview]) -> int:
        """Return how many of the first chunks are there now; the least recently used others are evicted for them.

        Chunks must not change in the meantime. If one does, its reader will notice.
        """
        wanted = list(dict(zip(keys, chunks, strict=True)).items())
        size = lot_size(self._format.chunk_bytes)
        num_there = await self._in_lots(self._write_lot, wanted[: self._capacity], size, self._timeout_s)
        if num_there > size:
            num_there = await self.touch([key for key, _ in wanted[:num_there]])
        self._tally.add(num_refused=len(wanted) - num_there)
        there = {key for key, _ in wanted[:num_there]}
        return next((number for number, key in enumerate(keys) if key not in there), len(keys))

    async def remove(self, keys: Sequence[int]) -> None:
        """Forget chunks."""

        async def remove(lot: Sequence[int], link: Stream) -> int:
            await self._ask(REMOVE, lot, link)
            self._note((), gone=lot)
            return len(lot)

        await self._in_lots(remove, keys, MAX_KEYS, self._timeout_s)

    async def close(self) -> None:
        """Release everything; the store keeps its chunks."""
        self._is_up = False
        if self._reaching is not None:
            self._reaching.cancel()
            await asyncio.gather(self._reaching, return_exceptions=True)
        while self._idle:
            self._idle.pop().close()

    # Requests

    async def _in_lots(
        self, do: Callable[[Sequence[Item], Stream], Awaitable[int]], items: Sequence[Item], size: int, timeout_s: float
    ) -> int:
        """Process items in lots that fit one request, until a lot is not done completely; return how many were done."""
        num_done = 0

        async def talk(link: Stream) -> None:
            nonlocal num_done
            for start in range(0, len(items), size):
                lot = items[start : start + size]
                num_done += await do(lot, link)
                if num_done < start + len(lot):
                    return

        await self._talk(talk, timeout_s, None)
        return num_done

    async def touch(self, keys: Sequence[int]) -> int:
        """Make a prompt that was moved in several lots be evicted from its end; return how many of the first chunks are there."""

        async def talk(link: Stream) -> int:
            num_there = len(keys)
            for start in reversed(range(0, len(keys), MAX_KEYS)):
                lot = keys[start : start + MAX_KEYS]
                found = await self._ask(TOUCH, lot, link)
                num_there = num_there if found == len(lot) else start + found
            return num_there

        return await self._talk(talk, self._timeout_s, 0)

    async def _ask(self, kind: int, keys: Sequence[int], link: Stream, *, most: int | None = None) -> int:
        format = self._format
        await link.send(pack_request(kind, keys, chunk_bytes=format.chunk_bytes, identity=format.identity))
        return await receive_number(link, len(keys) if most is None else most)

    async def _ask_counts(self, link: Stream) -> TierCounts:
        length = await self._ask(COUNTS, (), link, most=MAX_COUNTS_BYTES)
        return msgspec.msgpack.decode(await link.receive(length), type=TierCounts)

    async def _read_lot(self, targets: Sequence[tuple[int, memoryview]], link: Stream) -> int:
        """Return how many chunks arrived complete and right."""
        num_coming = await self._ask(READ, [key for key, _ in targets], link)
        size, chunk_bytes = group_size(self._format.chunk_bytes), self._format.chunk_bytes
        num_right, wrong = 0, list[int]()
        for start in range(0, num_coming, size):
            group = await receive_group(link, min(size, num_coming - start), chunk_bytes)
            for chunk, (key, target) in zip(group, targets[start:], strict=False):
                if not await self._is_right(chunk, key):
                    wrong.append(key)
                elif not wrong:
                    target[:] = chunk
                    num_right += 1
        self._note((), gone=[*wrong, *(key for key, _ in targets[num_coming : num_coming + 1])])
        if wrong:
            await self._ask(REMOVE, wrong, link)
        elif num_right:
            self._spoilt.end()
        return num_right

    async def _is_right(self, chunk: memoryview, key: int) -> bool:
        """Return whether a chunk is right; report it otherwise."""
        find_fault = partial(self._format.find_fault, chunk, key)
        fault = find_fault() if len(chunk) <= GROUP_BYTES else await in_thread(find_fault)
        if fault:
            self._tally.add(num_faults=1)
            self._spoilt.begin(f"chunk {key:016x}: {fault}")
        return not fault

    async def _write_lot(self, chunks: Sequence[tuple[int, memoryview]], link: Stream) -> int:
        """Return how many of the first chunks are there now."""
        num_taken = await self._ask(WRITE, [key for key, _ in chunks], link)
        is_wanted = await link.receive(num_taken)
        wanted = [chunk for (_, chunk), is_it in zip(chunks, is_wanted, strict=False) if is_it]
        await send_chunks(link, wanted)
        num_there = await receive_number(link, num_taken)
        num_gone = await receive_number(link, num_taken)
        self._note([key for key, _ in chunks[:num_there]], gone=unpack_keys(await link.receive(num_gone * KEY_BYTES)))
        self._tally.add(num_evicted=num_gone, num_written=min(len(wanted), num_there))
        return num_there

    def _note(self, there: Sequence[int], *, gone: Sequence[int]) -> None:
        """Note which chunks the store reported as there or gone; forget the oldest if they would not fit in it."""
        known = self._known
        for key in gone:
            known.pop(key, None)
        self.changes.left(gone)
        self.changes.came([key for key in there if key not in known])
        for key in there:
            known[key] = None
            known.move_to_end(key)
        while len(known) > self._capacity:
            self.changes.left([known.popitem(last=False)[0]])

    # Connections

    async def _talk(self, talk: Callable[[Stream], Awaitable[Result]], timeout_s: float, nothing: Result) -> Result:
        """Talk to the store; return `nothing` if it cannot be reached or is too slow."""
        if not self._is_up or self._num_calls >= MAX_CALLS:
            return nothing
        self._num_calls += 1
        timeout_s = world().patience(timeout_s)
        try:
            async with asyncio.timeout(timeout_s), self._links:
                return await self._on_link(talk) if self._is_up else nothing
        except TimeoutError:
            self._lose(f"no answer within {timeout_s:g} s")
        except (OSError, TransferError, msgspec.MsgspecError) as error:
            self._lose(str(error))
        finally:
            self._num_calls -= 1
        return nothing

    async def _on_link(self, talk: Callable[[Stream], Awaitable[Result]]) -> Result:
        link = self._idle.pop() if self._idle else await self._dial()
        try:
            result = await talk(link)
        except BaseException:
            link.close()
            raise
        if self._is_up:
            self._idle.append(link)
        else:
            link.close()
        return result

    async def _dial(self) -> Stream:
        link = Stream(await connect(self._host, self._port))
        try:
            await prove(link, place_of(self._port), self._token(), is_caller=True)
            if (await link.receive(len(WELCOME) + ID_BYTES))[: len(WELCOME)] != WELCOME:
                raise TransferError("this is not a KV store of our version", "refused")
            await link.send(self._id)
        except BaseException:
            link.close()
            raise
        return link

    def _lose(self, why: str) -> None:
        """Do without the store until it can be reached again."""
        if not self._is_up:
            return
        self._is_up = False
        self._note((), gone=list(self._known))
        self._tally.add(num_faults=1)
        while self._idle:
            self._idle.pop().close()
        self._absence.begin(why)
        self._reaching = asyncio.create_task(self._reach())

    async def _reach(self) -> None:
        """Retry until the store answers."""
        num_attempts = 0
        while True:
            try:
                async with asyncio.timeout(self._timeout_s):
                    link = await self._dial()
                    try:
                        num_bytes = (await self._ask_counts(link)).capacity
                    except BaseException:
                        link.close()
                        raise
            except (OSError, TransferError, msgspec.MsgspecError) as error:  # a TimeoutError is an OSError
                self._absence.begin(str(error) or f"no answer within {self._timeout_s:g} s")
                await asyncio.sleep(BACKOFF_S[min(num_attempts, len(BACKOFF_S) - 1)])
                num_attempts += 1
            else:
                self._capacity = num_bytes // (self._format.chunk_bytes + ENTRY_BYTES)
                self._idle.append(link)
                self._is_up = True
                self._absence.end()
                return


def parse_address(text: str) -> tuple[str, int]:
    """Return the host and port of HOST:PORT.

    Raises:
        ValueError: it is not an address.
    """
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 1 << 16:
        raise ValueError(f"expected the KV store's address as HOST:PORT, not {text!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)
