"""The way from a frontend to an engine in its own process: calls are function calls, items are handed over as they are."""

import itertools
from collections.abc import Collection
from typing import Any

import msgspec

from serving.life import DisaggregationConfig
from serving.model.card import Role
from serving.router import Decision
from serving.router.router import NoWorkersError
from serving.routing.following import Rank
from serving.routing.placement import Placement
from serving.runtime.connection import ReplyStream
from serving.runtime.messages import End
from serving.runtime.server import Stream
from serving.worker.engine import Engine

HERE = 0
"""The id of the only instance."""

WAITING_WEIGHT = 4
"""A waiting request counts as much as this many running ones when vLLM's client chooses a data-parallel rank."""


class LocalCalls:
    """Calls to an engine: what a connection and a session are to each other over a network, in one object.

    A call that is paused or cancelled by its reader is so at once for the engine.
    """

    is_full = False

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ids = itertools.count()
        self._replies: dict[int, ReplyStream] = {}
        self._streams: dict[int, Stream] = {}

    @property
    def num_streams(self) -> int:
        """Calls in progress."""
        return len(self._streams)

    def call(self, request: Any) -> ReplyStream:
        """Have a request served."""
        id = next(self._ids)
        reply, stream = ReplyStream(self, id), Stream(self, id)
        self._replies[id], self._streams[id] = reply, stream
        try:
            self._engine.service(msgspec.Raw(msgspec.msgpack.encode(request)), stream)
        except Exception as error:
            stream.fail(error)
        return reply

    def end_all(self, error: str, kind: str) -> None:
        """End every call with an error."""
        for stream in list(self._streams.values()):
            stream.cancel()
            self.finish(stream.id, End(stream.id, error, kind))

    # What the engine's streams do

    def push(self, id: int, item: Any) -> None:
        """Hand an item over."""
        if (reply := self._replies.get(id)) is not None:
            reply.items.append(item)
            reply.wake()

    def finish(self, id: int, end: End) -> None:
        """Hand the end over."""
        self._streams.pop(id, None)
        if (reply := self._replies.pop(id, None)) is not None:
            reply.end = end
            reply.wake()

    # What their readers do

    def pause(self, id: int) -> None:
        """Pause a call: its reader is slow."""
        if (stream := self._streams.get(id)) is not None:
            stream.pause()

    def resume(self, id: int) -> None:
        """Let a call continue."""
        if (stream := self._streams.get(id)) is not None:
            stream.resume()

    def forget(self, id: int, *, cancel: bool) -> None:
        """Stop waiting for a call."""
        reply = self._replies.pop(id, None)
        if reply is not None and cancel and (stream := self._streams.pop(id, None)) is not None:
            stream.has_stopped = reply.has_stopped
            stream.cancel()


class LocalWorkers:
    """The data-parallel ranks of an engine in this process (see `Workers`); the least loaded gets the next request."""

    stage: Role = "aggregated"

    def __init__(self, engine: Engine) -> None:
        self.calls = LocalCalls(engine)
        self._engine = engine
        self._requests = itertools.count()

    @property
    def num_ranks(self) -> int:
        """See `Workers`."""
        return self._engine.traits.num_ranks

    async def wait_for_workers(self) -> None:
        """See `Workers`: they are there."""

    def pick(
        self,
        num_tokens: int,
        hashes: list[int],
        instance_id: int | None = None,
        dp_rank: int | None = None,
        *,
        avoid: Collection[int] = (),
        session: str | None = None,
        is_refusable: bool = True,
        is_local: bool = True,
    ) -> Placement:
        """See `Workers`."""
        if instance_id not in (None, HERE) or not 0 <= (dp_rank or 0) < self.num_ranks:
            raise NoWorkersError(f"there is no rank {dp_rank}; this server has {self.num_ranks}")
        slot = self._least_loaded() if dp_rank is None else dp_rank
        decision = Decision(slot, 0, [slot], [0.0], [], 0, num_tokens)
        return Placement(next(self._requests), Rank(HERE, slot), slot, 0, decision, self.calls.num_streams)

    def send(self, placement: Placement, request: Any) -> ReplyStream:
        """See `Workers`."""
        return self.calls.call(request)

    def on_first_token(self, placement: Placement) -> None:
        """See `Workers`: the engine itself knows."""

    def on_finish(self, placement: Placement) -> None:
        """See `Workers`: the engine itself knows."""

    def _least_loaded(self) -> int:
        if self.num_ranks == 1:
            return 0
        loads = [self._engine.load(rank) for rank in range(self.num_ranks)]
        return min(
            range(len(loads)), key=lambda rank: WAITING_WEIGHT * loads[rank].num_waiting + loads[rank].num_running
        )


class LocalCourse:
    """All of a request happens here (see `Course`); a client that shares it with another server directs that itself."""

    config = DisaggregationConfig()
    prefill = None

    def __init__(self, workers: LocalWorkers) -> None:
        self.decode = workers

    def bypass(self, num_tokens: int, hashes: list[int]) -> Rank | None:
        """See `Course`."""
        return None

    def meet(self, placement: Placement) -> dict[str, Any] | None:
        """See `Course`."""
        return None
