"""How vLLM's server words requests, answers and errors."""

import hashlib
from collections.abc import Callable

import msgspec
from starlette.requests import Request

from serving.frontend.answers.accepted import AcceptedRequest
from serving.frontend.answers.answer import Answer
from serving.frontend.answers.selection import answer_of
from serving.frontend.dialect import Dialect
from serving.frontend.kept_responses import ResponseTurn
from serving.frontend.prepared import Prepared
from serving.frontend.served_model import ServedModel
from serving.stand_in.config import StandInConfig
from serving.stand_in.vllm.answers.answers import VllmAnswer
from serving.stand_in.vllm.answers.errors import error_response, late, refused
from serving.stand_in.vllm.answers.parts import new_id
from serving.stand_in.vllm.answers.usage import AnswerSettings, OnSearch
from serving.stand_in.vllm.flags.arguments import version

RANK, PRIORITY, SESSION = "x-data-parallel-rank", "x-vllm-priority", "x-session-id"


def dialect_of(
    config: StandInConfig, model: ServedModel, admit: Callable[[Prepared], object], on_search: OnSearch
) -> Dialect:
    """Return how a server with these settings talks about its model.

    Args:
        config: the settings.
        model: the model.
        admit: raises an error for a request that is turned away.
        on_search: called when an answer was searched for tool calls.
    """
    names = config.served_model_names
    settings = AnswerSettings(
        fingerprint=fingerprint_of(config),
        api=config.api,
        text_of=model.text.tokenizer.text_of,
        on_search=on_search,
    )

    def answer(accepted: AcceptedRequest, turn: ResponseTurn | None) -> Answer:
        asked = accepted.prepared.options.model
        if accepted.prepared.kind in ("message", "response"):
            return answer_of(accepted, turn)
        return VllmAnswer(accepted, names[0] if asked in names else asked, settings)

    def received(request: Request, prepared: Prepared | None) -> str:
        if prepared is not None:
            admit(prepared)
        return _received(request, prepared, num_ranks=model.card.num_ranks)

    return Dialect(answer, error_response, model.text.reading, received, _headers, begins_at_once=True)


def fingerprint_of(config: StandInConfig) -> str | None:
    """Return the system_fingerprint of answers."""
    api = config.api
    match api.fingerprint_mode:
        case "none":
            return None
        case "custom":
            return api.fingerprint_value
    parts = [f"vllm-{version()}"]
    if api.fingerprint_mode == "full":
        sizes = {
            "tp": config.timing.tensor_parallel_size,
            "dp": config.ranks.size,
        }
        parts += [f"{name}{size}" for name, size in sizes.items() if size > 1]
    known = repr((config.model, config.engine, config.timing)).encode()
    return "-".join([*parts, hashlib.sha256(known).hexdigest()[:8]])


def _received(request: Request, prepared: Prepared | None, *, num_ranks: int) -> str:
    """Add what headers ask for to a request; return its id."""
    headers = request.headers
    own = ""
    if prepared is not None:
        own = prepared.vllm.request_id
        changes = {
            name: number
            for name, header in (("dp_rank", RANK), ("priority", PRIORITY))
            if (number := _number(headers.get(header))) is not None
        }
        if changes:
            prepared.vllm = msgspec.structs.replace(prepared.vllm, **changes)
        if not prepared.options.session_id and headers.get(SESSION):
            prepared.options.session_id = headers[SESSION]
        rank = prepared.vllm.dp_rank
        if rank is not None and not 0 <= rank < num_ranks:
            error = refused(f"data_parallel_rank {rank} is out of range [0, {num_ranks}).")
            raise late(error) if prepared.options.stream else error
    return headers.get("x-request-id") or own or new_id()


def _headers(accepted: AcceptedRequest) -> dict[str, str]:
    return {}


def _number(text: str | None) -> int | None:
    """Return the number that a header has; vLLM ignores what is none."""
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None
