"""The server for requests and events, as NATS is: it passes on what travels, and keeps durable events."""

from collections.abc import Callable
from typing import NamedTuple

from serving.runtime.memory.node import Link, Node
from serving.runtime.memory.server import Server


class Subscription(NamedTuple):
    """Who hears of a subject. Durable events wait for a subscriber that cannot be reached."""

    subject: str
    hear: Callable[[bytes], None]
    is_durable: bool
    link: Link


class Broker(Server):
    """See the module. Nodes ask its methods over a `Line`."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._subscriptions: dict[Subscription, None] = {}

    def go_away(self) -> None:
        """Stop serving; events that are not durable are lost."""
        super().go_away()
        for subscription in self._subscriptions:
            if not subscription.is_durable:
                subscription.link.lose()

    def wipe(self) -> None:
        """Lose the durable events that were not delivered yet."""
        for subscription in self._subscriptions:
            subscription.link.lose()

    def ping(self) -> None:
        """Do nothing."""

    def subscribe(self, subscription: Subscription) -> None:
        """Pass on what is published from now on."""
        self._subscriptions[subscription] = None

    def unsubscribe(self, subscription: Subscription) -> None:
        """Pass on nothing more."""
        self._subscriptions.pop(subscription, None)

    def publish(self, subject: str, data: bytes, is_durable: bool) -> None:
        """Pass an event on to all subscribers of its kind."""
        network = self.node.network
        for subscription in list(self._subscriptions):
            link = subscription.link
            if link.is_dead:
                del self._subscriptions[subscription]
            elif (subscription.subject, subscription.is_durable) == (subject, is_durable):
                is_missed = len(link) >= network.high_water or network.is_lucky(network.event_loss)
                if is_durable or not is_missed:
                    link.send(subscription.hear, data)
