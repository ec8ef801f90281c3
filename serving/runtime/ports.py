"""The three ports of the runtime: discovery, request plane, event plane. Each has two or three back ends."""

import logging
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVarTuple

from serving.runtime.outages import Outages

log = logging.getLogger(__name__)

Arguments = TypeVarTuple("Arguments")

OnChange = Callable[[str, bytes | None], None]
"""Called with a key and its value, or None once the key is gone."""

Stop = Callable[[], None]


class RuntimeUnavailableError(Exception):
    """A server or folder that the runtime needs cannot be used; the message names it and the way out."""


def guarded(callback: Callable[[*Arguments], object], what: str) -> Callable[[*Arguments], None]:
    """Return a callback whose failure on one call is logged and does not stop the other calls."""

    def call(*arguments: *Arguments) -> None:
        try:
            callback(*arguments)
        except Exception:
            log.exception("%s could not be processed: %.200r", what, arguments)

    return call


def changes(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> list[tuple[str, bytes | None]]:
    """Return the keys that are gone, without a value, then those that are new or have another value."""
    gone = [(key, None) for key in before if key not in after]
    return [*gone, *((key, value) for key, value in after.items() if before.get(key) != value)]


class Discovery(Protocol):
    """Keys that live as long as the process that put them, and watches on them."""

    @property
    def outages(self) -> Outages | None:
        """The outages of its server; None if it needs none."""
        ...

    async def put(self, key: str, value: bytes) -> None:
        """Register a key; it is removed when this process ends."""
        ...

    async def delete(self, key: str) -> None:
        """Remove one of our keys."""
        ...

    async def claim(self, name: str) -> int | None:
        """Hold a name that one process can hold at a time, as long as our lease; return its term, None if taken.

        Each holder has a higher term than those before it. Ask again before each act: a process that hung may have
        lost the name.

        Raises:
            RuntimeUnavailableError: the holder cannot be found out.
        """
        ...

    async def watch(self, prefix: str, on_change: OnChange) -> Stop:
        """Report all keys below a prefix, now and as they change; return once the present ones were reported."""
        ...

    async def close(self) -> None:
        """Give up the lease, and so all our keys."""
        ...


class Channel(Protocol):
    """An ordered, reliable stream of bytes to another process."""

    @property
    def is_full(self) -> bool:
        """Whether the other side accepts nothing more for now; `ChannelEnd.writable` is called when it does again."""
        ...

    @property
    def is_cut(self) -> bool:
        """Whether the way to the other side is interrupted: its silence means nothing until the way is restored."""
        ...

    @property
    def outage(self) -> str:
        """Why calls without any answer should wait no longer for the way to be restored; empty while they should."""
        ...

    def count_given_up(self) -> None:
        """Count a call that was given up because of this."""
        ...

    def write(self, data: bytes) -> None:
        """Send; never waits."""
        ...

    def close(self) -> None:
        """Hang up."""
        ...


class ChannelEnd(Protocol):
    """The callbacks of a channel."""

    def received(self, data: bytes) -> None:
        """Bytes have arrived."""
        ...

    def writable(self) -> None:
        """A full channel has room again."""
        ...

    def closed(self) -> None:
        """The other side is gone for good."""
        ...


class RequestPlane(Protocol):
    """Channels between processes."""

    @property
    def outages(self) -> Outages | None:
        """The outages of its server; None if it needs none."""
        ...

    async def listen(self, accept: Callable[[Channel], ChannelEnd]) -> str:
        """Accept channels; return the address to dial."""
        ...

    async def dial(self, address: str, accept: Callable[[Channel], ChannelEnd]) -> Channel:
        """Open a channel.

        Raises:
            OSError: nobody listens there.
        """
        ...

    async def stop_listening(self) -> None:
        """Accept no more channels; those that are open stay open."""
        ...

    async def close(self) -> None:
        """Close every channel and stop listening."""
        ...


class EventPlane(Protocol):
    """Messages to all subscribers. They may be lost, so subscribers must be able to recover their content."""

    async def announce(self, subject: str) -> None:
        """Let subscribers connect before the first message, so that they do not miss it."""
        ...

    async def publish(self, subject: str, data: bytes, *, durable: bool = False) -> None:
        """Send to all subscribers; return once the plane has accepted it."""
        ...

    async def subscribe(self, subject: str, on_event: Callable[[bytes], None], *, durable: bool = False) -> Stop:
        """Receive what is published from now on; durable subjects also after a lost connection, if the plane can."""
        ...

    async def close(self) -> None:
        """Stop publishing and receiving."""
        ...
