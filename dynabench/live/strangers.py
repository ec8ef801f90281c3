"""Workers in a stack's discovery that the stack did not start: they join it by design, but seldom by intention."""

import asyncio
from collections.abc import Callable, Collection
from typing import NamedTuple

from foundation.text import listed
from serving.model.card import ModelCard
from serving.supervision.group import Event, ProcessEnded, ProcessGroup, ProcessReady

QUIET_S = 1.0
"""Workers come in groups: how long none may come or go before they are counted."""


class Network(NamedTuple):
    """Where a stack's workers register."""

    namespace: str
    place: str


class Strangers:
    """Warns once if workers of a stack's models are not its own.

    A worker registers before it reports its id to us, so strangers are told apart only while every process of the group
    has reported. The ids of those that ended are remembered: their cards last as long as their leases.
    """

    def __init__(self, network: Network, models: Collection[str], warn: Callable[[str], None]) -> None:
        self._network = network
        self._models = models
        self._warn = warn
        self._own: set[str] = set()
        self._ready: set[str] = set()
        self._cards: dict[str, ModelCard] = {}
        self._group: ProcessGroup | None = None
        self._counting: asyncio.TimerHandle | None = None
        self._has_warned = False

    def on_event(self, event: Event) -> None:
        """Take note of a process of the group."""
        match event:
            case ProcessReady(name, known_as):
                self._ready.add(name)
                self._own.add(known_as)
            case ProcessEnded(name):
                self._ready.discard(name)
        self._count_soon()

    def on_card(self, key: str, card: ModelCard | None) -> None:
        """Take note of a worker that comes or goes (None)."""
        if card is None:
            self._cards.pop(key, None)
        elif card.name in self._models:
            self._cards[key] = card
        self._count_soon()

    def watch(self, group: ProcessGroup) -> None:
        """Tell a group's workers from others from now on."""
        self._group = group
        self._count_soon()

    def close(self) -> None:
        """Stop."""
        self._has_warned = True
        if self._counting is not None:
            self._counting.cancel()

    def _count_soon(self) -> None:
        if self._has_warned:
            return
        if self._counting is not None:
            self._counting.cancel()
        self._counting = asyncio.get_running_loop().call_later(QUIET_S, self._count)

    def _count(self) -> None:
        if self._group is None or not self._group.processes.keys() <= self._ready:
            return
        strangers = [card for card in self._cards.values() if f"{card.instance_id:x}" not in self._own]
        if strangers:
            self._has_warned = True
            self._warn(self._message(strangers))

    def _message(self, strangers: list[ModelCard]) -> str:
        count, models = len(strangers), listed(sorted({card.name for card in strangers}))
        found = f"{count} workers of {models} were" if count > 1 else f"1 worker of {models} was"
        return (
            f"WARN {found} not started by this command and will answer its requests too: registered in namespace "
            f"{self._network.namespace} of {self._network.place}; for a stack of its own, start it with another "
            "--discovery-dir or --namespace (DYN_NAMESPACE; in a deployment file: name)"
        )
