"""Requests and events over NATS: reliable channels on top of core NATS, KV events through JetStream.

Every process listens on `dyn.process.{id}.>`. A channel is two subjects, one each way. What a broken connection or
a slow consumer loses is sent again (`reliable.py`), so a NATS server that goes away and comes back costs only time.
NATS itself notices that a peer died: nobody listens on its subject any more.
"""

import logging
from collections.abc import Callable

from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from serving.runtime.config import RuntimeConfig, masked
from serving.runtime.jetstream import DurableEvents, unsubscribe
from serving.runtime.nats_channel import NatsChannel
from serving.runtime.nats_connection import NatsConnection
from serving.runtime.ports import Channel, ChannelEnd, RuntimeUnavailableError, Stop
from serving.runtime.world import world

log = logging.getLogger(__name__)

NOBODY_LISTENS = "503"
"""The status in NATS's answer to a message for a subject that has no listener."""

Accept = Callable[[Channel], ChannelEnd]


class NatsPlane:
    """The request plane and the event plane over one NATS connection."""

    def __init__(self, config: RuntimeConfig, instance_id: int) -> None:
        self._config = config
        self._home = f"dyn.process.{instance_id:x}"
        self.connection = NatsConnection(config, self._home, self._on_reconnected)
        self.outages = self.connection.outages
        self._client = self.connection.client
        self._durable: DurableEvents | None = None
        self._channels: dict[str, NatsChannel] = {}
        self._accept: Accept | None = None

    async def connect(self) -> None:
        """Connect, and keep reconnecting whenever the server goes away.

        Raises:
            RuntimeUnavailableError: no server answers, or it refuses us, or it runs without JetStream.
        """
        await self.connection.connect()
        self._durable = DurableEvents(self._client, self.outages)
        if not await self._durable.is_enabled():
            await self.close()
            raise RuntimeUnavailableError(
                f"NATS at {masked(self._config.nats_server)} has no JetStream, which events need; start it with -js "
                "(nats-server -js), or enable it for this account"
            )
        await self._client.subscribe(f"{self._home}.>", cb=self._on_message)

    async def listen(self, accept: Accept) -> str:
        """Accept channels; return the address to dial."""
        self._accept = accept
        return f"nats:{self._home}"

    async def stop_listening(self) -> None:
        """Accept no more channels; those that are open stay open."""
        self._accept = None

    async def dial(self, address: str, accept: Accept) -> Channel:
        """Open a channel."""
        kind, _, home = address.partition(":")
        if kind != "nats":
            raise OSError(f"an instance at {address} is called over sockets; this process calls others over NATS")
        number = world().token_hex(8)
        channel = self._open(number, f"{home}.{number}", accept)
        try:
            await self._client.request(f"{home}.open", channel.subject.encode(), timeout=3)
        except BaseException as error:
            channel.end = None
            channel.close()
            if not isinstance(error, TimeoutError | NatsError):
                raise
            raise ConnectionRefusedError(f"nobody answers at {address}") from error
        return channel

    async def announce(self, subject: str) -> None:
        """Do nothing: NATS knows who listens."""

    async def publish(self, subject: str, data: bytes, *, durable: bool = False) -> None:
        """Send to all subscribers; a durable message waits until JetStream has it.

        A message larger than the server accepts is lost, which this plane allows, and logged.
        """
        if len(data) > (most := self.connection.max_payload):
            log.warning(
                "a message of %d bytes on %s was not sent: the NATS server accepts at most %d (max_payload)",
                len(data),
                subject,
                most,
            )
            return
        if not durable:
            self.connection.send(f"dyn.events.{subject}", data)
            return
        assert self._durable is not None
        await self._durable.publish(subject, data)

    async def subscribe(self, subject: str, on_event: Callable[[bytes], None], *, durable: bool = False) -> Stop:
        """Receive what is published from now on; durable messages also after a time without a connection."""
        if durable:
            assert self._durable is not None
            return await self._durable.subscribe(subject, on_event)

        async def heard(message: Msg) -> None:
            on_event(message.data)

        subscription = await self._client.subscribe(f"dyn.events.{subject}", cb=heard)
        return lambda: unsubscribe(subscription)

    async def close(self) -> None:
        """Close every channel and the connection; a second call does nothing."""
        if self._client.is_closed:
            return
        for channel in list(self._channels.values()):
            channel.close()
        await self.connection.finish()
        if self._durable is not None:
            self._durable.close()
        await self.connection.close()

    def _open(self, number: str, peer: str, accept: Accept) -> NatsChannel:
        """Create a channel, under a number that both sides know."""
        channel = NatsChannel(self.connection, f"{self._home}.{number}", peer, self._forget)
        self._channels[number] = channel
        channel.end = accept(channel)
        return channel

    def _forget(self, channel: NatsChannel) -> None:
        self._channels.pop(channel.subject.rpartition(".")[2], None)

    async def _on_message(self, message: Msg) -> None:
        name = message.subject.rpartition(".")[2]
        if name == "open":
            await self._on_open(message)
        elif (channel := self._channels.get(name)) is None:
            return
        elif not message.data and message.headers and message.headers.get("Status") == NOBODY_LISTENS:
            channel.on_nobody()
        else:
            channel.on_segment(message.data)

    async def _on_open(self, message: Msg) -> None:
        """A process opens a channel to us."""
        peer = message.data.decode()
        number = peer.rpartition(".")[2]
        if self._accept is None or number in self._channels:
            return
        self._open(number, peer, self._accept)
        await self._client.publish(message.reply, b"")

    def _on_reconnected(self) -> None:
        if self._durable is not None:
            self._durable.on_reconnected()
