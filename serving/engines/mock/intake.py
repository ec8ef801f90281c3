"""How a request comes to a rank of the mocker: its answer is settled, its blocks are named, and it is queued.

submit --+--------------------------+--> the engine's queue, or the handover of a request that two workers share
         +--> planned in a thread --+
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foundation.ordered_set import OrderedSet
from mocker import BlockChain, Sequence, SglangConfig, TrtllmConfig
from mocker.contract import EngineSettings
from serving.engines.kv.params import RequestPart, part_of
from serving.engines.mock.answers.author import AnswerPlan, Author
from serving.engines.mock.answers.made_up import LogProbabilities
from serving.engines.mock.events import EventSink
from serving.engines.mock.kv.handover import Handover, HandoverRank, block_keys
from serving.engines.mock.live import Live
from serving.engines.mock.observer import RankWatch
from serving.router.hashing import block_hashes, sequence_hashes
from serving.runtime.messages import CallError
from serving.runtime.server import AnswerStream
from serving.runtime.threads import in_thread
from serving.runtime.world import world
from serving.worker.protocol import PreprocessedRequest

PartOf = Callable[[PreprocessedRequest], RequestPart | None]
"""Returns which part of a request is done here."""


class Arrival(NamedTuple):
    """A request that has come."""

    request: PreprocessedRequest
    stream: AnswerStream
    tokens: npt.NDArray[np.uint32]
    part: RequestPart | None
    """The part of it that is done here, if two workers share it."""
    arrival_s: float


class Intake:
    """See the module."""

    def __init__(
        self,
        rank: HandoverRank,
        author: Author,
        *,
        events: EventSink | None = None,
        max_waiting: int | None = None,
        handover: Handover | None = None,
        part_of: PartOf = part_of,
        has_tiers: bool = False,
        watch: RankWatch | None = None,
    ) -> None:
        """Prepare to queue requests; those beyond `max_waiting` are refused (None: none is)."""
        self._rank = rank
        self._config = rank.engine.config
        self._author = author
        self._events = events
        self._max_waiting = max_waiting
        self._handover = handover
        self._part_of = part_of
        self._has_tiers = has_tiers
        self._watch = watch
        self._turn = asyncio.Lock()
        self._planned: OrderedSet[asyncio.Task[None]] = OrderedSet()
        self._order = 0

    @property
    def num_planned(self) -> int:
        """Requests whose answer is being settled."""
        return len(self._planned)

    @property
    def _num_waiting(self) -> int:
        return self._rank.engine.num_queued + len(self._planned)

    def submit(self, request: PreprocessedRequest, stream: AnswerStream) -> None:
        """Queue a request, or end it with an error if it can never fit or the queue is full."""
        if self._max_waiting is not None and self._num_waiting >= self._max_waiting:
            stream.end(f"{self._max_waiting} requests are already waiting for this engine", "overloaded")
            return
        arrival_s = world().now()
        tokens = np.frombuffer(bytes(request.token_ids.data), "<u4")
        try:
            part = self._part_of(request)
            arrival = Arrival(request, stream, tokens, part, arrival_s)
            if part is not None and part.is_prefill and not part.is_answered:
                plan = self._author.first(request, tokens)
            elif self._author.may_be_formed(request):
                self._plan_apart(arrival)
                return
            else:
                plan = self._author.plan(request, tokens, most=self._config.max_model_len)
        except ValueError as error:
            stream.end(str(error), "invalid")
            return
        self._queue(arrival, plan)

    def close(self) -> None:
        """Settle no more answers."""
        for task in self._planned:
            task.cancel()

    def _plan_apart(self, arrival: Arrival) -> None:
        """Queue a request once its answer is settled, in a thread: other requests go on meanwhile."""
        stream = arrival.stream
        plan = partial(self._author.plan, arrival.request, arrival.tokens, most=self._config.max_model_len)

        async def settle() -> None:
            try:
                async with self._turn:  # one thread: whoever hangs up and asks again does not get another
                    if stream.is_over:
                        return
                    answer = await in_thread(plan)
                if not stream.is_over:
                    self._queue(arrival, answer)
            except ValueError as error:
                stream.end(str(error), "invalid")
            except Exception as error:
                stream.fail(error)

        task = asyncio.create_task(settle())
        self._planned.add(task)
        task.add_done_callback(self._planned.discard)

    def _queue(self, arrival: Arrival, plan: AnswerPlan) -> None:
        request, stream, tokens, part, _ = arrival
        ids = self._names(request, tokens, plan.output)
        live = self._live(arrival, plan, ids)
        stream.on_cancel = lambda: self._rank.engine.abort(live.sequence)
        stream.on_unblocked = live.flush
        try:
            if part is None:
                refuse_whole(self._config)
                self._rank.add(live)
            else:
                size = self._config.block_size
                live.keys = block_keys(tokens, ids, num_full=len(tokens) // size, block_size=size)
                live.is_held = request.is_held and part.is_prefill
                self._share(live, part)
        except (ValueError, CallError) as error:
            stream.on_cancel = None
            stream.end(str(error), error.kind if isinstance(error, CallError) else "invalid")
            return
        if self._watch is not None:
            self._watch.begin(live, request)

    def _live(self, arrival: Arrival, plan: AnswerPlan, ids: list[int]) -> Live:
        """Return a request with its answer, whose blocks have these names."""
        request, stream, tokens, _, arrival_s = arrival
        chain = BlockChain(ids)
        if self._events is not None:
            chain.payload = self._events.content(request, tokens, plan.output)
        self._order += 1
        sequence = Sequence(
            self._order,
            num_prompt=len(tokens),
            max_tokens=plan.limit,
            stop_after=plan.stop_after,
            chain=chain,
            priority=request.priority,
            arrival=float(self._order),
            adapter="" if request.cache_scope is None else request.cache_scope.lora_name,
        )
        sequence.reads_cache = request.sampling_options.get("prompt_logprobs") is None  # as in vLLM
        log_probabilities = LogProbabilities.wanted(self._author.words, request.sampling_options)
        live = sequence.payload = Live(tokens, plan.output, stream, log_probabilities, sequence, arrival_s)
        live.has_tiers = self._has_tiers
        live.request_id = request.request_id
        live.reason = plan.reason
        if plan.embedding is not None:
            live.embed(plan.embedding)
        return live

    def _names(self, request: PreprocessedRequest, tokens: npt.NDArray[np.uint32], output: list[int]) -> list[int]:
        """Name the blocks of a prompt and its answer; the frontend has named those of the prompt."""
        size, scope, given = self._config.block_size, request.cache_scope, request.sequence_hashes
        hashes = np.frombuffer(bytes(given.data), "<u8").tolist() if given else []
        root = hashes[-1] if hashes else None if scope is None else scope.root
        tail = np.concatenate([tokens[len(hashes) * size :], np.array(output, np.uint32)])
        named: list[int] = hashes + sequence_hashes(block_hashes(tail, size), root)
        return named

    def _share(self, live: Live, part: RequestPart) -> None:
        """Start our part of a request; another worker does the rest.

        Raises:
            ValueError: it is not for this worker, or can never fit.
            CallError: the two workers cannot meet here.
        """
        handover, rank = self._handover, self._rank
        if handover is None:
            raise ValueError(
                "kv_transfer_params are for a prefill or decode worker; this one was started without --role"
            )
        live.stream.on_cancel = lambda: handover.cancel(rank, live)
        handover.begin(rank, live, part)


def refuse_whole(config: EngineSettings) -> None:
    """Refuse a request that nobody shares, if an engine with these settings does only one part of each.

    Raises:
        CallError: it does: another worker is missing.
    """
    does_all = not isinstance(config, SglangConfig | TrtllmConfig) or config.kv_role is None
    if does_all or (isinstance(config, TrtllmConfig) and config.is_kv_consumer):
        return
    role, other = ("decode", "prefill") if config.is_kv_consumer else ("prefill", "decode")
    raise CallError(
        f"a {role} worker with this scheduler cannot serve a request without a {other} worker", "unavailable"
    )
