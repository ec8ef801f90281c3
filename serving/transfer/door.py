"""A port or socket that anybody may connect to: who may enter, how many at once, and how long they may stay silent.

It has no threads: the connections take turns. So one that stops reading or writing delays nobody else.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from serving.transfer.agent import TransferError
from serving.transfer.links import MAX_LINKS
from serving.transfer.network import Listener
from serving.transfer.stream import Stream
from serving.transfer.wire import ID_BYTES

log = logging.getLogger(__name__)

PROOF_S = 5.0
"""How long a connection may take to prove itself."""

MAX_UNPROVEN = 64
"""Connections that may be unproven at once; beyond that, the oldest is dropped."""

MAX_CONNECTIONS = 1024
"""Connections of all callers; beyond that, the oldest is dropped. An honest caller then makes a new one."""

MAX_OF_ONE_CALLER = 2 * MAX_LINKS
"""A caller's connections; beyond that, its oldest is dropped. Twice its need: it may replace some that we still see."""

Attend = Callable[[Stream], Awaitable[None]]


class Door:
    """Lets callers in."""

    def __init__(self, welcome: Attend, serve: Attend) -> None:
        """Prepare to let callers in.

        Args:
            welcome: checks who is there, and sends the welcome, which the caller answers with its id.
            serve: serves a caller's requests until it hangs up.
        """
        self._welcome = welcome
        self._serve = serve
        self._unproven: dict[asyncio.Task[None], None] = {}  # the oldest first, here and below
        self._proven: dict[asyncio.Task[None], bytes] = {}  # with the ids of their callers
        self._listener: Listener | None = None
        self._accepting: asyncio.Task[None] | None = None

    def open(self, listener: Listener) -> None:
        """Let callers in; from now on this object owns the listener."""
        self._listener = listener
        self._accepting = asyncio.create_task(self._accept(listener))

    async def close(self) -> None:
        """Hang up on everybody."""
        tasks = [*filter(None, [self._accepting]), *self._unproven, *self._proven]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    async def _accept(self, listener: Listener) -> None:
        while True:
            try:
                stream = Stream(await listener.accept())
            except OSError as error:  # no file handles are left now, but there will be
                log.warning("a connection for KV could not be accepted: %s", error)
                await asyncio.sleep(1.0)
                continue
            if len(self._unproven) >= MAX_UNPROVEN:
                self._drop(next(iter(self._unproven)))
            task = asyncio.create_task(self._attend(stream))
            self._unproven[task] = None
            task.add_done_callback(lambda task, stream=stream: self._end(task, stream))  # type: ignore[misc]

    async def _attend(self, stream: Stream) -> None:
        """Serve one connection, once it has proven itself."""
        try:
            async with asyncio.timeout(PROOF_S):
                await self._welcome(stream)
                caller = await stream.receive(ID_BYTES)
            self._admit(caller)
            await self._serve(stream)
        except (OSError, TransferError) as error:  # a stranger gets no explanation
            log.debug("a connection for KV ended: %s", error or "it took too long")

    def _admit(self, caller: bytes) -> None:
        task = asyncio.current_task()
        assert task is not None
        del self._unproven[task]
        same = [other for other, whose in self._proven.items() if whose == caller]
        if len(same) >= MAX_OF_ONE_CALLER:
            self._drop(same[0])
        elif len(self._proven) >= MAX_CONNECTIONS:
            self._drop(next(iter(self._proven)))
        self._proven[task] = caller

    def _drop(self, task: asyncio.Task[None]) -> None:
        self._forget(task)
        task.cancel()

    def _end(self, task: asyncio.Task[None], stream: Stream) -> None:
        self._forget(task)
        stream.close()

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._unproven.pop(task, None)
        self._proven.pop(task, None)
