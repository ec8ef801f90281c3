"""From a body to a request, as vLLM reads it.

body --json--> check_raw --pydantic--> Completion, Chat      these may fail before the model is looked up
                                            |
prompt, limit <-- prepare <-- AskedCompletion, AskedChat     what everything else takes, with what vLLM's own fields ask for
"""

import json
import logging
import re
from dataclasses import asdict
from typing import Any

import msgspec
from pydantic import ValidationError

from serving.frontend.api.errors import ApiError
from serving.frontend.api.kinds import KINDS, AnyRequest, KindName
from serving.frontend.api.kinds import parse_request as parse_own
from serving.frontend.api.openai import OpenAiRequest
from serving.frontend.reading import Body, ReadingElsewhere, ReadModel
from serving.stand_in.config import ApiConfig, StandInConfig
from serving.stand_in.vllm.answers.errors import INVALID, UNREADABLE, invalid, late, refused
from serving.stand_in.vllm.requests import checks
from serving.stand_in.vllm.requests.fields import Chat, Completion, Sampling
from serving.stand_in.vllm.requests.translated import AskedChat, AskedCompletion, Asking

log = logging.getLogger(__name__)

GONE = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend", "guided_whitespace_pattern")  # fmt: skip
"""Fields that vLLM had once; it warns of them, as their answers are not constrained."""


class VllmReading:
    """See the module, and `Reading`."""

    def __init__(self, *, api: dict[str, Any], model: str, hands_over: bool) -> None:
        """Prepare to read; `api` has the fields of `ApiConfig`, and the others are as in `Asking`."""
        self._api = ApiConfig(**api)
        self._model = model
        self._asking = Asking(self._api, model, hands_over=hands_over)
        self._has_warned = False

    def parse(self, body: Body, kind: KindName) -> AnyRequest:
        """See `Reading`."""
        if kind not in ("completion", "chat"):
            return self._parse_other(body, kind)
        fields = _decoded(body)
        if not isinstance(fields, dict):
            fault = {"type": "missing", "msg": "Field required"} if fields is None else OBJECT
            raise invalid([{**fault, "loc": ("body",), "input": fields}])
        if not self._has_warned and (gone := [name for name in GONE if name in fields]):
            self._has_warned = True
            log.warning("a request has %s, which vLLM no longer heeds: its answer is not constrained", ", ".join(gone))
        is_chat = kind == "chat"
        checks.check_raw(fields, is_chat=is_chat)
        type = Chat if is_chat else Completion
        try:
            asked = type.model_validate(_renamed(fields) if is_chat else fields)
        except ValidationError as error:
            faults = [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
            raise invalid(faults) from error
        return self._asking.chat(asked) if isinstance(asked, Chat) else self._asking.completion(asked)

    def check(self, request: AnyRequest, body: Body, model: ReadModel) -> None:
        """See `Reading`."""
        if isinstance(request, AskedChat):
            self._check_chat(request.asked)
        elif isinstance(request, AskedCompletion):
            if request.stream and request.asked.use_beam_search:
                raise refused("Beam search cannot be streamed")
            if request.asked.prompt_embeds:
                raise refused("`prompt_embeds` needs `--enable-prompt-embeds`.", "prompt_embeds")
            if request.asked.suffix:
                raise refused("suffix needs a model that fills in the middle", "suffix")
            if not request.prompts():
                raise refused("There must be at least one prompt")
        if isinstance(request, AskedChat | AskedCompletion):
            self._check_simulated(request.asked)
            self._check_bias(request, model)
            self._check_media(request.asked)
            _check_handover(request.kv_transfer_params)

    def limit(self, request: OpenAiRequest, num_prompt: int, model: ReadModel, param: str) -> int:
        """See `Reading`."""
        context = model.card.context_length
        asked = request.asked if isinstance(request, AskedChat | AskedCompletion) else None
        wanted = (
            checks.limit_of(asked, self._api.sampling_defaults.get("max_tokens"))
            if asked is not None
            else request.max_tokens
        )
        name = "max_completion_tokens" if getattr(asked, "max_completion_tokens", None) is not None else "max_tokens"
        if wanted is not None and wanted > context:
            problem = f"{name}={wanted} is more than max_model_len={context}. Ask for fewer tokens."
            raise refused(problem, name, wanted)
        kept = request.vllm.truncate_prompt_tokens
        if kept is not None and kept > context:
            problem = f"truncate_prompt_tokens={kept} is more than max_model_len={context}. Keep fewer tokens."
            raise refused(problem, "truncate_prompt_tokens", kept)
        if num_prompt > context:
            # Clients recognise by this wording that a conversation is too long, and shorten it.
            least = f"at least {context + 1}" if param != "prompt" or num_prompt == context + 1 else str(num_prompt)
            problem = (
                f"This model's maximum context length is {context} tokens. However, your prompt has {least} tokens."
            )
            raise refused(problem, "input_tokens", num_prompt)
        room = context - num_prompt
        limit = room if wanted is None else min(wanted, room)
        if asked is not None:
            limit = self._check_values(request, asked, limit, num_prompt, model)
        return limit

    def _check_values(self, request: OpenAiRequest, asked: Any, limit: int, num_prompt: int, model: ReadModel) -> int:
        """Check what vLLM checks once it knows the prompt; return the number of tokens that are generated."""
        is_only_echo = request.vllm.is_only_echo
        checks.check_sampling(asked, 1 if is_only_echo else limit, 1 if asked.n is None else asked.n)
        try:
            vocabulary = model.vocab_size
            checks.check_engine(asked, request.num_logprobs, max_logprobs=self._api.max_logprobs, vocabulary=vocabulary)
            if (asked.thinking_token_budget or -1) >= 0 and not self._api.reasoning_parser:
                raise refused("thinking_token_budget needs --reasoning-parser")
            if not num_prompt:
                raise refused("The decoder prompt cannot be empty")
            if isinstance(asked, Completion) and isinstance(asked.prompt, list):
                _check_tokens(asked.prompt, vocabulary)
        except ApiError as error:
            raise late(error) if request.stream else error  # noqa: B904
        return 1 if is_only_echo else limit

    def _check_simulated(self, asked: Sampling) -> None:
        """Refuse what the mocker cannot do."""
        for name in ("use_beam_search", "logprob_token_ids"):
            if getattr(asked, name):
                raise ApiError(501, f"{name} is not simulated; expected none", param=name)

    def _check_media(self, asked: Sampling) -> None:
        for name in ("mm_processor_kwargs", "media_io_kwargs"):
            if getattr(asked, name, None):
                raise refused(f"{name} of requests are refused without --trust-request-mm-kwargs.", name)

    def _check_bias(self, request: AskedChat | AskedCompletion, model: ReadModel) -> None:
        asked = request.asked
        checks.check_bias(asked)
        try:
            checks.check_known("logit_bias", list(map(int, asked.logit_bias or ())), model.vocab_size)
        except ApiError as error:
            raise late(error) if request.stream else error  # noqa: B904

    def _check_chat(self, asked: Chat) -> None:
        checks.check_choice(
            asked, has_parser=bool(self._api.tool_call_parser), is_auto=self._api.enable_auto_tool_choice
        )
        brings = asked.chat_template is not None or "chat_template" in (asked.chat_template_kwargs or {})
        if brings and not self._api.trust_request_chat_template:
            raise refused("the request has a chat template; it is refused without --trust-request-chat-template")
        if not asked.messages:
            raise refused("the conversation is empty: there must be at least one message")
        for message in asked.messages:
            _check_parts(message.get("content"), self._model)

    def _parse_other(self, body: Body, kind: KindName) -> AnyRequest:
        """Read a request of another kind: as ours, but with vLLM's words for what is wrong."""
        _decoded(body)
        try:
            return parse_own(body, KINDS[kind].type)  # type: ignore[no-any-return]
        except ApiError as error:
            if isinstance(error.__cause__, msgspec.ValidationError) and OUT_OF_RANGE.search(error.message):
                raise refused(error.message, error.param) from error
            if isinstance(error.__cause__, msgspec.ValidationError):
                param = f"body.{error.param}" if error.param else "body"
                raise ApiError(400, f"1 validation error:\n  {error.message}", code=INVALID, param=param) from error
            raise


OUT_OF_RANGE = re.compile(r"Expected `(int|float)` [<>]")
OBJECT = {"type": "model_attributes_type", "msg": "Input should be a valid dictionary or object to extract fields from"}


def reading_of(config: StandInConfig) -> ReadingElsewhere:
    """Return how a server with these settings reads."""
    settings = {
        "api": asdict(config.api),
        "model": config.served_model_names[0],
        "hands_over": config.kv_handover is not None,
    }
    return ReadingElsewhere(f"{__name__}:VllmReading", settings)


def _decoded(body: Body) -> Any:
    """Return a body's value.

    Raises:
        ApiError: it is not JSON.
    """
    if not body:
        return None
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _decoded_slowly(body)


def _decoded_slowly(body: Body) -> Any:
    """The same as Python does it, which also says where it fails.

    Raises:
        ApiError: it is not JSON.
    """
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        fault = {"type": "json_invalid", "loc": ("body", error.pos), "msg": "JSON decode error", "input": {}}
        raise invalid([fault | {"ctx": {"error": error.msg}}]) from error
    except (ValueError, RecursionError) as error:  # no UTF-8, a number of too many digits, or too deep
        raise ApiError(400, "There was an error parsing the body", code=UNREADABLE) from error


def _renamed(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a chat with the reasoning of its messages under its present name."""
    messages = fields.get("messages")
    if isinstance(messages, list):
        for message in messages:
            if isinstance(message, dict) and (thought := message.pop("reasoning_content", None)) is not None:
                message.setdefault("reasoning", thought)
    return fields


def _check_handover(params: dict[str, Any] | None) -> None:
    """Refuse parameters that cannot travel to an engine."""
    try:
        msgspec.msgpack.encode(params)
    except OverflowError as error:
        name = "kv_transfer_params"
        raise refused(f"{name} have a whole number of more than 64 bits", name) from error


def _check_parts(content: Any, model: str) -> None:
    """Refuse parts of a message that are not text."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("image_url", "input_audio", "video_url", "audio_url", "image_embeds", "audio_embeds"):
            raise refused(f"{model} takes no {kind}: it is not a multimodal model")
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise refused(f"a part of a message is not text: {part!r:.100}")


def _check_tokens(prompt: list[Any], vocabulary: int | None) -> None:
    """Refuse tokens that the model does not have."""
    tokens = [token for each in prompt for token in (each if isinstance(each, list) else [each])]
    numbers = [token for token in tokens if isinstance(token, int)]
    if vocabulary is not None and numbers and max(numbers) >= vocabulary:
        raise refused(f"Token id {max(numbers)} is out of vocabulary")
