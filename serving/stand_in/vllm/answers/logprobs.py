"""Log-probabilities in vLLM's forms."""

from collections.abc import Callable, Sequence
from typing import Any

from serving.frontend.api.logprobs import LogprobsFormat, TokenLogprob
from serving.frontend.api.vllm_options import VllmOptions
from serving.frontend.generation.choice import Choice


def scores(
    choice: Choice, found: Sequence[TokenLogprob], tokens: Sequence[int], options: VllmOptions
) -> list[TokenLogprob]:
    """Return the log-probabilities of tokens, named as the request wants them."""
    scored = list(found) + ([choice.end_logprob] if len(found) < len(tokens) and choice.end_logprob is not None else [])
    if not options.return_tokens_as_token_ids:
        return scored
    return [each._replace(text=f"token_id:{token}") for token, each in zip(tokens, scored, strict=False)]


class Scores:
    """Log-probabilities of one choice: by token for a chat, by column for a completion, where offsets go on."""

    def __init__(self, *, is_chat: bool) -> None:
        self._is_chat = is_chat
        self._offset = 0

    def value(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the object for the next tokens of the text."""
        if self._is_chat:
            return LogprobsFormat(is_chat=True).value(tokens)
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token.text)
        return {
            "text_offset": offsets,
            "token_logprobs": [token.value for token in tokens],
            "tokens": [token.text for token in tokens],
            "top_logprobs": [
                None
                if token.value is None
                else {token.text: token.value} | {other["token"]: other["logprob"] for other in token.top or ()}
                for token in tokens
            ],
        }


def prompt_logprobs(choice: Choice, text_of: Callable[[int], str]) -> list[dict[str, Any] | None] | None:
    """Return the log-probabilities of a prompt by token id, with the rank of each; the first token has none."""
    ranks = choice.raw_prompt_logprobs
    if ranks is None:
        return None
    entries: list[dict[str, Any] | None] = []
    for token, (value, top) in zip(choice.prompt.tokens.tolist(), ranks, strict=False):
        if value is None:
            entries.append(None)
            continue
        scored = {token: value} | dict(top or ())
        order = sorted(scored, key=lambda each: -scored[each])
        entries.append(
            {
                str(each): {
                    "logprob": scored[each],
                    "rank": order.index(each) + 1,
                    "decoded_token": text_of(each),
                }
                for each in scored
            }
        )
    return entries
