"""The sockets of one rank's KV events, with vLLM's frames.

    PUB     topic | number | payload                         number: 8 bytes, big-endian, from 0
    ROUTER  <- client | "" | first number                    a subscriber has missed some
            -> client | "" | topic | number | payload        ... for each that is kept, from the first number on
            -> client | "" | ""    | -1     | ""             the end

Unlike vLLM there is no thread: to publish never waits, as ZeroMQ drops what a slow subscriber has no room for, and
subscribers that ask are served between the steps of engines. All sockets of a process share one thread of ZeroMQ's.
"""

import asyncio
import itertools
import logging
import socket
from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec
import zmq
import zmq.asyncio

from serving.stand_in.config import KvEventsConfig
from serving.stand_in.vllm.kv_events.endpoints import PublisherError, endpoint_of
from serving.stand_in.vllm.kv_events.messages import EventBatch

log = logging.getLogger(__name__)

END = (-1).to_bytes(8, "big", signed=True)
ANY_PORT = "tcp://*:0"
REPLAYED_AT_ONCE = 64
"""Messages sent to a subscriber that asks before engines get another turn."""


class Publisher:
    """Publishes one rank's events, numbered, and keeps the latest for subscribers that missed some."""

    def __init__(self, config: KvEventsConfig, rank: int) -> None:
        """Open the sockets.

        Raises:
            PublisherError: an address cannot be used.
        """
        self._topic = config.topic.encode()
        self._numbers = itertools.count()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._encode = msgspec.msgpack.Encoder().encode
        self._replaying: asyncio.Task[None] | None = None
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket: zmq.Socket[bytes] = context.socket(zmq.PUB)
        self._socket.set_hwm(config.hwm)
        self.wire: Callable[[tuple[bytes, bytes, bytes]], object] = partial(
            self._socket.send_multipart, flags=zmq.NOBLOCK
        )
        """What sends the frames of a message."""
        self._replies: zmq.asyncio.Socket | None = None
        self.replay_endpoint: str | None = None
        try:
            self.endpoint = _open(self._socket, endpoint_of(config.endpoint, rank), config.host_ip)
            if config.replay_endpoint is not None:
                self._replies = replies = zmq.asyncio.Socket(context, zmq.ROUTER)
                # A ROUTER drops what there is no room for. All that is kept must have some, and the end, too.
                replies.setsockopt(zmq.SNDHWM, config.buffer_steps + 1)
                self.replay_endpoint = _bind(replies, endpoint_of(config.replay_endpoint, rank), config.host_ip)
                self._replaying = asyncio.create_task(self._replay(replies))
        except PublisherError:
            self._close_sockets()
            raise

    def send(self, batch: EventBatch) -> None:
        """Publish a batch; never waits."""
        number, payload = next(self._numbers).to_bytes(8, "big"), self._encode(batch)
        self.wire((self._topic, number, payload))
        self._kept.append((number, payload))

    async def close(self) -> None:
        """Close the sockets."""
        if self._replaying is not None:
            self._replaying.cancel()
            await asyncio.gather(self._replaying, return_exceptions=True)
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._socket.close(linger=0)
        if self._replies is not None:
            self._replies.close(linger=0)

    async def _replay(self, replies: zmq.asyncio.Socket) -> None:
        while True:
            parts = await replies.recv_multipart()
            if len(parts) != 3:
                log.warning(
                    "ignored a request for KV events of %d frames; expected an empty one and a number", len(parts)
                )
                continue
            client, _, first = parts
            kept = list(self._kept)
            oldest = int.from_bytes(kept[0][0], "big") if kept else 0
            start = max(int.from_bytes(first, "big") - oldest, 0)
            for place, (number, payload) in enumerate(kept[start:]):
                if place % REPLAYED_AT_ONCE == REPLAYED_AT_ONCE - 1:
                    await asyncio.sleep(0)
                await replies.send_multipart((client, b"", self._topic, number, payload))
            await replies.send_multipart((client, b"", b"", END, b""))


def _open(publisher: "zmq.Socket[bytes]", endpoint: str, host_ip: str) -> str:
    """Bind to an address with a wildcard, or a local one; connect to any other. Return the address."""
    if "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://")):
        return _bind(publisher, endpoint, host_ip)
    _use(publisher.connect, endpoint)
    return endpoint


def _bind(server: "zmq.Socket[bytes] | zmq.asyncio.Socket", endpoint: str, host_ip: str) -> str:
    """Bind; for any free port, bind at this host's own address and return that."""
    address = f"tcp://{host_ip or _own_address()}:0" if endpoint == ANY_PORT else endpoint
    if "[" in address:
        server.setsockopt(zmq.IPV6, 1)
    _use(server.bind, address)
    return server.getsockopt_string(zmq.LAST_ENDPOINT) if endpoint == ANY_PORT else endpoint


def _use(method: Callable[[str], object], endpoint: str) -> None:
    try:
        method(endpoint)
    except zmq.ZMQError as error:
        raise PublisherError(
            f"KV events cannot be published at {endpoint}: {zmq.strerror(error.errno or 0)}"
        ) from error


def _own_address() -> str:
    """Return the address at which other hosts find this one.

    Raises:
        PublisherError: there is none.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("198.51.100.1", 9))  # sends nothing: only asks which of our addresses would be used
            return str(probe.getsockname()[0])
    except OSError as error:
        raise PublisherError(f"{ANY_PORT} needs this host's own address; set VLLM_HOST_IP") from error
