"""Events over ZeroMQ: every publishing process binds a socket and names it in discovery.

Over TCP they are encrypted (CURVE), and nobody gets in without the publisher's key. The key is never sent: it is in
discovery, after the address, so those who may read there know it.

An event is one frame, its subject and then the data. A second frame could fail: libzmq ends the process if the publisher
disappears between two frames that are being read.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import zmq
import zmq.asyncio

from serving.runtime.ports import Discovery, RuntimeUnavailableError, Stop, guarded
from serving.runtime.private_folder import for_us_alone

log = logging.getLogger(__name__)

CHANNELS = "v1/event_channels/"
HIGH_WATER = 10_000
"""Messages kept for a slow subscriber; beyond that it misses some, and asks the publisher for them."""

END = b"\0"
"""Ends the subject."""

MAX_AT_ONCE = 64
"""Messages read before others get a turn, however many wait."""

HANDSHAKE_MS = 5000
MAX_SUBSCRIPTION_BYTES = 1 << 16
MAX_MESSAGE_BYTES = 64 << 20


class ZeroMqPlane:
    """The event plane over ZeroMQ."""

    def __init__(self, discovery: Discovery, instance_id: int, *, path: Path | None, host: str) -> None:
        """Prepare to bind a socket at `path`, or without one on a TCP port of `host`, once something is published."""
        if path is None and not zmq.has("curve"):
            raise RuntimeUnavailableError(
                f"pyzmq's libzmq {zmq.zmq_version()} cannot encrypt (CURVE), which events over TCP need; "
                "install pyzmq's wheel (pip install --force-reinstall pyzmq) or use NATS"
            )
        self._discovery = discovery
        self._id = instance_id
        self._path = path
        self._host = f"[{host}]" if ":" in host else host
        self._context = zmq.asyncio.Context()
        self._publisher: zmq.asyncio.Socket | None = None
        self._address = ""
        self._subjects: set[str] = set()
        self._readers: list[asyncio.Task[None]] = []

    async def announce(self, subject: str) -> None:
        """Bind, and register the address in discovery."""
        if self._publisher is None:
            self._publisher = self._context.socket(zmq.PUB)
            self._publisher.ipv6 = "[" in self._host
            self._publisher.setsockopt(zmq.SNDHWM, HIGH_WATER)
            self._publisher.setsockopt(zmq.LINGER, 0)
            self._publisher.setsockopt(zmq.MAXMSGSIZE, MAX_SUBSCRIPTION_BYTES)
            if self._path is not None:
                self._address = f"ipc://{self._path}"
                await self.restore()
            else:
                key, secret = zmq.curve_keypair()
                self._publisher.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
                self._publisher.curve_server = True
                self._publisher.curve_secretkey = secret
                port = self._publisher.bind_to_random_port(f"tcp://{self._host}")
                self._address = f"tcp://{self._host}:{port} {key.decode()}"
        if subject not in self._subjects:
            self._subjects.add(subject)
            await self._discovery.put(f"{CHANNELS}{subject}/{self._id:x}", self._address.encode())

    async def restore(self) -> None:
        """Bind again at our path after somebody removed its socket.

        The removed socket stays bound for its connections; closing it would make ZeroMQ remove the new one too.

        Raises:
            OSError: it cannot be bound.
        """
        if self._publisher is not None:
            try:
                with for_us_alone():
                    self._publisher.bind(self._address)
            except zmq.ZMQError as error:
                raise OSError(error.errno, error.strerror) from error

    async def publish(self, subject: str, data: bytes, *, durable: bool = False) -> None:
        """Send to all subscribers."""
        if subject not in self._subjects:
            await self.announce(subject)
        assert self._publisher is not None
        await self._publisher.send(subject.encode() + END + data)

    async def subscribe(self, subject: str, on_event: Callable[[bytes], None], *, durable: bool = False) -> Stop:
        """Receive from every process that publishes on a subject, as soon as it appears."""
        subscriber = self._context.socket(zmq.SUB)
        subscriber.setsockopt(zmq.RCVHWM, HIGH_WATER)
        subscriber.setsockopt(zmq.LINGER, 0)
        subscriber.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        subscriber.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        topic = subject.encode() + END
        subscriber.subscribe(topic)
        connected: dict[str, str] = {}

        def on_change(key: str, value: bytes | None) -> None:
            old = connected.pop(key, None)
            if old is not None:
                subscriber.disconnect(old)
            if value is not None:
                try:
                    connected[key] = _connect(subscriber, value.decode())
                except (ValueError, zmq.ZMQError) as error:
                    log.warning("%s in discovery is not a valid source of events and is ignored: %s", key, error)

        stop_watch = await self._discovery.watch(f"{CHANNELS}{subject}/", on_change)
        hear = guarded(on_event, f"an event of {subject}")

        waiting: zmq.Socket[bytes] = zmq.Socket.shadow(subscriber)

        async def read() -> None:
            while True:
                await subscriber.poll()
                for _ in range(MAX_AT_ONCE):
                    try:
                        event = waiting.recv(zmq.NOBLOCK)
                    except zmq.Again:
                        break
                    if event.startswith(topic):
                        hear(event[len(topic) :])
                await asyncio.sleep(0)

        reader = asyncio.create_task(read())
        self._readers.append(reader)

        def stop() -> None:
            stop_watch()
            reader.cancel()
            subscriber.close()

        def over(_: asyncio.Task[None]) -> None:
            subscriber.close()
            self._readers.remove(reader)

        reader.add_done_callback(over)
        return stop

    async def close(self) -> None:
        """Stop publishing and receiving."""
        readers = list(self._readers)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
        self._context.term()


def _connect(subscriber: zmq.asyncio.Socket, place: str) -> str:
    """Subscribe to a publisher, and return its address.

    Raises:
        ValueError: a TCP address has no key.
        zmq.ZMQError: the address or the key is not valid.
    """
    address, _, key = place.partition(" ")
    if not address.startswith("ipc://"):
        if not key:
            raise ValueError("expected an address and a key")
        subscriber.curve_publickey, subscriber.curve_secretkey = zmq.curve_keypair()
        subscriber.curve_serverkey = key.encode()
        subscriber.ipv6 = "[" in address
    subscriber.connect(address)
    return address
