"""The reader's side: connections to owners, and the time limits of its operations."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic

from foundation.ordered_set import OrderedSet
from serving.transfer.agent import TransferError
from serving.transfer.stream import Stream
from serving.transfer.way import Address, OnTurn
from serving.transfer.wire import ID_BYTES, WELCOME

MAX_LINKS = 8
"""Connections to one owner at once; a task that needs one more waits."""


@dataclass(slots=True, eq=False)
class Link:
    """A connection to an owner that knows who we are."""

    stream: Stream
    handle: int = -1
    """A handle of the owner's memory, if it sent one."""

    def close(self) -> None:
        """Hang up."""
        self.stream.close()
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


@dataclass(slots=True)
class Peer:
    """Our connections to one owner."""

    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_LINKS))
    idle: list[Link] = field(default_factory=list)
    num_users: int = 0


class Links(Generic[Address]):
    """Connections are made when needed and kept; if an owner hangs up, close at once and release its memory."""

    def __init__(self, dial: Callable[[Address], Awaitable[Link]]) -> None:
        self._dial = dial
        self._peers: dict[str, Peer] = {}

    async def use(self, owner: Address, talk: Callable[[Link], Awaitable[None]], on_turn: OnTurn) -> None:
        """Talk to an owner on a connection of our own; the exchange may be repeated on another one."""
        peer = self._peers.setdefault(owner.id, Peer())
        peer.num_users += 1
        try:
            async with peer.slots:
                on_turn()
                while True:
                    link, is_fresh = self._take(peer), False
                    if link is None:
                        link, is_fresh = await self._dial(owner), True
                    try:
                        await talk(link)
                    except BaseException as error:
                        link.close()
                        if is_fresh or not isinstance(error, ConnectionError):
                            raise
                    else:
                        self._keep(owner.id, peer, link)
                        return
        finally:
            peer.num_users -= 1
            self._forget(owner.id, peer)

    def close(self) -> None:
        """Hang up on every owner."""
        for peer in self._peers.values():
            while link := self._take(peer):
                link.close()
        self._peers.clear()

    def _take(self, peer: Peer) -> Link | None:
        if not peer.idle:
            return None
        link = peer.idle.pop()
        link.stream.connection.unwatch()
        return link

    def _keep(self, id: str, peer: Peer, link: Link) -> None:
        peer.idle.append(link)
        link.stream.connection.watch(lambda: self._lose(id, peer, link))

    def _lose(self, id: str, peer: Peer, link: Link) -> None:
        """An idle connection became readable: its owner is gone, or sent something that we did not ask for."""
        link.stream.connection.unwatch()
        peer.idle.remove(link)
        link.close()
        self._forget(id, peer)

    def _forget(self, id: str, peer: Peer) -> None:
        if not peer.num_users and not peer.idle:
            self._peers.pop(id, None)


class Deadlines:
    """Time limits of an agent's requests to others; closing the agent ends them all."""

    def __init__(self) -> None:
        self._timeouts: OrderedSet[asyncio.Timeout] = OrderedSet()
        self._one_ended = asyncio.Event()
        self._is_closed = False

    @contextlib.asynccontextmanager
    async def within(self, timeout_s: float, what: str) -> AsyncIterator[OnTurn]:
        """Limit the time of the block, and the wait for its turn; turn system errors into transfer errors."""
        problem = f"its turn did not come within {timeout_s:g} s"
        try:
            if self._is_closed:
                raise TimeoutError
            async with asyncio.timeout(timeout_s) as timeout:

                def begin() -> None:
                    nonlocal problem
                    problem = f"not done after {timeout_s:g} s"
                    if not self._is_closed:
                        timeout.reschedule(asyncio.get_running_loop().time() + timeout_s)

                self._timeouts.add(timeout)
                try:
                    yield begin
                finally:
                    self._timeouts.discard(timeout)
                    self._one_ended.set()
        except TimeoutError as error:
            if self._is_closed:
                raise TransferError(f"{what}: this agent was closed", "lost") from error
            raise TransferError(f"{what}: {problem}", "late") from error
        except OSError as error:
            raise TransferError(f"{what}: {error}", "lost") from error

    async def close(self) -> None:
        """Cancel everything in progress, and wait until it has ended."""
        self._is_closed = True
        for timeout in self._timeouts:
            if not timeout.expired():
                timeout.reschedule(asyncio.get_running_loop().time())
        while self._timeouts:
            self._one_ended.clear()
            await self._one_ended.wait()


def check_welcome(said: bytes, id: str) -> None:
    """Check that the welcome comes from the intended owner.

    Raises:
        TransferError: it comes from another, or not from an agent.
    """
    if said != WELCOME + bytes.fromhex(id):
        kind = said[: len(WELCOME)] == WELCOME and len(said) == len(WELCOME) + ID_BYTES
        raise TransferError(
            "it is gone, and another agent took its place" if kind else "there is no agent of this version", "lost"
        )
