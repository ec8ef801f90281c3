"""Events on a memory network: directly to each subscriber, as with ZeroMQ, or over a server, as with NATS."""

import asyncio
from collections.abc import Callable
from contextvars import Context, copy_context

from serving.runtime.memory.broker import Broker, Subscription
from serving.runtime.memory.node import Link, Node
from serving.runtime.memory.server import UNREACHABLE, Line
from serving.runtime.ports import Discovery, Stop, guarded

CHANNELS = "v1/event_channels/"

RECONNECT_S = 0.1
"""How long after its connection broke, or nobody listened, a subscriber connects again."""

RETRY_S = 0.25
"""How long after a failure a durable event is sent again."""

REPEAT_S = 2.25
"""How long after a durable event whose acknowledgement was lost it is sent again."""

Hear = Callable[[bytes], None]


class DirectEvents:
    """Every publisher is named in discovery, and subscribers connect to it: until then, they miss what it publishes."""

    def __init__(self, node: Node, instance_id: int, discovery: Discovery) -> None:
        self.node = node
        self.pipes: dict[str, dict[Pipe, None]] = {}
        """The connected subscribers of each subject."""
        self._id = instance_id
        self._address = f"memory:{node.name}/{instance_id:x}/events"
        self._discovery = discovery
        self._stops: list[Stop] = []

    async def announce(self, subject: str) -> None:
        """Register the address in discovery."""
        if subject not in self.pipes:
            self.pipes[subject] = {}
            self.node.network.listen(self._address, self)
            await self._discovery.put(f"{CHANNELS}{subject}/{self._id:x}", self._address.encode())

    async def publish(self, subject: str, data: bytes, *, durable: bool = False) -> None:
        """Send to all subscribers that are connected, and not too far behind."""
        if subject not in self.pipes:
            await self.announce(subject)
        for pipe in list(self.pipes[subject]):
            pipe.offer(data)

    async def subscribe(self, subject: str, on_event: Hear, *, durable: bool = False) -> Stop:
        """Receive from every process that publishes on a subject, as soon as it appears."""
        hear = guarded(on_event, f"an event of {subject}")
        pipes: dict[str, Pipe] = {}

        def on_change(key: str, value: bytes | None) -> None:
            if (old := pipes.pop(key, None)) is not None:
                old.close()
            if value is not None:
                pipes[key] = Pipe(self.node, value.decode(), subject, hear, copy_context())

        stop_watch = await self._discovery.watch(f"{CHANNELS}{subject}/", on_change)

        def stop() -> None:
            stop_watch()
            for pipe in pipes.values():
                pipe.close()
            pipes.clear()

        self._stops.append(stop)
        return stop

    async def close(self) -> None:
        """Stop publishing and receiving."""
        for stop in self._stops:
            stop()
        self.node.network.listeners.pop(self._address, None)
        for subscribed in self.pipes.values():
            for pipe in list(subscribed):
                pipe.reset()


class Pipe:
    """A subscriber's connection to a publisher, which is made again whenever it breaks."""

    def __init__(self, node: Node, address: str, subject: str, hear: Hear, context: Context) -> None:
        self._node = node
        self._address = address
        self._subject = subject
        self._hear = hear
        self._context = context
        self._publisher: DirectEvents | None = None
        self._link: Link | None = None
        self._is_closed = False
        self._connect()

    @property
    def ends(self) -> tuple[Node, Node]:
        """See `Wire`."""
        assert self._publisher is not None, "a wire is connected"
        return self._node, self._publisher.node

    def offer(self, data: bytes) -> None:
        """Send an event, unless the subscriber is too far behind."""
        network = self._node.network
        assert self._link is not None, "the publisher knows only who is connected"
        if len(self._link) < network.high_water and not network.is_lucky(network.event_loss):
            self._link.send(self._receive, data)

    def close(self) -> None:
        """Hear nothing more."""
        self._is_closed = True
        self._disconnect()

    def reset(self) -> None:
        """See `Wire`."""
        self._disconnect()
        if not self._is_closed:
            self._connect_later()

    def end(self, node: Node, *, is_lost: bool) -> None:
        """See `Wire`: a subscriber that has died is forgotten; a publisher whose machine is lost is just silent."""
        if node is self._node:
            self.close()
        elif not is_lost:
            self.reset()

    def _receive(self, data: bytes) -> None:
        if not self._is_closed:
            self._hear(data)

    def _connect(self) -> None:
        """Ask the publisher to send, once this has reached it."""
        name = self._address.removeprefix("memory:").partition("/")[0]
        host = self._node.network.nodes.get(name)
        if host is not None and not self._is_closed:
            Link(self._node, host).send(self._connected)

    def _connected(self) -> None:
        publisher = self._node.network.listeners.get(self._address)
        if self._is_closed or self._node.is_dead:
            return
        if not isinstance(publisher, DirectEvents):
            self._connect_later()
            return
        self._publisher, self._link = publisher, Link(publisher.node, self._node, self._context)
        self._node.network.wires[self] = None
        publisher.pipes.setdefault(self._subject, {})[self] = None

    def _connect_later(self) -> None:
        asyncio.get_running_loop().call_later(RECONNECT_S, self._connect, context=self._context)

    def _disconnect(self) -> None:
        if self._publisher is not None and self._link is not None:
            self._publisher.pipes[self._subject].pop(self, None)
            self._node.network.wires.pop(self, None)
            self._link.lose()
            self._publisher = self._link = None


class BrokeredEvents:
    """A server passes events on; it keeps durable ones for those that cannot be reached."""

    def __init__(self, node: Node, broker: Broker) -> None:
        """Prepare to publish; what the server sends is received in the current context."""
        self._node = node
        self._broker = broker
        self._line = Line(node, broker)
        self._subscriptions: list[Subscription] = []

    async def announce(self, subject: str) -> None:
        """Do nothing: the server knows who listens."""

    async def publish(self, subject: str, data: bytes, *, durable: bool = False) -> None:
        """Send to all subscribers; a durable event waits until the server has it."""
        if not durable:
            self._line.report(self._broker.publish, subject, data, False)
            return
        await self._publish(subject, data)
        if self._node.network.is_lucky(self._node.network.event_repeats):
            await asyncio.sleep(REPEAT_S)
            await self._publish(subject, data)

    async def subscribe(self, subject: str, on_event: Hear, *, durable: bool = False) -> Stop:
        """Receive what is published from now on, once the server is there."""
        hear = guarded(on_event, f"an event of {subject}")
        link = Link(self._broker.node, self._node, copy_context(), via=self._broker)
        subscription = Subscription(subject, hear, durable, link)
        self._subscriptions.append(subscription)
        await self._insist(self._broker.subscribe, subscription)

        def stop() -> None:
            if subscription in self._subscriptions:
                self._subscriptions.remove(subscription)
                self._line.report(self._broker.unsubscribe, subscription)
                link.lose()

        return stop

    async def close(self) -> None:
        """Stop publishing and receiving."""
        for subscription in self._subscriptions:
            self._line.report(self._broker.unsubscribe, subscription)
            subscription.link.lose()
        self._subscriptions.clear()

    async def _publish(self, subject: str, data: bytes) -> None:
        await self._insist(self._broker.publish, subject, data, True)

    async def _insist(self, question: Callable[..., None], *arguments: object) -> None:
        while True:
            try:
                await self._line.ask(question, *arguments)
            except UNREACHABLE:
                await asyncio.sleep(RETRY_S)
            else:
                return
