"""Answers to completions and chats as vLLM writes them: an event for each step, and the reason to finish in the last one.

event of a step         before   text   after
data: {...,"choices":[{"index":0,"text":"  once  ","logprobs":null,...}]}
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from serving.frontend.answers.accepted import AcceptedRequest
from serving.frontend.answers.answer import ChoiceEvents, Collected
from serving.frontend.answers.splitting import AnswerParts
from serving.frontend.api.deltas import as_one
from serving.frontend.api.errors import ApiError
from serving.frontend.api.logprobs import TokenLogprob
from serving.frontend.api.sse import DONE, event, unescape
from serving.frontend.generation.choice import Choice
from serving.frontend.shape import AnswerShape
from serving.runtime.world import world
from serving.stand_in.vllm.answers.errors import error_event
from serving.stand_in.vllm.answers.logprobs import Scores, prompt_logprobs, scores
from serving.stand_in.vllm.answers.parts import VllmDeltas, ids_of, message
from serving.stand_in.vllm.answers.usage import AnswerSettings, metrics, usage, without_none

_encode = msgspec.json.encode


class VllmAnswer:
    """See `Answer`."""

    def __init__(self, accepted: AcceptedRequest, model: str, settings: AnswerSettings) -> None:
        prepared = accepted.prepared
        self.accepted = accepted
        self.prepared = prepared
        self.settings = settings
        self.is_chat = prepared.is_chat
        options = accepted.stream_options
        self.has_usage = bool(options.include_usage) or settings.api.enable_force_include_usage
        self.has_usages = settings.api.enable_force_include_usage or (
            self.has_usage and bool(options.continuous_usage_stats)
        )
        self.head: dict[str, Any] = {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{accepted.id}",
            "object": "chat.completion.chunk" if self.is_chat else "text_completion",
            "created": int(world().wall_s()),
            "model": model,
        }
        self._parts: list[AnswerParts] = []

    def events(self, index: int) -> ChoiceEvents:
        """See `Answer`."""
        shape = self.prepared.shape
        return (
            _TextEvents(self, index)
            if shape is None
            else _PartEvents(self, index, self._split(shape), is_searched=bool(shape.tool_calls))
        )

    def end(self) -> bytes:
        """See `Answer`."""
        if not self.has_usage:
            return DONE
        found: dict[str, Any] = {
            "choices": [],
            "usage": without_none(self._usage()),
            "system_fingerprint": self.settings.fingerprint,
        }
        found["metrics"] = without_none(self._metrics() or {}) or None
        return event(self.head | {name: value for name, value in found.items() if value is not None}) + DONE

    def whole(self, choices: list[Collected]) -> bytes:
        """See `Answer`."""
        prepared, first = self.prepared, self.accepted.choices[0]
        answer: dict[str, Any] = self.head | {
            "choices": [self._choice(index, collected) for index, collected in enumerate(choices)],
            "service_tier": None,
            "system_fingerprint": self.settings.fingerprint,
            "usage": self._usage(),
        }
        if self.is_chat:
            answer["object"] = "chat.completion"
            answer |= {
                "prompt_logprobs": prompt_logprobs(first, self._names),
                "prompt_token_ids": ids_of(first.prompt) if prepared.vllm.return_token_ids else None,
                "prompt_text": prepared.prompt_text,
            }
        more = {"kv_transfer_params": first.kv_transfer_params, "ec_transfer_params": None, "metrics": self._metrics()}
        return _encode(answer | more)

    def failed(self, error: ApiError) -> bytes:
        """See `Answer`."""
        return error_event(error)

    @property
    def num_reasoning(self) -> int | None:
        """Tokens that the model thought with, if the server tells them apart."""
        if not (self.is_chat and self.settings.api.reasoning_parser):
            return None
        return sum(parts.num_reasoning for parts in self._parts)

    def count_search(self, *, is_streamed: bool, has_called: bool) -> None:
        """Count a search for tool calls."""
        self.settings.on_search("chat_completions", is_streamed=is_streamed, has_called=has_called)

    def _usage(self) -> dict[str, Any]:
        found = usage(*self._counts(), num_reasoning=self.num_reasoning)
        if self.settings.api.enable_prompt_tokens_details:
            cached = self.accepted.choices[-1].num_cached
            details = {"cached_tokens": cached, "created_cache_tokens": 0 if self.is_chat else None}
            found["prompt_tokens_details"] = details | {"multimodal_tokens": None}
        return found

    def _counts(self) -> tuple[int, int]:
        """Return the tokens of the prompts, each of which counts once, and of the answers."""
        choices = self.accepted.choices
        prompts = choices[:: self.prepared.options.n or 1]
        return sum(each.num_prompt for each in prompts), sum(each.num_completion for each in choices)

    def _metrics(self) -> dict[str, Any] | None:
        is_one = len(self.accepted.choices) == 1
        return metrics(self.accepted.choices[0]) if is_one and self.settings.api.enable_per_request_metrics else None

    def _split(self, shape: AnswerShape) -> AnswerParts:
        self._parts.append(AnswerParts(shape))
        return self._parts[-1]

    def _choice(self, index: int, collected: Collected) -> dict[str, Any]:
        choice, options, shape = self.accepted.choices[index], self.prepared.vllm, self.prepared.shape
        scored = scores(choice, collected.logprobs, collected.tokens, options) if collected.logprobs else []
        text = "".join(map(unescape, collected.pieces)) if shape is None else ""
        token_ids = collected.tokens if options.return_token_ids else None
        reason, stop = choice.finish_reason, stop_reason(choice)
        if not self.is_chat:
            echo = self.accepted.echo(index)
            return {
                "index": index,
                "text": echo if options.is_only_echo else echo + text,
                "logprobs": Scores(is_chat=False).value([*self._of_prompt(choice), *scored]) if scored else None,
                "finish_reason": reason,
                "stop_reason": stop,
                "token_ids": token_ids,
                "prompt_logprobs": prompt_logprobs(choice, self._names),
                "prompt_token_ids": ids_of(choice.prompt) if options.return_token_ids else None,
                "routed_experts": None,
            }
        turn: dict[str, Any] = message(options.role, content=text)
        if shape is not None:
            split = self._split(shape)
            parts = [part for piece in collected.pieces for part in split.push(piece)] + split.end()
            if shape.tool_calls:
                self.count_search(is_streamed=False, has_called=split.num_calls > 0)
            turn, reason = message(options.role, parts), split.reason(reason)
        if options.echoed is not None:
            turn["content"] = options.echoed + (turn["content"] or "")
        is_hidden = not options.include_reasoning and shape is not None
        return {
            "index": index,
            "message": turn,
            "logprobs": Scores(is_chat=True).value(scored) if scored and not is_hidden else None,
            "finish_reason": reason,
            "stop_reason": stop,
            "token_ids": None if is_hidden else token_ids,
            "routed_experts": None,
        }

    def _of_prompt(self, choice: Choice) -> list[TokenLogprob]:
        """Return the log-probabilities of a prompt that is repeated."""
        return list(choice.prompt_logprobs or ()) if any(self.prepared.echoes) else []

    def _names(self, token: int) -> str:
        return self.settings.text_of(token)


class _Events:
    """What the events of a choice have in common."""

    def __init__(self, answer: VllmAnswer, index: int) -> None:
        prepared = answer.prepared
        self.answer = answer
        self.index = index
        self.choice = answer.accepted.choices[index]
        self.options = prepared.vllm
        self.is_chat = answer.is_chat
        self.logprobs = Scores(is_chat=self.is_chat)
        start = _encode(answer.head)[:-1].decode()
        delta = '"delta":{"content":"' if self.is_chat else '"text":"'
        ids = "" if self.is_chat else '"stop_reason":null,"prompt_token_ids":null,'
        self.before = f'data: {start},"choices":[{{"index":{index},{delta}'.encode()
        self.after = f'"{"}" if self.is_chat else ""},"logprobs":null,"finish_reason":null,{ids}"token_ids":null}}]}}\n\n'.encode()
        self.between = self.after + self.before

    def first(self) -> bytes:
        """Return what comes before the first token: the roles of all choices, with the first one's."""
        if not self.is_chat or self.index:
            return b""
        answer, prepared = self.answer, self.answer.prepared
        body, count = b"", len(answer.accepted.choices)
        for index in range(count):
            choice = {"index": index, "delta": {"role": self.options.role, "content": ""}, "logprobs": None}
            more: dict[str, Any] = {
                "prompt_token_ids": ids_of(self.choice.prompt) if self.options.return_token_ids else None,
                "prompt_text": prepared.prompt_text,
            }
            body += self._event(choice | {"finish_reason": None}, num_output=0, **more)
        if self.options.echoed:
            delta = {"content": self.options.echoed}
            for index in range(count):
                choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
                body += self._event(choice, num_output=0)
        return body

    def last(self) -> bytes:
        """See `ChoiceEvents`: the last token has said it."""
        return b""

    def _event(
        self, choice: dict[str, Any], *, num_output: int, num_reasoning: int | None = None, **more: Any
    ) -> bytes:
        """Return an event, with the usage so far if each has it."""
        answer = self.answer
        found = answer.head | {"choices": [choice]}
        if answer.has_usages:
            so_far = usage(self.choice.num_prompt, num_output, num_reasoning=num_reasoning)
            del so_far["prompt_tokens_details"]
            if not self.is_chat:
                del so_far["completion_tokens_details"]
            elif answer.settings.api.reasoning_parser and num_reasoning is None:
                so_far["completion_tokens_details"] = {"reasoning_tokens": 0}
            found["usage"] = so_far
        return event(found | more)

    def _steps(self, pieces: list[bytes]) -> list[tuple[int, int]]:
        """Return the places (from, to) of each step's tokens; the one that ends the choice may have no text."""
        choice = self.choice
        if not choice.finish_reason:
            return choice.events(len(pieces))
        return choice.events(max(len(pieces), choice.num_completion - choice.num_before)) or [(0, 0)]

    def _step_event(
        self, choice: dict[str, Any], start: int, end: int, reason: str | None, *, shows_ids: bool = True, **more: Any
    ) -> bytes:
        """Return the event of the tokens from a place to another, or to the last if it says why the choice is over."""
        ids = self.choice.tokens[start : None if reason else end]
        choice["token_ids"] = ids if shows_ids and self.options.return_token_ids else None
        num_output = self.choice.num_completion if reason else self.choice.num_before + end
        fingerprint = self.answer.settings.fingerprint
        if reason and not self.answer.has_usage and fingerprint is not None:
            more["system_fingerprint"] = fingerprint
        return self._event(choice, num_output=num_output, **more)

    def _scores(self, start: int, end: int) -> dict[str, Any] | None:
        """Return the log-probabilities of the last tokens from a place to another, if they are wanted."""
        choice = self.choice
        if not choice.logprobs:
            return None
        found = scores(choice, choice.logprobs, choice.tokens, self.options)[start:end]
        return self.logprobs.value(found) if found else None


class _TextEvents(_Events):
    """The events of a choice that is one text."""

    def __init__(self, answer: VllmAnswer, index: int) -> None:
        super().__init__(answer, index)
        prepared = answer.prepared
        echo = answer.accepted.echo(index)
        self._echo = echo if not self.is_chat and (echo or prepared.vllm.is_only_echo) else None
        self._is_plain = not (
            answer.has_usages
            or prepared.num_logprobs is not None
            or self.options.return_token_ids
            or self._echo is not None
        )
        self._has_begun = False

    def tokens(self, pieces: list[bytes]) -> bytes:
        """Return the events of steps; the last event of the choice also says why it is over."""
        ended = bool(self.choice.finish_reason)
        if self._is_plain and not ended and not self.choice.steps:
            return self.before + self.between.join(pieces) + self.after if pieces else b""
        steps = self._steps(pieces)
        last = steps.pop() if ended else None
        texts = [b"".join(pieces[start:end]) for start, end in steps]
        if self._is_plain:
            body = self.before + self.between.join(texts) + self.after if texts else b""
        else:
            body = b"".join(self._step(unescape(text), *step) for text, step in zip(texts, steps, strict=True))
        if last is not None:
            text = unescape(b"".join(pieces[last[0] :]))
            body += self._step(text, *last, reason=self.choice.finish_reason)
        return body

    def _step(self, text: str, start: int, end: int, reason: str | None = None) -> bytes:
        choice = self.choice
        echo, self._echo = self._echo, None
        logprobs = self._scores(start, end)
        if echo is not None:
            text = echo if self.options.is_only_echo else echo + text
            if logprobs is not None:
                found = [
                    *(choice.prompt_logprobs or ()),
                    *scores(choice, choice.logprobs, choice.tokens, self.options)[start:end],
                ]
                self.logprobs = Scores(is_chat=False)
                logprobs = self.logprobs.value(found)
        shows_prompt = not self._has_begun and (echo is not None or self.options.return_token_ids)
        self._has_begun = True
        found_choice: dict[str, Any] = {"index": self.index}
        if self.is_chat:
            found_choice |= {"delta": {"content": text}, "logprobs": logprobs, "finish_reason": reason}
            if reason:
                found_choice["stop_reason"] = stop_reason(choice)
        else:
            found_choice |= {"text": text, "logprobs": logprobs, "finish_reason": reason}
            found_choice |= {"stop_reason": stop_reason(choice) if reason else None}
            found_choice |= {"prompt_token_ids": ids_of(choice.prompt) if shows_prompt else None}
        return self._step_event(found_choice, start, end, reason)


class _PartEvents(_Events):
    """The events of a chat whose text is split: a step that settles nothing has none, unless its ids or scores are wanted."""

    def __init__(self, answer: VllmAnswer, index: int, parts: AnswerParts, *, is_searched: bool) -> None:
        super().__init__(answer, index)
        self._parts = parts
        self._is_searched = is_searched
        self._deltas = VllmDeltas()
        self._is_hidden = not self.options.include_reasoning
        self._shows_all = not self._is_hidden and (
            self.options.return_token_ids or answer.prepared.num_logprobs is not None
        )

    def tokens(self, pieces: list[bytes]) -> bytes:
        """Return the events of steps; the last event of the choice also says why it is over."""
        body, steps, ended = b"", self._steps(pieces), bool(self.choice.finish_reason)
        for start, end in steps:
            deltas = self._deltas.of([part for piece in pieces[start:end] for part in self._parts.push(piece)])
            self._count_search(deltas)
            is_last = ended and (start, end) == steps[-1]
            body += self._finish(deltas, start, end) if is_last else self._emit(deltas, start, end)
        return body

    def _count_search(self, deltas: Sequence[dict[str, Any]]) -> None:
        """Count a step after the reasoning, which vLLM searches for calls even if it has no text."""
        if self._is_searched and not self._parts.is_thinking:
            self.answer.count_search(is_streamed=True, has_called=any("tool_calls" in delta for delta in deltas))

    def _emit(self, deltas: Sequence[dict[str, Any]], start: int, end: int) -> bytes:
        found = as_one(deltas) if end - start > 1 else list(deltas)
        found = found or ([{}] if self._shows_all else [])
        return b"".join(self._delta(delta, start, end, is_first=not number) for number, delta in enumerate(found))

    def _finish(self, deltas: Sequence[dict[str, Any]], start: int, end: int) -> bytes:
        found = [*deltas, *self._deltas.of(self._parts.end())]
        found = (as_one(found) if end - start > 1 else found) or [{}]
        body = b"".join(self._delta(delta, start, end, is_first=not number) for number, delta in enumerate(found[:-1]))
        return body + self._delta(
            found[-1], start, end, is_first=len(found) == 1, reason=self._parts.reason(self.choice.finish_reason)
        )

    def _delta(
        self, delta: dict[str, Any], start: int, end: int, *, is_first: bool, reason: str | None = None
    ) -> bytes:
        shows = is_first and not self._is_hidden
        found: dict[str, Any] = {"index": self.index, "delta": delta}
        found |= {"logprobs": self._scores(start, end) if shows else None, "finish_reason": reason}
        if reason:
            found["stop_reason"] = stop_reason(self.choice)
        num_reasoning = self._parts.num_reasoning if self.answer.settings.api.reasoning_parser else None
        return self._step_event(found, start, end, reason, shows_ids=shows, num_reasoning=num_reasoning)


def stop_reason(choice: Choice) -> int | str | None:
    """Return what ended an answer: a stop string, or a token other than EOS."""
    if choice.finish_reason == "repetition":
        return "repetition_detected"
    if choice.stop is not None:
        return choice.stop
    return None if choice.stop_token == choice.eos_token else choice.stop_token
