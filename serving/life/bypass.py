"""Conditional disaggregation: when a decode worker computes a prompt itself."""

from serving.life.config import DisaggregationConfig


def is_short(num_tokens: int, num_cached: int, config: DisaggregationConfig) -> bool:
    """Return whether little of a prompt is left to compute after what the decode worker has cached (isl_bounding)."""
    missing = num_tokens - num_cached
    return missing < config.bypass_max_tokens and missing < config.bypass_max_ratio * num_tokens


def bypasses(
    config: DisaggregationConfig,
    *,
    num_tokens: int,
    num_cached: int,
    prefill_tokens: int,
    decode_usage: float | None = None,
) -> bool:
    """Decide whether a request stays with its decode worker, as NVIDIA Dynamo's `--router-conditional-disagg` does.

    Args:
        config: the policy.
        num_tokens: tokens of the prompt.
        num_cached: tokens that the best decode worker has cached.
        prefill_tokens: tokens that the best prefill worker still has to compute, without this request.
        decode_usage: share of that decode worker's blocks in use, with this request (None: unknown, so busy).
    """
    policy = config.conditional_disagg
    if policy == "never":
        return False
    if config.decode_guard is not None and (decode_usage is None or decode_usage > config.decode_guard):
        return False
    is_busy = prefill_tokens > config.prefill_busy_tokens
    short = is_short(num_tokens, num_cached, config)
    return {"isl_bounding": short, "prefill_load": is_busy, "isl_or_load": short or is_busy}[policy]
