"""Trimming: a step whose prompts were found in the cache to a lesser extent than expected has too many tokens.

A prompt of whole blocks, all cached, is expected to cost nothing, but its last token has to be computed, and with it the block
that it is in. So chunks are cut, from the last on. The rule is TensorRT-LLM's `fit_token_budget`, decided by recordings.
"""

from mocker.trtllm.request import Request


def trim(contexts: list[Request], excess: int, size: int) -> dict[Request, int]:
    """Cut chunks at block boundaries until `excess` tokens are saved; return the chunks that were cut, as they were."""
    before = {}
    for request in reversed(contexts):
        if excess <= 0:
            break
        end = request.position + request.chunk - excess
        chunk = max(end - end % size - request.position, size)
        if chunk < request.chunk:
            before[request] = request.chunk
            excess -= request.chunk - chunk
            request.chunk = chunk
    return before
