"""TensorRT-LLM as a prefill or decode worker: what the context side passes to the generation side, as plain data.

prefill worker (context_only)               decode worker (generation_only)
computes the prompt and token 1
answers kv_transfer_params  --- frontend ---> its cache transceiver asks the other's for the KV
                                            sends token 1, and the rest
"""

import base64
import dataclasses
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from foundation.settings import Whole
from serving.engines.side_channel import Name
from serving.model.card import Role
from serving.runtime.messages import CallError
from serving.runtime.world import world

TRANSCEIVER = "cache_transceiver_config"
FIRST_GLOBAL_ID = 1 << 42
"""TensorRT-LLM's own request ids are below this, those that two workers share are above."""

LogProbability = tuple[Whole, float, Whole | None]
"""A token, its log-probability and its rank."""


class ContextPhase(msgspec.Struct, kw_only=True):
    """The content of `DisaggregatedParams` after the context phase; opaque parts travel in base64."""

    first_gen_tokens: Annotated[list[Whole], Meta(min_length=1, max_length=64)]
    first_gen_log_probs: list[list[LogProbability]] | None = None
    ctx_request_id: Whole | None = None
    disagg_request_id: Whole | None = None
    encoded_opaque_state: str | None = None
    draft_tokens: list[Whole] | None = None
    ctx_dp_rank: Whole | None = None
    ctx_info_endpoint: Name | None = None


PLAIN = ("ctx_request_id", "disagg_request_id", "draft_tokens", "ctx_dp_rank", "ctx_info_endpoint")
"""Fields that are the same in both; older versions lack some."""


def role_arguments(role: Role) -> dict[str, Any]:
    """Return the TensorRT-LLM arguments for a role."""
    match role:
        case "aggregated":
            return {}
        case "prefill":  # there is no next step that the scheduler could prepare in the meantime
            return {TRANSCEIVER: {"backend": "DEFAULT"}, "disable_overlap_scheduler": True}
        case "decode":
            return {TRANSCEIVER: {"backend": "DEFAULT"}}


def context_only(package: Any) -> Any:
    """Return the `DisaggregatedParams` for a request to a prefill worker."""
    id = world().entropy.randrange(2**63 - FIRST_GLOBAL_ID) + FIRST_GLOBAL_ID
    return _made(package, {"request_type": "context_only", "disagg_request_id": id})


def hand_off(params: Any) -> dict[str, Any]:
    """Return a prefill worker's answer, made from the `DisaggregatedParams` that it got.

    Raises:
        CallError: it got none.
    """
    if params is None or not params.first_gen_tokens:
        raise CallError("TensorRT-LLM does not say where the KV of the prompt is", "engine")
    phase: dict[str, Any] = {name: getattr(params, name, None) for name in PLAIN}
    phase["first_gen_tokens"] = list(params.first_gen_tokens)
    if found := getattr(params, "first_gen_log_probs", None):
        phase["first_gen_log_probs"] = [
            [(token, each.logprob, each.rank) for token, each in place.items()] for place in found
        ]
    if params.opaque_state is not None:
        phase["encoded_opaque_state"] = base64.b64encode(params.opaque_state).decode()
    told = {name: value for name, value in phase.items() if value is not None}
    return told | {"do_remote_prefill": True, "do_remote_decode": False}


def generation_only(package: Any, params: dict[str, Any]) -> Any:
    """Return the `DisaggregatedParams` for a request to a decode worker.

    Raises:
        CallError: the parameters are not a prefill worker's answer.
    """
    try:
        phase = msgspec.convert(params, ContextPhase)
        state = None
        if phase.encoded_opaque_state is not None:
            state = base64.b64decode(phase.encoded_opaque_state, validate=True)
    except ValueError as error:  # invalid base64, or text that cannot be base64
        raise CallError(f"kv_transfer_params: {error}", "invalid") from error
    given = {name: getattr(phase, name) for name in PLAIN}
    if phase.first_gen_log_probs is not None:
        make = package.executor.result.Logprob
        places = [{token: make(value, rank) for token, value, rank in place} for place in phase.first_gen_log_probs]
        given["first_gen_log_probs"] = places
    given |= {"first_gen_tokens": phase.first_gen_tokens, "opaque_state": state, "request_type": "generation_only"}
    return _made(package, given)


def _made(package: Any, values: dict[str, Any]) -> Any:
    """Make `DisaggregatedParams` from the fields that this version of the package has."""
    make = package.llmapi.DisaggregatedParams
    known = {field.name for field in dataclasses.fields(make)}
    return make(**{name: value for name, value in values.items() if name in known})
