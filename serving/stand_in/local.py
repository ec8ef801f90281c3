"""The way from a frontend to an engine in its own process: calls are function calls, items are handed over as they are."""

import asyncio
import itertools
import math
from typing import Any

import msgspec

from serving.frontend.api.errors import ApiError
from serving.life import DisaggregationConfig
from serving.model.card import Role
from serving.router import RoutingDecision
from serving.router.decision import NoWorkersError
from serving.routing.placement import Placement, RankAddress, WantedRank
from serving.runtime.connection import ReplyStream
from serving.runtime.messages import End
from serving.runtime.server import AnswerStream
from serving.stand_in.balance import REPORT_S, Balance
from serving.worker.engine import Engine

HERE = 0
"""The id of the only instance."""


class LocalCalls:
    """Calls to an engine: what a connection and a session are to each other over a network, in one object.

    A call that is paused or cancelled by its reader is so at once for the engine.
    """

    is_full = False

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ids = itertools.count()
        self._replies: dict[int, ReplyStream] = {}
        self._streams: dict[int, AnswerStream] = {}

    @property
    def num_streams(self) -> int:
        """Calls in progress."""
        return len(self._streams)

    def call(self, request: Any) -> ReplyStream:
        """Have a request served."""
        id = next(self._ids)
        reply, stream = ReplyStream(self, id), AnswerStream(self, id)
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
    """The data-parallel ranks of an engine in this process (see `Workers`)."""

    stage: Role = "aggregated"

    def __init__(self, engine: Engine, *, has_peers: bool = False) -> None:
        """Prepare to send requests; without peers, what they say of KV elsewhere is ignored, as in vLLM."""
        self.calls = LocalCalls(engine)
        self._engine = engine
        self._has_peers = has_peers
        self._requests = itertools.count()
        self._sent: set[int] = set()
        self._balance = Balance(self.num_ranks)
        self._heard_s = -math.inf
        self._hearing: asyncio.TimerHandle | None = None

    @property
    def num_ranks(self) -> int:
        """See `Workers`."""
        return self._engine.traits.num_ranks

    @property
    def is_following(self) -> bool:
        """Whether a timer is set to ask the ranks what they have to do: only while there is something to choose by it."""
        return self._hearing is not None

    async def wait_for_workers(self) -> None:
        """See `Workers`: they are there."""

    def pick(self, wanted: WantedRank) -> Placement:
        """See `Workers`.

        Raises:
            ApiError: there is no such rank.
        """
        dp_rank = wanted.dp_rank
        if not 0 <= (dp_rank or 0) < self.num_ranks:
            raise ApiError(400, f"data_parallel_rank {dp_rank} is out of range [0, {self.num_ranks}).")
        if wanted.instance_id not in (None, HERE):
            raise NoWorkersError(f"there is no instance {wanted.instance_id}")
        slot = self._choose() if dp_rank is None else dp_rank
        decision = RoutingDecision(slot, 0, 0, wanted.num_tokens)
        return Placement(next(self._requests), RankAddress(HERE, slot), slot, 0, decision, self.calls.num_streams)

    def send(self, placement: Placement, request: Any) -> ReplyStream:
        """See `Workers`."""
        if not self._has_peers and request.kv_transfer_params is not None:
            request = msgspec.structs.replace(request, kv_transfer_params=None)
        self._sent.add(placement.request)
        self._balance.begin(placement.slot)
        return self.calls.call(request)

    def on_first_token(self, placement: Placement) -> None:
        """See `Workers`: the engine itself knows."""

    def on_finish(self, placement: Placement) -> None:
        """See `Workers`."""
        if placement.request in self._sent:
            self._sent.remove(placement.request)
            self._balance.end(placement.slot)

    def close(self) -> None:
        """End every call, and follow the ranks no longer."""
        self.calls.end_all("the server shut down before the answer was complete", "draining")
        if self._hearing is not None:
            self._hearing.cancel()

    def _choose(self) -> int:
        if self.num_ranks == 1:
            return 0
        if self._hearing is None:
            self._hear_in(max(self._heard_s + REPORT_S - asyncio.get_running_loop().time(), 0.0))
        return self._balance.choose()

    def _hear_in(self, pause_s: float) -> None:
        self._hearing = asyncio.get_running_loop().call_later(pause_s, self._hear)

    def _hear(self) -> None:
        """Take the reports of the ranks, and again as long as one has work."""
        self._heard_s, self._hearing = asyncio.get_running_loop().time(), None
        reports = [self._engine.load(rank) for rank in range(self.num_ranks)]
        self._balance.hear(reports)
        if any(each.num_waiting or each.num_running for each in reports):
            self._hear_in(REPORT_S)


class LocalCourse:
    """All of a request happens here (see `Course`); a client that shares it with another server directs that itself."""

    config = DisaggregationConfig()
    prefill = None

    def __init__(self, workers: LocalWorkers) -> None:
        self.decode = workers

    def bypass(self, num_tokens: int, hashes: list[int]) -> RankAddress | None:
        """See `Course`."""
        return None

    def meet(self, placement: Placement) -> dict[str, Any] | None:
        """See `Course`."""
        return None
