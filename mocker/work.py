"""The work of a simulated engine in tokens, for planners."""

from typing import NamedTuple

from mocker.vllm.scheduler import Scheduler


class Work(NamedTuple):
    """The work to do."""

    queued_prefill_tokens: int
    """Prompt tokens that are still to be computed."""
    decode_kv_tokens: int
    """Context of the requests that are decoding."""
    queued_decode_kv_tokens: int
    """Context of the requests that wait to decode: their prompt is computed elsewhere, or they were preempted."""


def work_of(scheduler: Scheduler) -> Work:
    """Return the present work of an engine."""
    to_compute = decode_kv = queued_decode_kv = 0
    for sequence in scheduler.running:
        if sequence.decoding:
            decode_kv += scheduler.num_tokens(sequence)
        else:
            to_compute += max(sequence.num_known - sequence.num_computed, 0)
    for sequence in [*scheduler.holding, *scheduler.queued()]:
        if sequence.is_remote_prefill or sequence.is_token_shipped or sequence.num_preemptions:
            queued_decode_kv += sequence.num_known
        else:
            to_compute += max(sequence.num_known - sequence.num_computed, 0)
    return Work(to_compute, decode_kv, queued_decode_kv)
