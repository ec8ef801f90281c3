"""What a user's own engine gets and returns: requests and answers with every name that Dynamo gives them.

Our own engines read what travels (`serving.worker.protocol`), which leaves out what is absent.
"""

from functools import partial
from typing import Any

import msgspec

from serving.model.card import ModelCard
from serving.runtime.server import RequestDialect

SAMPLING = (
    "n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k",
    "min_p", "use_beam_search", "length_penalty", "seed", "include_stop_str_in_output", "guided_decoding",
)  # fmt: skip
STOP = (
    "max_tokens",
    "stop",
    "stop_token_ids",
    "stop_token_ids_hidden",
    "min_tokens",
    "ignore_eos",
    "max_thinking_tokens",
)
OUTPUT = ("logprobs", "prompt_logprobs", "skip_special_tokens", "formatted_prompt", "return_tokens_as_token_ids")
OTHERS = ("estimated_prefix_hit_num_blocks", "backend_instance_id", "router_config_override")


def dialect(card: ModelCard) -> RequestDialect:
    """Return how an engine of the user's own that serves this card's model is addressed."""
    return RequestDialect(partial(full_request, model=card.name, mdc_sum=card.checksum), without_none)


def full_request(request: Any, *, model: str, mdc_sum: str) -> dict[str, Any]:
    """Return a request in which each name that Dynamo's requests have is present: None where the client gave nothing.

    As in Dynamo, a request that ignores EOS has no tokens that end its answer. The names that only our requests have
    (`request_id`, `num_generated`, `kv_transfer_params`, ...) stay.

    Raises:
        ValidationError: it is not a request in token ids.
    """
    if not isinstance(request, dict) or "token_ids" not in request:
        raise msgspec.ValidationError("expected a dict with token_ids")
    conditions = dict.fromkeys(STOP) | (request.get("stop_conditions") or {})
    options = dict.fromkeys(SAMPLING) | (request.get("sampling_options") or {})
    ends = [] if conditions["ignore_eos"] else request.get("eos_token_ids", [])
    for name in ("stop_token_ids", "min_tokens", "ignore_eos"):  # 0, false and nothing at all mean the same
        conditions[name] = conditions[name] or None
    conditions["stop_token_ids_hidden"] = ends or None
    named = {
        "model": model,
        "token_ids": request["token_ids"],
        "stop_conditions": conditions,
        "sampling_options": options,
        "output_options": {name: options.get(name) for name in OUTPUT},
        "eos_token_ids": ends,
        "mdc_sum": mdc_sum,
        "annotations": request.get("annotations", []),
    }
    return dict.fromkeys(OTHERS) | request | named


def without_none(item: Any) -> Any:
    """Return an item of an answer without the names whose value is None, which engines written for Dynamo return."""
    if isinstance(item, dict):
        return {name: value for name, value in item.items() if value is not None}
    return item
