"""Receives the KV events of vLLM and SGLang over ZeroMQ.

Both engines send [time, events, rank] in msgpack, numbered. What an engine sends before it is connected is lost, so a
first number is as good as any other: wait for the connection before the first request.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec
import zmq
import zmq.asyncio

from serving.engines.block_hashes import HashTranslator
from serving.router.events import BlocksEvent

log = logging.getLogger(__name__)

MAX_QUEUED = 100_000


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
                translated = translator.translate(events)
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
