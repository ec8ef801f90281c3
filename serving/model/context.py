"""The length of a model's context, and whether a request fits into it, as vLLM 0.32 decides it."""

BYTES_CONTEXT = 131_072
"""Context length of a model without a config.json."""


def refusal(context: int, num_prompt: int, max_tokens: int | None) -> str | None:
    """Return why a request is refused; None if it is answered.

    A prompt must leave room for one token, and no answer may be longer than the whole context. An answer for which the
    prompt leaves too little room is cut, not refused.
    """
    if num_prompt < context and (max_tokens or 1) <= context:
        return None
    wanted = f"{num_prompt} prompt tokens" + (f" and max_tokens of {max_tokens}" if max_tokens else "")
    return f"this model's maximum context length is {context} tokens; the request has {wanted}"
