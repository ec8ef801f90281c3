"""KV events of vLLM and SGLang: their blocks under our hashes, as they come over ZeroMQ.

Both engines send [time, events, rank] in msgpack, numbered from zero. An event is a map with its kind under `type` (or,
from older vLLM, an array that begins with it). A block is named by a hash of the engine's own; we hash its tokens again,
chained to its parent, so that every engine's blocks have the names that the router looks for.

A block may be on the GPU, in host memory and on disks at once, under one name. LMCache names chunks of several blocks by
hashes of its own.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from serving.router.events import BlocksCleared, BlocksEvent, BlocksRemoved, BlocksStored, Medium
from serving.router.hashing import block_hashes, sequence_hashes

log = logging.getLogger(__name__)

MAX_QUEUED = 100_000
STORED_FIELDS = ("block_hashes", "parent_block_hash", "token_ids", "block_size")
MEDIA: dict[str | None, Medium] = {
    None: "GPU",  # older engines keep nothing elsewhere
    "GPU": "GPU",
    "CPU": "CPU",
    "cpu": "CPU",  # LMCache in vLLM's process
    "STORAGE": "STORAGE",
    "CPU_PINNED": "CPU",  # SGLang, from here
    "DISK": "STORAGE",
    "EXTERNAL": "SHARED",
}
"""Where blocks are, in the words of engines and in ours."""


class _Run(NamedTuple):
    """What an engine calls by one name: a block, or a chunk of several."""

    hashes: list[int]
    above: int | None
    """The block before them."""


class HashTranslator:
    """Names an engine's blocks by our sequence hashes."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._ours: dict[Any, _Run] = {}
        self._copies: dict[Medium, dict[Any, int]] = {medium: {} for medium in get_args(Medium)}
        self._has_warned = False

    def stored(
        self, theirs: Sequence[Any], parent: Any, tokens: Sequence[int], *, medium: Medium = "GPU"
    ) -> BlocksStored | None:
        """Translate blocks, or chunks of blocks, that hang below `parent` (none: at the root), each below the one before it."""
        if not tokens:
            return None  # a placeholder: vLLM names chunks whose tokens it does not know any more
        if parent is not None and parent not in self._ours:
            self._warn(f"a block was stored below {parent!r}, which the engine never told of: it is left out")
            return None
        size, rest = divmod(len(tokens), self._block_size * len(theirs)) if theirs else (0, 1)
        if rest or not size:
            self._warn(
                f"{len(tokens)} tokens do not fill {len(theirs)} blocks of {self._block_size}: they are left out"
            )
            return None
        above = None if parent is None else self._ours[parent].hashes[-1]
        new = sequence_hashes(block_hashes(np.array(tokens, np.uint32), self._block_size), above)
        for place, name in enumerate(theirs):
            start = place * size
            self._ours[name] = _Run(new[start : start + size], new[start - 1] if start else above)
            self._add(name, medium)
        return BlocksStored(new, above, medium)

    def removed(self, theirs: Sequence[Any], *, medium: Medium = "GPU") -> BlocksRemoved | None:
        """Translate blocks that are gone from a medium.

        Routers count copies on the GPU only; beyond it a block is gone when its last copy is.
        """
        gone: list[int] = []
        copies = self._copies[medium]
        for name in theirs:
            if name not in copies:
                continue
            copies[name] -= 1
            if medium == "GPU" or not copies[name]:
                gone += reversed(self._ours[name].hashes)
            if not copies[name]:
                del copies[name]
                if not any(name in held for held in self._copies.values()):
                    del self._ours[name]
        return BlocksRemoved(gone, medium) if gone else None

    def moved(self, name: Any, before: Medium, now: Medium) -> list[BlocksEvent]:
        """Translate a block that left a medium for another."""
        if name not in self._copies[before]:
            return []
        run = self._ours[name]
        self._add(name, now)
        removed = self.removed([name], medium=before)
        return [BlocksStored(run.hashes, run.above, now), *([] if removed is None else [removed])]

    def cleared(self) -> BlocksCleared:
        """Forget everything."""
        self._ours.clear()
        for held in self._copies.values():
            held.clear()
        return BlocksCleared()

    def translate(self, event: Any) -> BlocksEvent | None:
        """Translate an event as it came; None for what is of no use to a router.

        Raises:
            ValueError: it is not an event of an engine.
        """
        kind, fields = _fields(event)
        if kind == "AllBlocksCleared":
            return self.cleared()
        medium = MEDIA.get(fields.get("medium"))
        if medium is None:
            self._warn(f"a block is said to be in {fields['medium']!r}, which is unknown: it is left out")
            return None
        if medium == "STORAGE" and fields.get("locality") == "REMOTE":
            medium = "SHARED"
        if fields.get("lora_name") or fields.get("lora_id"):
            return None
        if kind == "BlockStored":
            return self.stored(fields["block_hashes"], fields["parent_block_hash"], fields["token_ids"], medium=medium)
        if kind == "BlockRemoved":
            return self.removed(fields["block_hashes"], medium=medium)
        raise ValueError(f"unknown KV event {kind!r}")

    def _add(self, name: Any, medium: Medium) -> None:
        copies = self._copies[medium]
        copies[name] = copies.get(name, 0) + 1

    def _warn(self, message: str) -> None:
        if not self._has_warned:
            log.warning("%s (and others like it)", message)
            self._has_warned = True


def _fields(event: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(event, dict):
        return str(event.get("type")), event
    if not isinstance(event, list) or not event:
        raise ValueError(f"not a KV event: {str(event)[:100]}")
    names = ("block_hashes", "medium") if event[0] == "BlockRemoved" else (*STORED_FIELDS, "lora_id", "medium")
    return str(event[0]), dict(zip(names, event[1:], strict=False))


class EventReader:
    """Receives one rank's events, at an address of ours that the engine connects to."""

    def __init__(self, context: zmq.asyncio.Context, port: int) -> None:
        """Listen on a port of the loopback interface (0: any that is free)."""
        self._socket = context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.subscribe(b"")
        try:
            self._socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        except zmq.ZMQError:
            self._socket.close()
            raise
        address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(address.rpartition(":")[2])

    async def run(self, block_size: int, publish: Callable[[Sequence[BlocksEvent]], None]) -> None:
        """Translate and publish forever."""
        translator = HashTranslator(block_size)
        expected = 0
        while True:
            parts = await self._socket.recv_multipart()
            try:
                _, number, payload = parts
                _, events, *_ = msgspec.msgpack.decode(payload)
                if (came := int.from_bytes(number, "big")) != expected:
                    log.warning(
                        "KV events %d to %d of the engine are lost: what was known is forgotten", expected, came - 1
                    )
                    publish([translator.cleared()])
                expected = came + 1
                translated = [found for event in events if (found := translator.translate(event)) is not None]
            except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
                # Every user of the host can send to this port: what is no event must not end the engine.
                log.warning("KV events that cannot be read are left out: %s", error)
                publish([translator.cleared()])
                continue
            if translated:
                publish(translated)

    def close(self) -> None:
        """Give the port back."""
        self._socket.close()


class EventReaders:
    """Receives the events of every rank; rank r's at the base port + r, as the engines count."""

    def __init__(self, num_ranks: int) -> None:
        self._context = zmq.asyncio.Context()
        self._readers = _bind(self._context, num_ranks)
        self._tasks: list[asyncio.Task[None]] = []
        self.endpoint = f"tcp://127.0.0.1:{self._readers[0].port}"
        """What to tell the engine: a host that is no wildcard makes it connect instead of listening to the world."""

    def start(self, block_size: int, publish: Sequence[Callable[[Sequence[BlocksEvent]], None]]) -> None:
        """Publish from now on."""
        for reader, into in zip(self._readers, publish, strict=True):
            self._tasks.append(asyncio.create_task(reader.run(block_size, into)))

    async def failed(self) -> None:
        """Wait until a reader has failed, and raise why."""
        if not self._tasks:
            await asyncio.Event().wait()
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        await done.pop()

    async def close(self) -> None:
        """Stop."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for reader in self._readers:
            reader.close()
        self._context.term()


def _bind(context: zmq.asyncio.Context, count: int) -> list[EventReader]:
    """Find `count` free ports in a row."""
    for _ in range(100):
        readers = [EventReader(context, 0)]
        try:
            for rank in range(1, count):
                readers.append(EventReader(context, readers[0].port + rank))
        except (zmq.ZMQError, OverflowError):
            for reader in readers:
                reader.close()
        else:
            return readers
    raise OSError(f"there are no {count} free ports in a row for KV events")
