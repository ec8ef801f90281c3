"""A call to one worker, and the request that it sends."""

from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from serving.frontend.generation.kv_transfer import KvTransfer
from serving.frontend.generation.output import Output
from serving.frontend.prepared import PreparedPrompt
from serving.routing.placement import Placement
from serving.routing.workers import Workers
from serving.runtime.connection import ReplyStream
from serving.runtime.messages import End, pack_u32, pack_u64
from serving.runtime.world import world
from serving.worker.protocol import CacheScope, PreprocessedRequest, StopConditions


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRequest:
    """What one choice of an answer asks of an engine and of the router."""

    prompt: PreparedPrompt
    conditions: StopConditions
    sampling: dict[str, Any]
    eos_token_ids: list[int]
    request_id: str
    instance_id: int | None = None
    rank: int | None = None
    session: str | None = None
    num_generated: int = 0
    """How many of the prompt's last tokens are part of the answer."""
    kv_transfer: KvTransfer | None = None
    """For the worker: if two workers share the request, or as sent by a client that directs them itself."""
    tools: list[dict[str, Any]] | None = None
    """What the answer may call, if that is left to the model."""
    is_embedding: bool = False
    """Whether an embedding of the prompt is wanted instead of an answer."""
    is_held: bool = False
    """Whether the call may last until the prompt's KV has been read."""
    scope: CacheScope | None = None
    """Whose cached KV it may share, None if everybody's; the prompt's hashes are within it."""
    num_choices: int = 1
    """How many answers the client wants to the prompt: this is one of them."""
    priority: int = 0
    """Requests of a smaller one go first, if the engine's scheduler heeds it."""

    def after(self, tokens: list[int]) -> "ChoiceRequest":
        """Return the request for the rest of the answer after these tokens."""
        if not tokens:
            return self
        limit, end = self.conditions.max_tokens, self.conditions.stop_after
        conditions = msgspec.structs.replace(
            self.conditions,
            max_tokens=None if limit is None else limit - len(tokens),
            min_tokens=max(self.conditions.min_tokens - len(tokens), 0),
            stop_after=None if end is None else max(end - len(tokens), 1),
        )
        known = np.concatenate([self.prompt.tokens, np.array(tokens, np.uint32)])
        prompt = PreparedPrompt(known, self.prompt.block_size).within(self.scope)
        return replace(self, prompt=prompt, conditions=conditions, num_generated=self.num_generated + len(tokens))

    def to_prefill(self, params: dict[str, Any]) -> "ChoiceRequest":
        """Return the request for a worker that prefills: any one token, which nobody reads."""
        return replace(
            self,
            conditions=StopConditions(max_tokens=1, ignore_eos=True),
            sampling={name: value for name, value in self.sampling.items() if name != "logprobs"},
            eos_token_ids=[],
            kv_transfer=KvTransfer.to_compute(params),
            is_held=not params,
        )

    def to_decode(self, kv_transfer: KvTransfer) -> "ChoiceRequest":
        """Return the request for a worker that reads the prompt's KV; the prefill worker reports on the prompt."""
        sampling = {name: value for name, value in self.sampling.items() if name != "prompt_logprobs"}
        return replace(self, sampling=sampling, kv_transfer=kv_transfer)

    def packed(self, rank: int, *, is_refusable: bool) -> PreprocessedRequest:
        """Return the request as it travels to a worker."""
        return PreprocessedRequest(
            token_ids=pack_u32(self.prompt.tokens),
            sequence_hashes=pack_u64(np.array(self.prompt.hashes, np.uint64)),
            stop_conditions=self.conditions,
            sampling_options=self.sampling,
            eos_token_ids=self.eos_token_ids,
            tools=self.tools,
            is_embedding=self.is_embedding,
            num_generated=self.num_generated,
            dp_rank=rank,
            request_id=self.request_id,
            is_refusable=is_refusable,
            kv_transfer_params=None if self.kv_transfer is None else self.kv_transfer.params,
            is_held=self.is_held,
            cache_scope=self.scope,
            session_id=self.session,
            num_choices=self.num_choices,
            priority=self.priority,
        )


class WorkerCall:
    """A call to one worker; it stays booked with its router from the placement until it is settled."""

    def __init__(self, workers: Workers, placement: Placement, request: ChoiceRequest) -> None:
        """Prepare to send a request where it was placed."""
        self.placement = placement
        self.request = request
        self.sent_s = self.ended_s = 0.0
        """By the process's performance counter; 0 until then."""
        self.has_output = False
        """Whether the worker has sent any output."""
        self.times: dict[str, float] = {}
        """When things happened at the worker, as it reports, in seconds since it got the request."""
        self.num_transfer_bytes = 0.0
        """Bytes of KV that the worker read."""
        self.num_received = 0
        """Parts of the answer that it has brought: tokens, or texts."""
        self.tokens: list[int] = []
        """Tokens that it has brought, if another worker may have to continue after them."""
        self.prefill_output: Output | None = None
        """All that it brought, if that was waited for (see `wait_for_kv`)."""
        self._workers = workers
        self._stream: ReplyStream | None = None
        self._is_booked = True

    @property
    def worker_labels(self) -> tuple[str, str, str]:
        """The labels of the worker in metrics: instance, data-parallel rank, and the role of its pool."""
        rank = self.placement.rank
        return f"{rank.instance_id:x}", str(rank.dp_rank), self._workers.stage

    @property
    def name(self) -> str:
        """The worker's name in logs and errors."""
        rank, role = self.placement.rank, self._workers.stage
        return f"{role} worker {rank.instance_id:x}" + (f", rank {rank.dp_rank}" if rank.dp_rank else "")

    @property
    def is_lost(self) -> bool:
        """Whether its worker was lost before the call ended, and with it what it kept."""
        return self._stream is not None and self._stream.end is not None and self._stream.end.kind == "lost"

    def stamps(self) -> dict[str, float]:
        """Return when things happened at the worker, by the process's performance counter."""
        return {name: self.sent_s + at for name, at in self.times.items()}

    def send(self, *, is_refusable: bool) -> None:
        """Make the call.

        Raises:
            CallError: the instance is gone.
        """
        self.sent_s = world().now()
        packed = self.request.packed(self.placement.rank.dp_rank, is_refusable=is_refusable)
        self._stream = self._workers.send(self.placement, packed)

    async def read(self, output: Output) -> End | None:
        """Wait for output and add it; return the end once there is nothing more.

        Raises:
            ApiError: the engine sent something invalid.
        """
        stream = self._stream
        assert stream is not None
        items = await stream.take()
        if items and not self.has_output:
            self.has_output = True
            self._workers.on_first_token(self.placement)
        output.read(items, self.request.num_generated)
        if output.times:
            self.times |= output.times
        if output.num_transfer_bytes:
            self.num_transfer_bytes = output.num_transfer_bytes
        if stream.end is None or stream.items:
            return None
        self.ended_s = self.ended_s or world().now()
        return stream.end

    async def wait_for_kv(self) -> tuple[Output, End]:
        """Wait until it ends or says where its prompt's KV is; such a call may be held open until it is closed.

        Raises:
            ApiError: the engine sent something invalid.
        """
        output = Output()
        while (end := await self.read(output)) is None and output.kv_transfer_params is None:
            pass
        self.ended_s, self.prefill_output = self.ended_s or world().now(), output
        return output, end or End(0)

    def where_kv_is(self) -> KvTransfer:
        """Return what a decode worker needs to know to read the prompt's KV: as it was said, or where the two meet."""
        if self.prefill_output is not None:
            return KvTransfer.of(self.prefill_output.kv_transfer_params or {})
        assert self.request.kv_transfer is not None
        return self.request.kv_transfer.to_read()

    def close(self, *, has_stopped: bool = False) -> None:
        """Cancel the call if it is still in progress: the answer has stopped, or is given up. A pending `read` ends."""
        if self._stream is not None and self._stream.end is None:
            self._stream.has_stopped = has_stopped
            self._stream.abort("it was given up", "cancelled")

    def settle(self) -> None:
        """Release the booking: the work is done."""
        if self._is_booked:
            self._is_booked = False
            self._workers.on_finish(self.placement)
