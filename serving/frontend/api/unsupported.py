"""Fields of OpenAI, vLLM and SGLang that no token-id engine could honour: rejected rather than ignored."""

from typing import Any

from serving.frontend.api.errors import ApiError
from serving.frontend.api.fields import Neutral, check_body, check_within, names_of
from serving.frontend.api.kinds import KINDS, AnyRequest
from serving.frontend.api.messages import request as messages
from serving.frontend.api.openai import ANNOTATIONS, OpenAiRequest
from serving.frontend.api.responses import request as responses

FIELDS: dict[type[AnyRequest], frozenset[str]] = {kind.type: names_of(kind.type) for kind in KINDS.values()}
NEVER = (
    "allowed_token_ids", "audio", "cache_salt", "chat_template", "chat_template_kwargs", "custom_logit_processor",
    "custom_params", "documents", "function_call", "functions", "guided_decoding_backend",
    "guided_whitespace_pattern", "input_ids",
    "logits_processors", "lora_path", "mm_processor_kwargs", "moderation", "prompt_embeds",
    "prompt_logprobs", "reasoning", "reasoning_effort", "repetition_detection", "session_params",
    "stop_regex", "thinking", "thinking_token_budget", "truncate_prompt_tokens",
    "truncation_side", "vllm_xargs", "web_search_options",
)  # fmt: skip
"""Fields that no engine here supports, whatever their value."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(NEVER, ()),
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "bad_words": ([],),
    "continue_final_message": (False,),
    "echo": (False,),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "priority": (0,),
    "return_hidden_states": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "separate_reasoning": (True, False),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stream_reasoning": (True, False),
    "suffix": ("",),
    "use_beam_search": (False,),
}
"""Fields of OpenAI, vLLM and SGLang that no engine here supports, with the values that ask for nothing."""

OTHERS: dict[type[AnyRequest], Neutral] = {
    responses.ResponsesRequest: responses.NEUTRAL,
    messages.CountRequest: messages.NEUTRAL,
    messages.MessagesRequest: messages.NEUTRAL,
}
"""The same for the other APIs."""


def neutral_of(type: type[AnyRequest]) -> Neutral:
    """Return the fields that a kind of request cannot have, with the values that ask for nothing."""
    return OTHERS.get(type, NEUTRAL)


def check_fields(body: bytes | bytearray, request: AnyRequest, *, is_strict: bool = False) -> None:
    """Reject what a token-id engine would have to ignore: unknown fields, and fields that no engine here supports.

    Args:
        body: the request as it came.
        request: the same, read.
        is_strict: whether unknown fields are rejected even if their value asks for nothing, also those of
            the objects within it. What is read later is checked by `read` (see `strictly`).

    Raises:
        ApiError: there is such a field or annotation, or a field occurs twice.
    """
    fields = check_body(body, FIELDS[type(request)], neutral_of(type(request)), is_strict=is_strict)
    if is_strict:
        check_within(fields, type(request))
    if not isinstance(request, OpenAiRequest):
        return
    for note in (request.nvext.annotations or ()) if request.nvext is not None else ():
        if note not in ANNOTATIONS and ":" not in note:
            message = f"nvext.annotations: unknown annotation {note!r}; known: {', '.join(ANNOTATIONS)}, dp_rank:N"
            raise ApiError(400, message, param="nvext")
