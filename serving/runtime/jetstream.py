"""Events over NATS's JetStream, which keeps them for subscribers that were away for a while."""

import asyncio
import logging
from collections.abc import Callable

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, StreamConfig
from nats.js.errors import NotFoundError, ServiceUnavailableError

from serving.runtime.outages import Outages
from serving.runtime.ports import Stop

log = logging.getLogger(__name__)

RETRY_S = 0.25
ASK_S = 2.0
"""How long the server may take to say whether it runs JetStream."""

STREAM = "dynabench-events"
"""One JetStream stream holds the events of all subjects, so that a namespace that is gone leaves nothing behind."""

DURABLE = "dyn.durable."
NOT_ENABLED = (None, 10039, 10076)
"""NATS's numbers of the error that JetStream is not enabled for an account, or on the server; None: nobody answers for it."""

MAX_EVENT_MESSAGES = 100_000
MAX_EVENT_BYTES = 1 << 28
MAX_EVENT_AGE_S = 3600.0


class DurableEvents:
    """Publishes and receives events over one NATS connection."""

    def __init__(self, client: Client, outages: Outages) -> None:
        self._outages = outages
        self.jetstream = client.jetstream()
        self.consumers: list[_Consumer] = []
        self._has_stream = False

    async def is_enabled(self) -> bool:
        """Return whether the server runs JetStream for us, as far as it says so: it may be away, or not let us ask."""
        try:
            async with asyncio.timeout(ASK_S):
                await self.jetstream.account_info()
        except ServiceUnavailableError as error:
            return error.err_code not in NOT_ENABLED
        except (TimeoutError, NatsError):
            return True
        return True

    async def publish(self, subject: str, data: bytes) -> None:
        """Send; returns once JetStream has it."""
        is_late = False
        while True:
            try:
                await self.ensure_stream()
                await self.jetstream.publish(DURABLE + subject, data, timeout=2)
            except (TimeoutError, NatsError) as error:
                self._has_stream = False
                if not is_late and not self._outages.is_away:  # that has been logged
                    log.warning("events on %s wait until JetStream accepts them: %s", subject, error)
                    is_late = True
                await asyncio.sleep(RETRY_S)
            else:
                return

    async def subscribe(self, subject: str, on_event: Callable[[bytes], None]) -> Stop:
        """Receive what is published from now on, also after a time without a connection."""
        consumer = _Consumer(self, subject, on_event)
        self.consumers.append(consumer)
        try:
            await consumer.start()
        except (TimeoutError, NatsError):
            consumer.restart()  # the server is away at the moment
        return consumer.stop

    async def ensure_stream(self) -> None:
        """Create the stream unless it exists."""
        if self._has_stream:
            return
        await self.jetstream.add_stream(
            StreamConfig(
                name=STREAM,
                subjects=[f"{DURABLE}>"],
                max_msgs_per_subject=MAX_EVENT_MESSAGES,
                max_bytes=MAX_EVENT_BYTES,
                max_age=MAX_EVENT_AGE_S,
            )
        )
        self._has_stream = True

    def on_reconnected(self) -> None:
        """The server may have forgotten everything."""
        self._has_stream = False
        for consumer in self.consumers:
            consumer.restart()

    def close(self) -> None:
        """Stop receiving."""
        for consumer in self.consumers:
            consumer.cancel()


class _Consumer:
    """Follows a JetStream stream from where it was, also across restarts of the server."""

    def __init__(self, events: DurableEvents, subject: str, on_event: Callable[[bytes], None]) -> None:
        self._events = events
        self._subject = subject
        self._on_event = on_event
        self._seen = 0
        self._subscription: Subscription | None = None
        self._restarting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Subscribe after the last message seen; the first time, to new messages."""
        events = self._events
        await events.ensure_stream()
        state = (await events.jetstream.stream_info(STREAM)).state
        if not self._seen or state.last_seq < self._seen:  # a new stream: its numbers start again
            self._seen = state.last_seq
        self._subscription = await events.jetstream.subscribe(
            DURABLE + self._subject,
            stream=STREAM,
            cb=self._heard,
            config=ConsumerConfig(
                deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
                opt_start_seq=self._seen + 1,
                ack_policy=AckPolicy.NONE,
                inactive_threshold=30,
            ),
        )

    def restart(self) -> None:
        """Subscribe again: the server may have forgotten us."""
        self.cancel()
        self._restarting = asyncio.create_task(self._restart())

    def stop(self) -> None:
        """Stop receiving."""
        self.cancel()
        if self in self._events.consumers:
            self._events.consumers.remove(self)
        if self._subscription is not None:
            unsubscribe(self._subscription)

    def cancel(self) -> None:
        """Stop restarting."""
        if self._restarting is not None:
            self._restarting.cancel()

    async def _restart(self) -> None:
        while True:
            try:
                if self._subscription is not None:
                    await self._subscription.unsubscribe()
                    self._subscription = None
                await self.start()
            except (TimeoutError, NatsError, NotFoundError):
                await asyncio.sleep(RETRY_S)
            else:
                return

    async def _heard(self, message: Msg) -> None:
        number = message.metadata.sequence.stream
        if number > self._seen:
            self._seen = number
            self._on_event(message.data)


def unsubscribe(subscription: Subscription) -> None:
    """Stop receiving, whether or not the server can be notified."""
    task = asyncio.ensure_future(subscription.unsubscribe())
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
