"""One choice of an answer: its tokens, wherever they come from, as text.

The instance that serves it may be lost: the tokens so far then become part of the prompt at another one, and whoever
reads the pieces notices nothing. Each attempt is a call of its own, so nothing late from a lost one can reach us.
"""

import asyncio
import contextlib
from typing import Any

import msgspec
import numpy as np

from serving.frontend.openai import ApiError
from serving.frontend.preprocess import Prompt
from serving.frontend.stops import StopMatcher
from serving.model.tokenizer import Tokenizer
from serving.router.router import AllBusyError, AllFullError, NoWorkersError
from serving.routing.live import Placement, Routing
from serving.runtime.client import ReplyStream
from serving.runtime.messages import CallError, End, pack_u32, pack_u64
from serving.worker.protocol import PreprocessedRequest, StopConditions

ELSEWHERE = frozenset({"draining", "unknown", "overloaded"})
"""Ends of calls that were never begun: they go elsewhere without counting as a migration."""

UNPLACED = (NoWorkersError, AllBusyError, AllFullError, CallError)
"""Nobody takes a request now."""

MAX_REFUSALS = 8
PATIENCE_S = 30.0
"""How long a request that lost its instance waits for another to appear, or for that one to be started again."""

RETRY_S = 0.05
STATUS = {
    **dict.fromkeys(("overloaded", "full"), 429),
    **dict.fromkeys(("draining", "unknown", "unavailable"), 503),
    "invalid": 400,
    "lost": 502,
    "engine": 500,
}


def refusal(error: Exception) -> ApiError:
    """Return what a client gets when no worker takes its request."""
    match error:
        case AllFullError():
            return ApiError(429, "all workers are full, please retry later")
        case AllBusyError():
            return ApiError(503, "all workers are busy, please retry later")
    return ApiError(503, str(error))


class Generation:
    """See the module. Read `pieces` until `finish_reason` is set; then, or on any way out, `close`."""

    def __init__(
        self,
        routing: Routing,
        prompt: Prompt,
        conditions: StopConditions,
        *,
        sampling: dict[str, Any],
        eos_token_ids: list[int],
        stop_token_ids: list[int],
        stops: list[str],
        tokenizer: Tokenizer,
        migration_limit: int,
        request_id: str,
        instance_id: int | None = None,
        rank: int | None = None,
        session: str | None = None,
        is_refusable: bool = True,
    ) -> None:
        """Route and send it; what was accepted once, or is not refusable, is not refused because workers are full.

        Raises:
            ApiError: there is nobody to send it to.
        """
        self.num_prompt = len(prompt.tokens)
        self.block_size = prompt.block_size
        self.num_output = 0
        self.num_cached = 0
        self.num_migrations = 0
        self.finish_reason = ""
        self.logprobs: list[Any] | None = None
        """Of the tokens of the last `pieces`, if they were asked for."""
        self.prompt_logprobs: list[tuple[str, float | None, Any]] | None = None
        """Text, log-probability and likeliest alternatives of each token of the prompt, if they were asked for."""
        self._routing = routing
        self._prompt = prompt
        self._conditions = conditions
        self._sampling = sampling
        self._eos = frozenset(stop_token_ids + ([] if conditions.ignore_eos else eos_token_ids))
        self._eos_token_ids = eos_token_ids
        self._matcher = StopMatcher(stops) if stops else None
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._migration_limit = migration_limit if instance_id is None else 0
        self._request_id = request_id
        self._pinned = (instance_id, rank)
        self._session = session
        self._is_refusable = is_refusable
        self._output: list[int] = []
        self._said: list[str] = []  # text of the last items, from engines that give text with their tokens
        self._num_before = 0
        self._num_counted: int | None = None
        self._refusals = 0
        self._waits_until = 0.0
        self._failed_at: set[int] = set()
        self._is_booked = False
        self._is_fresh = True
        self._stream: ReplyStream | None = None
        self.placement: Placement
        try:
            self._place()
        except UNPLACED as error:
            raise refusal(error) from error
        self._is_refusable = False

    async def pieces(self) -> list[bytes]:
        """Wait for news and return the text of each token that came, escaped for JSON.

        Raises:
            ApiError: the request failed.
        """
        tokens = await self._take()
        if self._said:
            return self._say(self._said)
        limit = self._conditions.max_tokens
        if limit is not None and self.num_output + len(tokens) >= limit:
            tokens = tokens[: limit - self.num_output]
            self.finish_reason = self.finish_reason or "length"
        if self._eos and not self._eos.isdisjoint(tokens):
            tokens = self._cut_at_eos(tokens)
        if self._matcher is None and (escaped := self._detokenizer.escaped(tokens)) is not None:
            self.num_output += len(tokens)
            return escaped
        texts = self._detokenizer.texts(tokens)
        if self._matcher is not None:
            texts = self._match(texts, self._matcher)
        return self._finish(texts)

    def _say(self, texts: list[str]) -> list[bytes]:
        """Return what an engine gave as text; each piece counts as a token until the engine counts itself."""
        return self._finish(texts if self._matcher is None else self._match(texts, self._matcher))

    def _finish(self, texts: list[str]) -> list[bytes]:
        """Count pieces and return them escaped; at the end, with what was held back."""
        self.num_output += len(texts)
        if self.finish_reason:
            rest = self._detokenizer.flush()
            if self._matcher is not None:
                rest = self._matcher.push(rest) + self._matcher.flush()
            if rest:
                texts = [*texts[:-1], texts[-1] + rest] if texts else [rest]
        return [msgspec.json.encode(text)[1:-1] for text in texts]

    @property
    def num_completion(self) -> int:
        """Tokens of the answer; some engines give text and count better than its tokens tell."""
        return self.num_output if self._num_counted is None else self._num_counted

    def close(self) -> None:
        """Release the booking, and tell the instance if it is still at work."""
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None
        if self._is_booked:
            self._is_booked = False
            self._routing.on_finish(self.placement)

    async def _take(self) -> list[int]:
        """Return new tokens, from this attempt or the next."""
        self.logprobs = None
        self._said.clear()
        while True:
            stream = self._stream
            assert stream is not None
            items = await stream.take()
            if self._is_fresh and items:
                self._is_fresh = False
                self._routing.on_first_token(self.placement)
            tokens: list[int] = []
            for item in items:
                if type(item) is int:
                    tokens.append(item)
                elif type(item) is list:
                    tokens += item
                else:
                    self._take_dict(item, tokens)
            if tokens and not self._has_logprobs():
                raise ApiError(400, "the engine of this model gives no such log-probabilities", param="logprobs")
            if self._migration_limit:
                self._output += tokens
            if tokens or self._said or self.finish_reason:
                return tokens
            if stream.end is not None and not stream.items:
                await self._go_on(stream.end)
                if self.finish_reason:
                    return tokens

    def _has_logprobs(self) -> bool:
        """Tell whether the log-probabilities that were asked for have come with the tokens."""
        wanted = self._sampling
        if wanted.get("prompt_logprobs") is not None and self.prompt_logprobs is None:
            return False
        return wanted.get("logprobs") is None or bool(self.logprobs)

    def _take_dict(self, item: Any, tokens: list[int]) -> None:
        if not isinstance(item, dict) or not isinstance(found := item.get("token_ids", []), list):
            raise ApiError(500, "the engine sent something that is no answer")
        tokens += found
        if item.get("finish_reason"):
            self.finish_reason = str(item["finish_reason"])
        if "cached_tokens" in item:
            self.num_cached = min(int(item["cached_tokens"]), self.num_prompt)
        if "text" in item:
            self._said.append(str(item["text"]))
        if "completion_tokens" in item:
            self._num_counted = self._num_before + int(item["completion_tokens"])
        if item.get("prompt_log_probs") is not None and self.prompt_logprobs is None:
            texts = map(self._tokenizer.text_of, self._prompt.tokens.tolist())
            likeliest = map(self._top, item["prompt_top_logprobs"])
            self.prompt_logprobs = list(zip(texts, item["prompt_log_probs"], likeliest, strict=False))
        if item.get("log_probs") is not None:
            tops = item.get("top_logprobs") or [None] * len(found)
            self.logprobs = (self.logprobs or []) + [
                (probability, self._top(tops[place])) for place, probability in enumerate(item["log_probs"])
            ]

    def _top(self, top: list[Any] | None) -> list[dict[str, Any]] | None:
        """Return the likeliest tokens as OpenAI has them; engines may give them as (token id, log-probability)."""
        if top is None:
            return None
        named: list[dict[str, Any]] = []
        for entry in top:
            if isinstance(entry, dict):
                named.append(entry)
            else:
                text = self._tokenizer.text_of(entry[0])
                named.append({"token": text, "logprob": entry[1], "bytes": list(text.encode())})
        return named

    async def _go_on(self, end: End) -> None:
        """This attempt is over without a finish reason: begin another, if there may be one."""
        if not end.kind:  # an engine that ends without saying why is done
            self.finish_reason = "stop"
            return
        begun = bool(self.num_output)
        limit = self._conditions.max_tokens
        if begun and limit is not None and self.num_output >= limit:
            self.finish_reason = "length"  # lost between its last token and its end
            return
        loop = asyncio.get_running_loop()
        if end.kind in ELSEWHERE and self._pinned[0] is None and self._refusals < MAX_REFUSALS:
            self._refusals += 1
            self._waits_until = loop.time() + PATIENCE_S
        elif end.kind == "lost" and self.num_migrations < self._migration_limit:
            self.num_migrations += 1
            self._waits_until = loop.time() + PATIENCE_S
        elif end.kind == "unavailable" and loop.time() < self._waits_until:
            await asyncio.sleep(RETRY_S)
        else:
            message = end.error
            if end.kind == "lost" and self._migration_limit:
                message += f" and the migration limit of {self._migration_limit} is exhausted"
            raise ApiError(STATUS.get(end.kind, 500), message)
        if end.kind != "unavailable":
            self._failed_at.add(self.placement.worker.instance_id)
        self.close()
        while True:
            try:
                self._place()
            except UNPLACED as error:
                if loop.time() > self._waits_until:
                    raise refusal(error) from error
                await asyncio.sleep(RETRY_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(self._waits_until):
                        await self._routing.wait_for_workers()
            else:
                return

    def _place(self) -> None:
        """Route and send what remains to be generated.

        Raises:
            UNPLACED: nobody takes it now.
        """
        prompt, conditions, done = self._prompt, self._conditions, len(self._output)
        self._num_before = done
        if done:
            tokens = np.concatenate([prompt.tokens, np.array(self._output, np.uint32)])
            prompt = Prompt(tokens, prompt.block_size)
            conditions = msgspec.structs.replace(
                conditions,
                max_tokens=None if conditions.max_tokens is None else conditions.max_tokens - done,
                min_tokens=max(conditions.min_tokens - done, 0),
            )
        placement = self._routing.pick(
            len(prompt.tokens),
            prompt.hashes,
            *self._pinned,
            avoid=self._failed_at,
            session=self._session,
            is_refusable=self._is_refusable,
        )
        self.placement = placement
        self._is_booked = self._is_fresh = True
        request = PreprocessedRequest(
            token_ids=pack_u32(prompt.tokens),
            sequence_hashes=pack_u64(np.array(prompt.hashes, np.uint64)),
            stop_conditions=conditions,
            sampling_options=self._sampling,
            eos_token_ids=self._eos_token_ids,
            num_generated=done,
            dp_rank=placement.worker.rank,
            request_id=self._request_id,
            is_refusable=self._is_refusable,
        )
        try:
            self._stream = self._routing.send(placement, request)
        except CallError:
            self.close()
            raise

    def _cut_at_eos(self, tokens: list[int]) -> list[int]:
        for place, token in enumerate(tokens):
            if token in self._eos and self.num_output + place >= self._conditions.min_tokens:
                self.finish_reason = "stop"
                return tokens[:place]
        return tokens

    def _match(self, texts: list[str], matcher: StopMatcher) -> list[str]:
        matched: list[str] = []
        for text in texts:
            may_stop = self.num_output + len(matched) >= self._conditions.min_tokens
            matched.append(matcher.push(text, may_stop=may_stop))
            if matcher.has_stopped:
                self.finish_reason = "stop"
                break
        return matched
