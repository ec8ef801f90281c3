"""The attempts to have a choice's tokens generated: each is a call to one instance, booked with the router.

    place: route, book, send ---> take what comes ---> the call ends ---> Finished, Refused
      ^                                                     |
      +---- what remains to be generated <---- PlaceAgain --+        `serving.life` decides which, and for what stage

An instance may be lost: the tokens so far then become part of the prompt at another one. Each attempt is a call of its
own, so nothing late from a lost one can reach us.
"""

import asyncio
import contextlib
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from serving.frontend.api.errors import ApiError, failed_call, no_worker
from serving.frontend.preprocess import Prompt
from serving.life import Finished, Life, Refused
from serving.life.life import RETRY_S
from serving.router.router import AllBusyError, AllFullError, NoWorkersError
from serving.routing.live import Placement, Routing
from serving.runtime.client import ReplyStream
from serving.runtime.messages import CallError, End, pack_u32, pack_u64
from serving.worker.protocol import PreprocessedRequest, StopConditions

UNPLACED = (NoWorkersError, AllBusyError, AllFullError, CallError)
"""Nobody takes a request now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRequest:
    """What one choice of an answer asks of an engine, and of the router."""

    prompt: Prompt
    conditions: StopConditions
    sampling: dict[str, Any]
    eos_token_ids: list[int]
    request_id: str
    instance_id: int | None = None
    rank: int | None = None
    session: str | None = None
    num_generated: int = 0
    """How many of the prompt's last tokens are part of the answer."""

    def after(self, tokens: list[int]) -> "ChoiceRequest":
        """Return what remains to be generated after these tokens."""
        if not tokens:
            return self
        limit, end = self.conditions.max_tokens, self.conditions.stop_after
        conditions = msgspec.structs.replace(
            self.conditions,
            max_tokens=None if limit is None else limit - len(tokens),
            min_tokens=max(self.conditions.min_tokens - len(tokens), 0),
            stop_after=None if end is None else max(end - len(tokens), 1),
        )
        prompt = Prompt(np.concatenate([self.prompt.tokens, np.array(tokens, np.uint32)]), self.prompt.block_size)
        return replace(self, prompt=prompt, conditions=conditions, num_generated=self.num_generated + len(tokens))

    def packed(self, rank: int, *, is_refusable: bool) -> PreprocessedRequest:
        """Return it as it travels to a worker."""
        return PreprocessedRequest(
            token_ids=pack_u32(self.prompt.tokens),
            sequence_hashes=pack_u64(np.array(self.prompt.hashes, np.uint64)),
            stop_conditions=self.conditions,
            sampling_options=self.sampling,
            eos_token_ids=self.eos_token_ids,
            num_generated=self.num_generated,
            dp_rank=rank,
            request_id=self.request_id,
            is_refusable=is_refusable,
        )


class Output(msgspec.Struct, gc=False):
    """What an engine said since the last look; `serving.worker.protocol` describes its items."""

    tokens: list[int] = []
    texts: list[str] = []
    """From engines that give text with their tokens."""
    finish_reason: str = ""
    num_cached: int | None = None
    num_completion: int | None = None
    """Tokens of the answer so far, from engines that count them."""
    logprobs: list[tuple[float, list[Any] | None]] = []
    """Log-probability and likeliest alternatives of each token, if they were asked for."""
    prompt_logprobs: list[tuple[float | None, list[Any] | None]] | None = None
    """The same for the prompt."""

    def read(self, items: list[Any], num_before: int) -> None:
        """Add what these items say; `num_before` tokens are of earlier attempts.

        Raises:
            ApiError: an item means nothing.
        """
        for item in items:
            if type(item) is int:
                self.tokens.append(item)
            elif type(item) is list:
                self.tokens += item
            else:
                self._read_dict(item, num_before)

    def _read_dict(self, item: Any, num_before: int) -> None:
        if not isinstance(item, dict) or not isinstance(tokens := item.get("token_ids", []), list):
            raise ApiError(500, "the engine sent something that is no answer")
        self.tokens += tokens
        if item.get("finish_reason"):
            self.finish_reason = str(item["finish_reason"])
        if "cached_tokens" in item:
            self.num_cached = int(item["cached_tokens"])
        if "text" in item:
            self.texts.append(str(item["text"]))
        if "completion_tokens" in item:
            self.num_completion = num_before + int(item["completion_tokens"])
        if item.get("prompt_log_probs") is not None and self.prompt_logprobs is None:
            self.prompt_logprobs = list(zip(item["prompt_log_probs"], item["prompt_top_logprobs"], strict=False))
        if item.get("log_probs") is not None:
            tops = item.get("top_logprobs") or [None] * len(tokens)
            self.logprobs += [(value, tops[index]) for index, value in enumerate(item["log_probs"])]


class Attempts:
    """Calls one instance after the other until a choice's answer is whole; then, or on any way out, `close`."""

    def __init__(self, routing: Routing, request: ChoiceRequest, life: Life, *, is_refusable: bool = True) -> None:
        """Route and send it; what was accepted once, or is not refusable, is not refused because workers are full.

        Raises:
            ApiError: there is nobody to send it to.
        """
        self.placement: Placement
        self.life = life
        self._routing = routing
        self._request = request
        self._num_before = self._num_output = 0
        self._generated: list[int] = []  # kept as long as it may be needed for another attempt
        self._stream: ReplyStream | None = None
        self._is_booked = False
        self._is_computing_prompt = False
        try:
            self._place(request, is_refusable=is_refusable)
        except UNPLACED as error:
            raise no_worker(error) from error

    async def take(self) -> Output:
        """Wait for news of the engine, from this attempt or the next.

        Raises:
            ApiError: the request failed.
        """
        output = Output()
        while True:
            stream = self._stream
            assert stream is not None
            items = await stream.take()
            if self._is_computing_prompt and items:
                self._is_computing_prompt = False
                self._routing.on_first_token(self.placement)
            output.read(items, self._num_before)
            if not (output.tokens or output.texts or output.finish_reason):
                if stream.end is None or stream.items:
                    continue
                output.finish_reason = await self._after(stream.end)
                if not output.finish_reason:
                    continue
            self._num_output += len(output.texts or output.tokens)
            if self.life.limit:
                self._generated += output.tokens
            return output

    def close(self) -> None:
        """Release the booking, and tell the instance if it is still at work."""
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None
        if self._is_booked:
            self._is_booked = False
            self._routing.on_finish(self.placement)

    async def _after(self, end: End) -> str:
        """Place what remains again after a call that ended early, or return why the answer is finished."""
        loop, limit = asyncio.get_running_loop(), self._request.conditions.max_tokens
        step = self.life.on_end(
            end.error,
            end.kind,
            self.placement.worker.instance_id,
            is_full=limit is not None and self._num_output >= limit,
            now=loop.time(),
        )
        if isinstance(step, Finished):
            return step.reason
        if isinstance(step, Refused):
            raise failed_call(step.message, step.kind)
        await asyncio.sleep(step.after_s)
        self.close()
        await self._place_again()
        return ""

    async def _place_again(self) -> None:
        loop, request = asyncio.get_running_loop(), self._request.after(self._generated)
        while True:
            try:
                self._place(request, is_refusable=False)
            except UNPLACED as error:
                if not self.life.may_wait(loop.time()):
                    raise no_worker(error) from error
            else:
                return
            await asyncio.sleep(RETRY_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self.life.waits_until):
                    await self._routing.wait_for_workers()

    def _place(self, request: ChoiceRequest, *, is_refusable: bool) -> None:
        """Route, book and send for the stage that comes next.

        Raises:
            UNPLACED: nobody takes it now.
        """
        stage = self.life.next_stage()
        if isinstance(stage, Refused):
            raise NoWorkersError(stage.message)
        assert stage == "decode"  # there are no workers that only prefill
        self.placement = self._routing.pick(
            len(request.prompt.tokens),
            request.prompt.hashes,
            request.instance_id,
            request.rank,
            avoid=self.life.failed_at,
            session=request.session,
            is_refusable=is_refusable,
        )
        self._is_booked = self._is_computing_prompt = True
        self._num_before = request.num_generated
        packed = request.packed(self.placement.worker.rank, is_refusable=is_refusable)
        try:
            self._stream = self._routing.send(self.placement, packed)
        except CallError:
            self.close()
            raise
