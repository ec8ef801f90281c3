"""Speculative decoding, as vLLM's `--speculative-config` describes it."""

from collections.abc import Mapping
from typing import Any

from mocker.vllm.config import SPECULATIVE_METHODS

KNOWN = ("method", "num_speculative_tokens", "model", "draft_tensor_parallel_size", "max_model_len", "revision")
SYNTHETIC = ("rejection_sample_method", "synthetic_acceptance_length", "synthetic_acceptance_rates")


def speculation_of(given: Mapping[str, Any], *, predicts: bool) -> dict[str, Any]:
    """Return the engine's settings of speculation.

    Nothing here accepts or rejects drafts, so vLLM's own synthetic acceptance has to be asked for. Without a GPU whose
    times are predicted, drafting takes no time.

    Raises:
        ValueError: it is not said how many drafts there are or are accepted, or what drafts is not simulated.
    """
    config = given.get("speculative_config")
    if config is None:
        return {}
    if not isinstance(config, dict):
        raise ValueError(f"--speculative-config {config!r}: expected an object")
    if unknown := [name for name in config if name not in (*KNOWN, *SYNTHETIC)]:
        raise ValueError(f"--speculative-config.{unknown[0]}: it is not simulated; leave it out")
    method, count = config.get("method"), config.get("num_speculative_tokens")
    if method not in SPECULATIVE_METHODS:
        raise ValueError(f"--speculative-config.method {method}: expected one of {', '.join(SPECULATIVE_METHODS)}")
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"--speculative-config.num_speculative_tokens {count}: expected a number of drafts")
    found = {"num_speculative_tokens": count, "speculative_method": method, "acceptance_rates": _rates(config, count)}
    if method == "draft_model":
        found["draft_model"] = config.get("model")
    return found if predicts else found | {"drafting_ms": 0.0}


def _rates(config: Mapping[str, Any], count: int) -> str:
    """Return the rates by position: those that are given or, for a mean length, those that vary least, as vLLM does."""
    length, rates = config.get("synthetic_acceptance_length"), config.get("synthetic_acceptance_rates")
    if config.get("rejection_sample_method") != "synthetic" or (length is None) == (rates is None):
        raise ValueError(
            '--speculative-config: how many drafts are accepted is not known here; expected "rejection_sample_method": '
            '"synthetic" in it, with "synthetic_acceptance_length" or "synthetic_acceptance_rates"'
        )
    if length is not None:
        if not isinstance(length, (int, float)) or not 1 <= length <= count + 1:
            raise ValueError(f"--speculative-config.synthetic_acceptance_length {length}: expected 1 to {count + 1}")
        rates = [min(max(length - 1 - place, 0.0), 1.0) for place in range(count)]
    elif (
        not isinstance(rates, list) or len(rates) != count or not all(isinstance(rate, (int, float)) for rate in rates)
    ):
        raise ValueError(f"--speculative-config.synthetic_acceptance_rates: expected {count} rates, not {rates!r}")
    return ",".join([repr(float(rate)) for rate in rates])
