"""KV events of vLLM and SGLang: receives them over ZeroMQ and gives their blocks our hashes.

Both engines send [time, events, rank] in msgpack, numbered. What an engine sends before it is connected is lost, so a
first number is as good as any other: wait for the connection before the first request. An event is a map with its kind under `type` (older
vLLM: an array that begins with the kind). The engine names a block by its own hash; we hash its tokens again, chained to
its parent, so that every engine's blocks have the names that the router looks for.

A block may be on the GPU, in host memory and on disks at the same time, under one name. LMCache names chunks of several
blocks by its own hashes.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
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
    None: "GPU",  # older engines keep blocks nowhere else
    "GPU": "GPU",
    "CPU": "CPU",
    "cpu": "CPU",  # LMCache in vLLM's process
    "STORAGE": "STORAGE",
    "CPU_PINNED": "CPU",  # SGLang, from here
    "DISK": "STORAGE",
    "EXTERNAL": "SHARED",
}
"""Where blocks are: the engines' words for it, and ours."""


class _Run(NamedTuple):
    """What an engine names as one: a block, or a chunk of several."""

    hashes: list[int]
    above: int | None
    """The block before the first of them."""


class HashTranslator:
    """Names an engine's blocks by our sequence hashes."""

    def __init__(self, block_size: int, roots: Mapping[str, int] | None = None) -> None:
        """Know nothing yet; `roots` are the hashes below which the first blocks of LoRA adapters are named, by adapter."""
        self._block_size = block_size
        self._roots = roots or {}
        self._ours: dict[Any, _Run] = {}
        self._copies: dict[Medium, dict[Any, int]] = {medium: {} for medium in get_args(Medium)}
        self._has_warned = False

    def stored(
        self,
        theirs: Sequence[Any],
        parent: Any,
        tokens: Sequence[int],
        *,
        medium: Medium = "GPU",
        root: int | None = None,
    ) -> BlocksStored | None:
        """Translate a chain of blocks, or of chunks of blocks, that begins below `parent` (none: at the root, or at an adapter's)."""
        if not tokens:
            return None  # a placeholder: vLLM also names chunks whose tokens it no longer knows
        if parent is not None and parent not in self._ours:
            self._warn(f"ignored a block stored below {parent!r}, which the engine never reported")
            return None
        size, rest = divmod(len(tokens), self._block_size * len(theirs)) if theirs else (0, 1)
        if rest or not size:
            self._warn(
                f"ignored {len(theirs)} blocks of {self._block_size} tokens: there are {len(tokens)} tokens for them"
            )
            return None
        above = None if parent is None else self._ours[parent].hashes[-1]
        new = sequence_hashes(
            block_hashes(np.array(tokens, np.uint32), self._block_size), root if above is None else above
        )
        for place, name in enumerate(theirs):
            start = place * size
            self._ours[name] = _Run(new[start : start + size], new[start - 1] if start else above)
            self._add(name, medium)
        return BlocksStored(new, above, medium)

    def removed(self, theirs: Sequence[Any], *, medium: Medium = "GPU") -> BlocksRemoved | None:
        """Translate blocks that were removed from a medium.

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
        """Translate an event as received; return None if it is of no use to a router.

        Raises:
            ValueError: it is not a KV event.
        """
        kind, fields = _fields(event)
        if kind == "AllBlocksCleared":
            return self.cleared()
        medium = MEDIA.get(fields.get("medium"))
        if medium is None:
            self._warn(f"ignored a block in the unknown medium {fields['medium']!r}")
            return None
        if medium == "STORAGE" and fields.get("locality") == "REMOTE":
            medium = "SHARED"
        adapter = fields.get("lora_name") or fields.get("lora_id")
        if adapter and adapter not in self._roots:
            return None  # nobody can ask for it here
        if kind == "BlockStored":
            root = self._roots[adapter] if adapter else None
            hashes, parent, tokens = fields["block_hashes"], fields["parent_block_hash"], fields["token_ids"]
            return self.stored(hashes, parent, tokens, medium=medium, root=root)
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
    """Receives one rank's events, at a local address that the engine connects to."""

    def __init__(self, context: zmq.asyncio.Context, port: int) -> None:
        """Listen on a port of the loopback interface (0: any free port)."""
        self._socket = context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.subscribe(b"")
        self._connections = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            self._socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        except zmq.ZMQError:
            self.close()
            raise
        address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(address.rpartition(":")[2])

    async def connected(self) -> None:
        """Wait until the engine is connected; call it once."""
        await self._connections.recv_multipart()

    async def run(
        self, block_size: int, publish: Callable[[Sequence[BlocksEvent]], None], roots: Mapping[str, int]
    ) -> None:
        """Translate and publish forever; see `HashTranslator`."""
        translator = HashTranslator(block_size, roots)
        expected: int | None = None
        while True:
            parts = await self._socket.recv_multipart()
            try:
                _, number, payload = parts
                _, events, *_ = msgspec.msgpack.decode(payload)
                came = int.from_bytes(number, "big")
                if expected is not None and came != expected:
                    log.warning("lost the engine's KV events %d to %d: forgetting its blocks", expected, came - 1)
                    publish([translator.cleared()])
                expected = came + 1
                translated = [found for event in events if (found := translator.translate(event)) is not None]
            except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
                # Every user of the host can send to this port: garbage must not end the engine.
                log.warning("ignored KV events that cannot be read: %s", error)
                publish([translator.cleared()])
                continue
            if translated:
                publish(translated)

    def close(self) -> None:
        """Give the port back."""
        self._socket.disable_monitor()
        self._connections.close()
        self._socket.close()


class EventReaders:
    """Receives the events of every rank: rank r's at the base port + r, where the engines send them."""

    def __init__(self, num_ranks: int) -> None:
        self._context = zmq.asyncio.Context()
        self._readers = _bind(self._context, num_ranks)
        self._tasks: list[asyncio.Task[None]] = []
        self.endpoint = f"tcp://127.0.0.1:{self._readers[0].port}"
        """The address to pass to the engine; as its host is not a wildcard, the engine connects to it instead of listening there."""

    async def connected(self) -> None:
        """Wait until every rank is connected."""
        await asyncio.gather(*(reader.connected() for reader in self._readers))

    def start(
        self,
        block_size: int,
        publish: Sequence[Callable[[Sequence[BlocksEvent]], None]],
        roots: Mapping[str, int] | None = None,
    ) -> None:
        """Start publishing; `roots` are those of LoRA adapters, by name, if the engine has any."""
        for reader, into in zip(self._readers, publish, strict=True):
            self._tasks.append(asyncio.create_task(reader.run(block_size, into, roots or {})))

    async def failed(self) -> None:
        """Wait until a reader fails, and raise its error."""
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
    """Find `count` consecutive free ports."""
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
    raise OSError(f"no {count} consecutive ports are free for KV events")
