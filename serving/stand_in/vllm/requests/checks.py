"""What vLLM refuses of a request whose fields have the right types, in its order: what does not fit together, values out of range."""

import math
from collections.abc import Iterator
from typing import Any

from serving.stand_in.vllm.answers.errors import refused
from serving.stand_in.vllm.requests.fields import Chat, Completion, NamedTool, Sampling

SALT_CHARACTERS = 128
NOT_IN_SALTS = frozenset("@/\\\0")
MAX_PROMPTS = 1024
"""Prompts of a completion, as by default of VLLM_MAX_COMPLETION_PROMPTS."""
MAX_CHOICES = 16_384
"""Answers to a prompt, as by default of VLLM_MAX_N_SEQUENCES."""
MAX_SCORED = 128
"""Token ids whose log-probabilities may be asked for by name."""

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""The ways to constrain an answer, of which a request has one."""


def check_raw(body: dict[str, Any], *, is_chat: bool) -> None:
    """Refuse what vLLM refuses before it looks at types."""
    _check_salt(body.get("cache_salt"))
    if body.get("stream_options") and not body.get("stream"):
        raise refused("Stream options are for answers with `stream=True`.", "stream_options")
    _check_budget(body.get("thinking_token_budget"))
    form = body.get("response_format")
    if isinstance(form, dict) and form.get("type") == "json_schema" and form.get("json_schema") is None:
        raise refused("A response_format of type 'json_schema' needs the field 'json_schema'.", "response_format")
    _check_pattern(body.get("repetition_detection"))
    _check_constraints(body, is_chat=is_chat)
    _check_logprobs(body, is_chat=is_chat)
    if is_chat:
        _check_tools(body)
        if body.get("continue_final_message") and body.get("add_generation_prompt"):
            raise refused("`continue_final_message` and `add_generation_prompt` cannot both be true.")
    else:
        _check_prompt(body)


def check_sampling(request: Sampling, limit: int | None, answers: int) -> None:
    """Refuse values out of range; `limit` is the number of tokens that the answer may have."""
    if answers < 1:
        raise refused(f"n must be at least 1, got {answers}.")
    if answers > MAX_CHOICES:
        raise refused(f"n must be at most {MAX_CHOICES}, got {answers}.", "n", answers)
    for name, message, is_named in _out_of_range(request):
        value = getattr(request, name)
        raise refused(f"{name} {message}, got {value}.", *((name, value) if is_named else ()))
    if limit is not None and limit < 1:
        raise refused(f"max_tokens must be at least 1, got {limit}.", "max_tokens", limit)
    if request.min_tokens < 0:
        raise refused(f"min_tokens must be at least 0, got {request.min_tokens}.")
    if limit is not None and request.min_tokens > limit:
        raise refused(f"min_tokens must be at most max_tokens={limit}, got {request.min_tokens}.")
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if not all(stops):
        raise refused("stop cannot have an empty string.")
    if not all(request.bad_words):
        raise refused("bad_words cannot have an empty string.")
    if request.temperature is not None and request.temperature < 1e-5 and answers > 1:
        raise refused(f"n must be 1 if temperature is 0, got {answers}.")


def check_engine(request: Sampling, num_logprobs: int | None, *, max_logprobs: int, vocabulary: int | None) -> None:
    """Refuse what only vLLM's engine refuses, which happens after an answer that is streamed has begun."""
    _check_count("sample", "logprobs", num_logprobs, max_logprobs, vocabulary)
    scored = request.logprob_token_ids
    if scored is not None and len(scored) > MAX_SCORED:
        raise refused(
            f"logprob_token_ids may name {MAX_SCORED} tokens, not {len(scored)}.", "logprob_token_ids", len(scored)
        )
    _check_count("prompt", "prompt_logprobs", request.prompt_logprobs, max_logprobs, vocabulary)
    check_known("stop_token_ids", request.stop_token_ids or [], vocabulary)
    allowed = request.allowed_token_ids
    if allowed is not None and not allowed:
        raise refused("allowed_token_ids is there, but empty.", "allowed_token_ids", allowed)
    check_known("allowed_token_ids", allowed or [], vocabulary)


def check_bias(request: Sampling) -> None:
    """Refuse keys that are no token ids."""
    strange = [key for key in request.logit_bias or () if not _is_number(key)]
    if strange:
        raise refused(f"logit_bias has keys that are no token ids: {strange!r}", "logit_bias", strange)


def check_choice(request: Chat, *, has_parser: bool, is_auto: bool) -> None:
    """Refuse a choice of tools for which the server has no parser."""
    choice = request.tool_choice
    if has_parser or choice in (None, "none"):
        return
    if choice == "auto":
        if not is_auto:
            raise refused('tool_choice "auto" needs --enable-auto-tool-choice and --tool-call-parser')
        return
    named = f'function "{choice.function.name}"' if isinstance(choice, NamedTool) else f'"{choice}"'
    raise refused(f"tool_choice={named} needs --tool-call-parser")


def _out_of_range(request: Sampling) -> Iterator[tuple[str, str, bool]]:
    """Yield the fields whose value is out of range, what is expected, and whether vLLM names the field."""
    for name in ("presence_penalty", "frequency_penalty"):
        if not -2 <= (getattr(request, name) or 0) <= 2:
            yield name, "must be in [-2, 2]", False
    penalty = request.repetition_penalty
    if penalty is not None and not (math.isfinite(penalty) and penalty > 0):
        yield "repetition_penalty", "must be a number greater than zero", False
    heat = request.temperature
    if heat is not None and not (math.isfinite(heat) and 0 <= heat <= 2):
        yield "temperature", "must be in [0, 2]", True
    if request.top_p is not None and not 0 < request.top_p <= 1:
        yield "top_p", "must be in (0, 1]", True
    if request.top_k is not None and request.top_k < -1:
        yield "top_k", "must be 0 (no limit), or at least 1", False
    if request.min_p is not None and not 0 <= request.min_p <= 1:
        yield "min_p", "must be in [0, 1]", False


def _check_salt(salt: Any) -> None:
    if salt is None:
        return
    if not isinstance(salt, str) or not salt:
        raise refused("cache_salt must be a string that is not empty.", "cache_salt")
    if len(salt) > SALT_CHARACTERS or NOT_IN_SALTS & set(salt):
        problem = f"cache_salt may have {SALT_CHARACTERS} characters, and none of '@', '/', '\\' and NUL."
        raise refused(problem, "cache_salt")


def _check_budget(budget: Any) -> None:
    if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < -1):
        problem = "thinking_token_budget must be an integer of at least 0, or -1: no limit."
        raise refused(problem, "thinking_token_budget", budget)


def _check_pattern(watch: Any) -> None:
    """Refuse sizes of patterns that do not fit together; values of wrong types are found later."""
    if not isinstance(watch, dict):
        return
    most, least, count = (watch.get(name, 0) for name in ("max_pattern_size", "min_pattern_size", "min_count"))
    if not all(isinstance(each, int) for each in (most, least, count)):
        return
    if least < 0 or least > most:
        raise refused("min_pattern_size must be from 0 to max_pattern_size.")
    if most > 0 and count < 2:
        raise refused("min_count must be at least 2, or max_pattern_size 0.")


def _check_constraints(body: dict[str, Any], *, is_chat: bool) -> None:
    wanted = body.get("structured_outputs")
    if not isinstance(wanted, dict):
        return
    name = None if is_chat else "structured_outputs"
    count = sum(wanted.get(kind) is not None for kind in ("json", "regex", "choice"))
    if count > 1:
        raise refused("structured_outputs may have one of 'json', 'regex' and 'choice'.", name)
    if is_chat and count and body.get("tool_choice", "none") not in ("none", "auto", None):
        raise refused("structured_outputs and tools exclude each other.")
    count = sum(wanted.get(kind) is not None for kind in KINDS)
    if count != 1:
        raise refused(f"structured_outputs must have one of {', '.join(KINDS)}, not {count}.")


def _check_logprobs(body: dict[str, Any], *, is_chat: bool) -> None:
    name = "top_logprobs" if is_chat else "logprobs"
    if body.get("logprob_token_ids") and not (body.get("logprobs") if is_chat else body.get("logprobs") is not None):
        raise refused("`logprob_token_ids` needs `logprobs`.", "logprob_token_ids")
    for field in ("prompt_logprobs", name):
        if (value := body.get(field)) is not None and not isinstance(value, int | float):
            raise refused(f"`{field}` must be an integer.", field, value)
    of_prompt, count = body.get("prompt_logprobs"), body.get(name)
    if of_prompt is not None and body.get("stream") and (of_prompt > 0 or of_prompt == -1):
        raise refused("`prompt_logprobs` are not there if `stream=True`.", "prompt_logprobs")
    for field, value in (("prompt_logprobs", of_prompt), (name, count)):
        if value is not None and value < 0 and value != -1:
            raise refused(f"`{field}` must be positive or -1.", field, value)
    if is_chat and count is not None and (count > 0 or count == -1) and not body.get("logprobs"):
        raise refused("`top_logprobs` needs `logprobs`: true.", "top_logprobs")


def _check_prompt(body: dict[str, Any]) -> None:
    prompt, embeddings = body.get("prompt"), body.get("prompt_embeds")
    if prompt in (None, "") and embeddings in (None, []):
        raise refused("Either prompt or prompt_embeds must be there, and not be empty.", "prompt")
    is_tokens = isinstance(prompt, list) and all(isinstance(each, int) for each in prompt)
    if isinstance(prompt, list) and not is_tokens and len(prompt) > MAX_PROMPTS:
        raise refused(f"a request may have {MAX_PROMPTS} prompts, not {len(prompt)}.", "prompt")


def _check_tools(body: dict[str, Any]) -> None:
    """Refuse tools and a choice that do not fit together; tools without a choice leave it to the model."""
    tools = body.get("tools")
    if tools == []:
        raise refused("`tools` must not be empty: name a tool, or leave the field out.", "tools")
    if "tool_choice" not in body and tools:
        body["tool_choice"] = "auto"
    choice = body.get("tool_choice")
    if choice in (None, "none"):
        return
    if tools is None:
        raise refused("`tool_choice` needs `tools`.", "tool_choice")
    if choice not in ("auto", "required") and not isinstance(choice, dict):
        problem = f'`tool_choice` must be "none", "auto", "required" or a tool by its name, not {choice!r:.100}.'
        raise refused(problem, "tool_choice")
    if isinstance(choice, dict):
        _check_named(choice, tools)


def _check_named(choice: dict[str, Any], tools: Any) -> None:
    function = choice.get("function")
    if not isinstance(function, dict):
        raise refused("`tool_choice` needs a `function`: {name}.", "tool_choice.function")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise refused("the `function` of `tool_choice` needs a `name`.", "tool_choice.function.name")
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)]
    if not any(isinstance(each, dict) and each.get("name") == name for each in functions):
        raise refused("`tool_choice` names none of the `tools`.", "tool_choice")


def _check_count(what: str, name: str, count: int | None, most: int, vocabulary: int | None) -> None:
    """Refuse a number of log-probabilities; -1 asks for those of all tokens."""
    size = vocabulary or 1 << 32
    wanted, most = (size if each == -1 else each for each in (count or 0, most))
    if wanted > most:
        raise refused(f"{wanted} {what} logprobs are wanted; the most is {most}", name, wanted)


def check_known(name: str, tokens: list[int], vocabulary: int | None) -> None:
    """Refuse tokens that the model does not have."""
    unknown = [token for token in tokens if token < 0 or (vocabulary is not None and token >= vocabulary)]
    if unknown:
        raise refused(f"{name} has token ids {unknown} out of the vocabulary of {vocabulary}", name, unknown)


def _is_number(key: str) -> bool:
    try:
        int(key)
    except ValueError:
        return False
    return True


def limit_of(request: Completion | Chat, default: int | None) -> int | None:
    """Return the number of tokens that a request sets as its limit, or that the server does (none: neither)."""
    if isinstance(request, Chat) and request.max_completion_tokens is not None:
        return request.max_completion_tokens
    return default if request.max_tokens is None else request.max_tokens
