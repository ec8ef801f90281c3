"""The frontend's links to its workers, and the streams of tokens that come back over them."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

from serving.router import Prompt, Router
from serving.router.index import PrefixIndex
from serving.wire import Cancel, Finished, Frames, Generate, Removed, StepFrame, Stored, frame


class TokenStream:
    """The tokens of one request as they arrive: read them with `take`."""

    __slots__ = ("_waiter", "finished", "is_abandoned", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.finished: Finished | None = None
        self.is_abandoned = False
        """The client is gone."""
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Let the reader go on."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[int]:
        """Wait for news and return the tokens that came, perhaps none at the end."""
        if not self.tokens and self.finished is None and not self.is_abandoned:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        tokens, self.tokens = self.tokens, []
        return tokens


class WorkerLink(asyncio.Protocol):
    """One worker's socket."""

    def __init__(self, number: int, pool: "WorkerPool") -> None:
        self.number = number
        self.transport: asyncio.WriteTransport | None = None
        self._pool = pool
        self._frames = Frames(StepFrame)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast(asyncio.WriteTransport, transport)  # uvloop's is none by class

    def data_received(self, data: bytes) -> None:
        """Hand tokens to their streams."""
        for step in self._frames.feed(data):
            self._pool.on_step(self.number, step)

    def connection_lost(self, exc: Exception | None) -> None:
        """End this worker's requests."""
        self._pool.on_lost(self.number)

    def send(self, message: Any) -> None:
        """Send a command."""
        assert self.transport is not None
        self.transport.write(frame(message))


class WorkerPool:
    """The workers behind the router."""

    def __init__(self, router: Router, now: Callable[[], float]) -> None:
        self.router = router
        self._now = now
        self._links: dict[int, WorkerLink] = {}
        self._streams: dict[int, tuple[int, TokenStream]] = {}
        self._fresh: set[int] = set()  # requests without a first token yet

    async def connect(self, number: int, path: str) -> None:
        """Connect to a worker's socket and route to it from now on."""
        link = WorkerLink(number, self)
        await asyncio.get_running_loop().create_unix_connection(lambda: link, path)
        self._links[number] = link
        self.router.add_worker(number)

    def submit(self, id: int, token_ids: bytes, hashes: list[int], max_tokens: int) -> tuple[int, int, TokenStream]:
        """Route a request and send it; return its worker, the overlap the router saw (blocks) and its stream."""
        prompt = Prompt(len(token_ids) // 4, hashes, len(hashes))
        decision = self.router.pick(id, prompt, self._now())
        stream = TokenStream()
        self._streams[id] = (decision.worker, stream)
        self._fresh.add(id)
        self._links[decision.worker].send(Generate(id, token_ids, hashes, max_tokens))
        return decision.worker, decision.overlap_blocks, stream

    def release(self, id: int) -> None:
        """Forget a request, telling its worker if it is not finished."""
        entry = self._streams.pop(id, None)
        self._fresh.discard(id)
        self.router.on_finish(id)
        if entry is not None and entry[1].finished is None and entry[0] in self._links:
            self._links[entry[0]].send(Cancel(id))

    def on_step(self, worker: int, step: StepFrame) -> None:
        """Take in what a worker's engine step brought."""
        streams, fresh = self._streams, self._fresh
        for id, token in zip(step.ids, step.tokens, strict=True):
            entry = streams.get(id)
            if entry is None:
                continue
            entry[1].tokens.append(token)
            if id in fresh:
                fresh.discard(id)
                self.router.on_first_token(id)
        for finished in step.finished:
            entry = streams.get(finished.id)
            if entry is not None:
                entry[1].finished = finished
                self.router.on_finish(finished.id)
                if not entry[1].tokens:
                    entry[1].wake()
        for id in step.ids:
            entry = streams.get(id)
            if entry is not None:
                entry[1].wake()
        index = self.router.index
        if isinstance(index, PrefixIndex):
            for event in step.events:
                if isinstance(event, Stored):
                    index.store(worker, event.hashes, parent=event.parent)
                elif isinstance(event, Removed):
                    for block in event.hashes:
                        index.remove(worker, [block])

    def on_lost(self, worker: int) -> None:
        """End the requests of a worker that is gone, and route to it no more."""
        self._links.pop(worker, None)
        self.router.remove_worker(worker)
        for id, (number, stream) in self._streams.items():
            if number == worker and stream.finished is None:
                stream.finished = Finished(id, "error", error=f"worker {worker} is gone")
                stream.wake()

    def close(self) -> None:
        """Hang up on all workers."""
        for link in list(self._links.values()):
            if link.transport is not None:
                link.transport.close()
