"""Fields of OpenAI, vLLM and SGLang that no token-id engine could honour: rejected rather than ignored."""

from collections.abc import Collection
from typing import Any

import msgspec

from serving.frontend.api.errors import ApiError
from serving.frontend.api.kinds import KINDS, AnyRequest
from serving.frontend.api.openai import ANNOTATIONS, Message, Request

FEW = 64
"""Up to this many fields, their names are searched for in the body one by one."""

FIELDS: dict[type[AnyRequest], frozenset[str]] = {
    kind.type: frozenset(field.encode_name for field in msgspec.structs.fields(kind.type)) for kind in KINDS.values()
}
MESSAGE_FIELDS = frozenset(field.encode_name for field in msgspec.structs.fields(Message))
NOTHING = frozenset([b"null", b"false", b"[]", b"{}", b'""'])
"""Values of unknown fields that ask for nothing."""

NEVER = (
    "allowed_token_ids", "audio", "cache_salt", "chat_template", "chat_template_kwargs", "custom_logit_processor",
    "custom_params", "documents", "function_call", "functions", "guided_decoding_backend",
    "guided_whitespace_pattern", "input_ids",
    "logits_processors", "lora_path", "mm_processor_kwargs", "moderation", "prompt_embeds",
    "prompt_logprobs", "reasoning", "reasoning_effort", "repetition_detection", "session_params",
    "stop_regex", "thinking", "thinking_token_budget", "truncate_prompt_tokens",
    "truncation_side", "verbosity", "vllm_xargs", "web_search_options",
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


def check_fields(body: bytes | bytearray, request: AnyRequest, *, is_strict: bool = False) -> None:
    """Reject what a token-id engine would have to ignore: unknown fields, and fields that no engine here supports.

    Args:
        body: the request as it came.
        request: the same, read.
        is_strict: whether unknown fields are rejected even if their value asks for nothing, in messages too.

    Raises:
        ApiError: there is such a field or annotation, or a field occurs twice.
    """
    fields = _decode_fields(body)
    _check_once(body, fields)
    for name, value in fields.items():
        if name not in FIELDS[type(request)]:
            _check_neutral(name, value, is_strict=is_strict)
    if is_strict and "messages" in fields:
        _check_messages(fields["messages"])
    if not isinstance(request, Request):
        return
    for note in (request.nvext.annotations or ()) if request.nvext is not None else ():
        if note not in ANNOTATIONS and ":" not in note:
            message = f"nvext.annotations: unknown annotation {note!r}; known: {', '.join(ANNOTATIONS)}, dp_rank:N"
            raise ApiError(400, message, param="nvext")


def _check_neutral(name: str, value: msgspec.Raw, *, is_strict: bool) -> None:
    """Reject a field that we do not use, unless its value asks for nothing."""
    if name in NEUTRAL:
        if bytes(value) != b"null" and msgspec.json.decode(value) not in NEUTRAL[name]:
            raise ApiError(400, f"{name} is not supported", code="unsupported_parameter", param=name)
    elif is_strict or bytes(value) not in NOTHING:
        raise ApiError(400, f"unknown parameter: {name[:100]!r}", code="unknown_parameter", param=name[:100])


def _check_messages(messages: msgspec.Raw) -> None:
    """Reject fields of messages that no template gets."""
    for message in _decode_messages(messages):
        for name in message:
            if name not in MESSAGE_FIELDS:
                raise ApiError(
                    400, f"messages: unknown field: {name[:100]!r}", code="unknown_parameter", param="messages"
                )


def _check_once(body: bytes | bytearray, names: Collection[str]) -> None:
    """Reject a body with a duplicate name. A full walk takes longer than all other checks, so only odd bodies get one."""
    if len(names) <= FEW and b"\\u" not in body and all(body.count(b'"%b"' % name.encode()) == 1 for name in names):
        return
    seen: set[str] = set()
    for key in _decode_keys(body):
        if key.name in seen:
            raise ApiError(400, f"the request has {key.name[:100]!r} twice", param=key.name[:100])
        seen.add(key.name)


class _Key:
    """A key of an object; two keys with the same name are different keys."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


_decode_messages = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_keys = msgspec.json.Decoder(dict[_Key, msgspec.Raw], dec_hook=lambda _, name: _Key(name)).decode
