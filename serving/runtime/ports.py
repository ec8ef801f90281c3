"""The three ports of the runtime: discovery, request plane, event plane. Two or three back ends stand behind each."""

import logging
from collections.abc import Callable
from typing import Protocol, TypeVarTuple

log = logging.getLogger(__name__)

Arguments = TypeVarTuple("Arguments")

OnChange = Callable[[str, bytes | None], None]
"""Called with a key and its value, or None once the key is gone."""

Stop = Callable[[], None]


class RuntimeUnavailableError(Exception):
    """A server or folder that the runtime needs cannot be used; the message says which, and what to do."""


def guarded(callback: Callable[[*Arguments], object], what: str) -> Callable[[*Arguments], None]:
    """Return a callback whose failure over one call is logged, and keeps nobody from hearing of the others."""

    def call(*arguments: *Arguments) -> None:
        try:
            callback(*arguments)
        except Exception:
            log.exception("%s could not be processed: %.200r", what, arguments)

    return call


class Discovery(Protocol):
    """Keys that live as long as the process that put them, and watches on them."""

    async def put(self, key: str, value: bytes) -> None:
        """Register a key; it goes when this process does."""
        ...

    async def delete(self, key: str) -> None:
        """Take a key of ours out."""
        ...

    async def claim(self, name: str) -> int | None:
        """Hold what only one process can hold at a time, as long as our lease; return its term, or None while another holds it.

        Each holder has a higher term than those before it. Who acts on it asks again before: a process that hung may
        have lost it.

        Raises:
            RuntimeUnavailableError: nobody can say.
        """
        ...

    async def watch(self, prefix: str, on_change: OnChange) -> Stop:
        """Tell of all keys below a prefix, now and as they change; returns once the present ones were told."""
        ...

    async def close(self) -> None:
        """Give up the lease: all our keys go."""
        ...


class Channel(Protocol):
    """An ordered, reliable stream of bytes to another process."""

    @property
    def is_full(self) -> bool:
        """Whether the other side takes no more for now; `ChannelEnd.writable` tells when it does again."""
        ...

    @property
    def is_cut(self) -> bool:
        """Whether the way to the other side is interrupted: its silence means nothing until it is mended."""
        ...

    def write(self, data: bytes) -> None:
        """Send; never waits."""
        ...

    def close(self) -> None:
        """Hang up."""
        ...


class ChannelEnd(Protocol):
    """What a channel calls back."""

    def received(self, data: bytes) -> None:
        """Bytes have come."""
        ...

    def writable(self) -> None:
        """A full channel has room again."""
        ...

    def closed(self) -> None:
        """The other side is gone, for good."""
        ...


class RequestPlane(Protocol):
    """Channels between processes."""

    async def listen(self, accept: Callable[[Channel], ChannelEnd]) -> str:
        """Accept channels; return the address to dial."""
        ...

    async def dial(self, address: str, accept: Callable[[Channel], ChannelEnd]) -> Channel:
        """Open a channel.

        Raises:
            OSError: nobody listens there.
        """
        ...

    async def close(self) -> None:
        """Close every channel and stop listening."""
        ...


class EventPlane(Protocol):
    """Messages to whoever listens. They may be lost: what they tell must be repairable."""

    async def announce(self, subject: str) -> None:
        """Let subscribers connect before the first message, so that they do not miss it."""
        ...

    async def publish(self, subject: str, data: bytes, *, durable: bool = False) -> None:
        """Send to all who subscribed; returns when the plane took it."""
        ...

    async def subscribe(self, subject: str, on_event: Callable[[bytes], None], *, durable: bool = False) -> Stop:
        """Hear what is published from now on; durable subjects also after a time without connection, where that can be."""
        ...

    async def close(self) -> None:
        """Stop publishing and hearing."""
        ...
