"""What a request of vLLM's asks for, as everything else takes it: our own requests, with what vLLM's own fields ask for."""

from collections.abc import Mapping
from typing import Any

from serving.frontend.api.openai import (
    COMPLETION_TOKENS,
    ChatRequest,
    CompletionRequest,
    Message,
    StreamOptions,
    TextPart,
)
from serving.frontend.api.vllm_options import VllmOptions
from serving.stand_in.config import ApiConfig
from serving.stand_in.vllm.requests import checks
from serving.stand_in.vllm.requests.fields import Chat, Completion, NamedTool, Sampling

MAX_TOP_K = 1 << 20
MAX_PENALTY = 2.0
"""No model has that many tokens; the mocker, whose answers are made up, is not penalized anyhow."""


class AskedCompletion(CompletionRequest, kw_only=True):
    """A completion as vLLM was asked for it."""

    asked: Any
    options: VllmOptions

    @property
    def vllm(self) -> VllmOptions:
        """See `Request`."""
        return self.options

    @property
    def num_prompt_logprobs(self) -> int | None:
        """See `Request`."""
        return self.options.prompt_logprobs


class AskedChat(ChatRequest, kw_only=True):
    """A chat as vLLM was asked for it."""

    asked: Any
    options: VllmOptions

    @property
    def vllm(self) -> VllmOptions:
        """See `Request`."""
        return self.options

    @property
    def num_prompt_logprobs(self) -> int | None:
        """See `Request`."""
        return self.options.prompt_logprobs

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """See `ChatRequest`: vLLM's templates see tools even if none may be called."""
        return self.tools


class Asking:
    """Turns vLLM's requests into ours."""

    def __init__(self, api: ApiConfig, model: str, *, hands_over: bool) -> None:
        """Prepare to read.

        Args:
            api: what the server's settings say about requests.
            model: the model of requests that name none.
            hands_over: whether KV is handed to other instances.
        """
        self._api = api
        self._model = model
        self._hands_over = hands_over

    def completion(self, asked: Completion) -> AskedCompletion:
        """Return the request for a completion."""
        echo = bool(asked.echo)
        prompt_logprobs = asked.prompt_logprobs
        if prompt_logprobs is None and echo:
            prompt_logprobs = asked.logprobs
        is_only_echo = echo and asked.max_tokens == 0
        options = self._options(
            asked,
            prompt_logprobs=prompt_logprobs,
            add_special_tokens=asked.add_special_tokens,
            is_only_echo=is_only_echo,
        )
        limit = asked.max_tokens if "max_tokens" in asked.model_fields_set else None
        asked.max_tokens = COMPLETION_TOKENS if limit is None else limit
        return AskedCompletion(
            asked=asked,
            options=options,
            prompt=[] if asked.prompt is None else asked.prompt,  # type: ignore[arg-type]
            echo=echo and not asked.return_token_ids,
            logprobs=asked.logprobs,
            **self._common(asked, 1 if is_only_echo else asked.max_tokens),
        )

    def chat(self, asked: Chat) -> AskedChat:
        """Return the request for a chat."""
        prompt_logprobs = asked.prompt_logprobs
        if prompt_logprobs is None and asked.echo:
            prompt_logprobs = asked.top_logprobs
        last: Any = asked.messages[-1] if asked.messages else {}
        role = self._api.response_role if asked.add_generation_prompt else str(last.get("role"))
        messages = [_message(message) for message in asked.messages]
        options = self._options(
            asked,
            prompt_logprobs=prompt_logprobs,
            add_special_tokens=asked.add_special_tokens,
            continue_final_message=asked.continue_final_message,
            chat_template=asked.chat_template or "",
            role=role,
            echoed=None if not asked.echo else messages[-1].text if last.get("role") == role else "",
            return_prompt_text=bool(asked.return_prompt_text),
            include_reasoning=asked.include_reasoning,
        )
        is_hidden = asked.tool_choice == "none" and self._api.exclude_tools_when_tool_choice_none
        return AskedChat(
            asked=asked,
            options=options,
            messages=messages,
            logprobs=asked.logprobs,
            top_logprobs=asked.top_logprobs,
            tools=None if is_hidden or not asked.tools else [_tool(tool) for tool in asked.tools],
            tool_choice=_choice(asked),
            parallel_tool_calls=asked.parallel_tool_calls,
            include_reasoning=asked.include_reasoning,
            documents=asked.documents,
            reasoning_effort=asked.reasoning_effort,
            chat_template_kwargs=dict(self._api.default_chat_template_kwargs) | (asked.chat_template_kwargs or {}),
            add_generation_prompt=asked.add_generation_prompt,
            **self._common(asked, checks.limit_of(asked, self._api.sampling_defaults.get("max_tokens"))),
        )

    def _options(self, asked: Sampling, **more: Any) -> VllmOptions:
        """Return what vLLM's own fields ask for."""
        watch, as_ids = asked.repetition_detection, asked.return_tokens_as_token_ids
        return VllmOptions(
            priority=asked.priority,
            cache_salt=asked.cache_salt or "",
            truncate_prompt_tokens=asked.truncate_prompt_tokens,
            truncation_side=asked.truncation_side or "left",
            allowed_token_ids=asked.allowed_token_ids,
            bad_words=asked.bad_words,
            repetition=None if watch is None else (watch.min_pattern_size, watch.max_pattern_size, watch.min_count),
            request_id=asked.request_id,
            skip_special_tokens=asked.skip_special_tokens,
            include_stop_str_in_output=asked.include_stop_str_in_output,
            return_token_ids=bool(asked.return_token_ids),
            return_tokens_as_token_ids=self._api.return_tokens_as_token_ids if as_ids is None else as_ids,
            **more,
        )

    def _common(self, asked: Completion | Chat, limit: int | None) -> dict[str, Any]:
        """Return the fields that all servers have; values out of range are refused before anybody reads them."""
        top_k, penalty = self._value(asked, "top_k"), self._value(asked, "repetition_penalty")
        stream = asked.stream_options
        return {
            "model": asked.model or self._model,
            "max_tokens": limit,
            "min_tokens": asked.min_tokens,
            "temperature": self._value(asked, "temperature"),
            "top_p": self._value(asked, "top_p"),
            "top_k": top_k if top_k is None else min(top_k, MAX_TOP_K),
            "min_p": self._value(asked, "min_p"),
            "n": asked.n,
            "stop": asked.stop,
            "seed": None if asked.seed == -1 else asked.seed,
            "presence_penalty": self._value(asked, "presence_penalty"),
            "frequency_penalty": self._value(asked, "frequency_penalty"),
            "repetition_penalty": penalty if penalty is None else min(penalty, MAX_PENALTY),
            "logit_bias": _clipped(asked.logit_bias),
            "stop_token_ids": [*(asked.stop_token_ids or ()), *self._api.sampling_defaults.get("stop_token_ids", ())],
            "ignore_eos": asked.ignore_eos,
            "stream": asked.stream,
            "stream_options": None
            if stream is None
            else StreamOptions(bool(stream.include_usage), bool(stream.continuous_usage_stats)),
            "session_id": asked.session_id,
            "kv_transfer_params": asked.kv_transfer_params if self._hands_over else None,
            "response_format": asked.response_format and asked.response_format.model_dump(by_alias=True),
            "structured_outputs": asked.structured_outputs and _constraint(asked),
        }

    def _value(self, asked: Sampling, name: str) -> Any:
        value = getattr(asked, name)
        return self._api.sampling_defaults.get(name) if value is None else value


def _message(message: Mapping[str, Any]) -> Message:
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list) and not all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        content = ""  # it is refused once the model is known
    return Message(
        role=message["role"],
        content=[TextPart(part["text"]) for part in content] if isinstance(content, list) else content,
        name=message.get("name"),
        reasoning=message.get("reasoning"),
        tool_calls=list(calls) if calls else None,
        tool_call_id=message.get("tool_call_id"),
    )


def _clipped(biases: Mapping[str, float] | None) -> dict[str, float] | None:
    """Return biases within the range that has an effect."""
    return None if biases is None else {token: min(max(bias, -100.0), 100.0) for token, bias in biases.items()}


def _tool(tool: Any) -> dict[str, Any]:
    dumped: dict[str, Any] = tool.model_dump(exclude_unset=True)
    return {"type": "function", **dumped}


def _choice(asked: Chat) -> Any:
    choice = asked.tool_choice if asked.tools else None
    return choice.model_dump() if isinstance(choice, NamedTool) else choice


def _constraint(asked: Sampling) -> dict[str, Any]:
    assert asked.structured_outputs is not None
    wanted = asked.structured_outputs.model_dump(by_alias=True)
    return {name: wanted[name] for name in checks.KINDS if wanted[name] is not None}
