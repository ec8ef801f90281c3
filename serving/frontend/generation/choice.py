"""One choice of an answer: its attempts produce tokens, its text turns them into pieces."""

from typing import Any

from xxhash import xxh3_128_hexdigest

from serving.frontend.api.errors import ApiError
from serving.frontend.api.logprobs import TokenLogprob, TokenNames, name_tokens
from serving.frontend.api.sse import unescape
from serving.frontend.generation.attempt import Attempts
from serving.frontend.generation.call import ChoiceRequest
from serving.frontend.generation.output import Output
from serving.frontend.generation.text import ChoiceText
from serving.frontend.prepared import PreparedPrompt


class Choice:
    """Read `pieces` until `finish_reason` is set; `close` it then, and on any other way out."""

    def __init__(self, attempts: Attempts, text: ChoiceText, request: ChoiceRequest, names: TokenNames) -> None:
        self.finish_reason = ""
        self.num_prompt = len(request.prompt.tokens)
        self.block_size = request.prompt.block_size
        self.num_cached = 0
        self.tier_tokens: dict[str, int] = {}
        """Cached tokens that came from beyond the GPU, by tier, if the engine reports it."""
        self.num_before = 0
        """Tokens of the answer before the last pieces."""
        self.steps: tuple[tuple[int, int], ...] = ()
        """Places (from, to) of the last pieces that belong together, because a step of the engine made their tokens."""
        self.logprobs: list[TokenLogprob] = []
        """Of the last pieces, if requested."""
        self.prompt_logprobs: list[TokenLogprob] | None = None
        """Of the prompt, if requested, once the first pieces have arrived."""
        self.end_logprob: TokenLogprob | None = None
        """Of the token that ended the answer, which has no text, if requested."""
        self.tokens: list[int] = []
        """Of the last pieces, and the one that ended the answer."""
        self.raw_prompt_logprobs: list[tuple[float | None, list[Any] | None]] | None = None
        """Log-probabilities of the prompt as the engine sends them, by token ids."""
        self.kv_transfer_params: dict[str, Any] | None = None
        """Where the prompt's KV is, for a client that directs disaggregated requests itself."""
        self.attempts = attempts
        self._text = text
        self._request = request
        self._names = names
        self._num_counted: int | None = None
        self._has_logprobs = not request.sampling.keys().isdisjoint(("logprobs", "prompt_logprobs"))

    @property
    def num_completion(self) -> int:
        """Tokens of the answer. If an engine returns text, its own count is better than the number of pieces."""
        return self._text.num_tokens if self._num_counted is None else self._num_counted

    @property
    def stop(self) -> str | None:
        """The stop string that ended it, if one did."""
        return self._text.stop

    @property
    def stop_token(self) -> int | None:
        """The token that ended it, if one did."""
        return self._text.stop_token

    @property
    def eos_token(self) -> int | None:
        """The model's own token that ends answers."""
        return next(iter(self._request.eos_token_ids), None)

    @property
    def prompt(self) -> PreparedPrompt:
        """What it answers."""
        return self._request.prompt

    @property
    def fingerprint(self) -> str:
        """Return a hash that differs between prompts, seeds and choices, and is the same when the request is repeated.

        Ids made of it are unique in a conversation, in which each prompt is longer than the one before.
        """
        seed, place = (self._request.sampling.get(name, 0) for name in ("seed", "choice"))
        return xxh3_128_hexdigest(self._request.prompt.tokens.tobytes() + b"%d %d" % (seed, place))

    @property
    def num_overlap_tokens(self) -> int:
        """Prompt tokens that the router expected in the cache of the worker that computes the prompt."""
        return self.attempts.prompt_placement.overlap_blocks * self.block_size

    async def pieces(self) -> list[bytes]:
        """Wait for output and return the text of each new token, escaped for JSON.

        Raises:
            ApiError: the request failed.
        """
        output = await self.attempts.take()
        self.num_before = self.num_completion
        if output.num_cached is not None:
            self.num_cached = min(output.num_cached, self.num_prompt)
        if output.tier_tokens is not None:
            self.tier_tokens = {name: min(count, self.num_cached) for name, count in output.tier_tokens.items()}
        if output.num_completion is not None:
            self._num_counted = output.num_completion
        if output.texts:
            pieces, self.steps = self._text.push_texts(output.texts, output.finish_reason), ()
        else:
            pieces, self.steps = self._text.push(output.tokens, output.finish_reason), output.steps
        self.tokens = output.tokens[: self.num_completion - self.num_before]
        self.finish_reason = self._text.finish_reason
        self.kv_transfer_params = output.kv_transfer_params or self.kv_transfer_params
        if self._has_logprobs:
            self._read_logprobs(output, pieces)
        return pieces

    def events(self, num_pieces: int) -> list[tuple[int, int]]:
        """Return from where to where the last pieces share an event: those of a step do, even if it was cut by a stop."""
        if len(self.steps) == 1 and self.steps[0][0] == 0 and 0 < num_pieces <= self.steps[0][1]:
            return [(0, num_pieces)]  # as mostly
        found, at = list[tuple[int, int]](), 0
        for start, end in self.steps:
            found += [(place, place + 1) for place in range(at, min(start, num_pieces))]
            at = min(end, num_pieces)
            if start < at:
                found.append((start, at))
        return found + [(place, place + 1) for place in range(at, num_pieces)]

    def close(self) -> None:
        """Release the bookings, and cancel the calls still in progress."""
        self.attempts.close(has_stopped=bool(self.finish_reason))

    def _read_logprobs(self, output: Output, pieces: list[bytes]) -> None:
        """Add the tokens' texts to the requested log-probabilities.

        Raises:
            ApiError: tokens arrived without them.
        """
        wanted = self._request.sampling
        if output.prompt_logprobs is not None and self.prompt_logprobs is None:
            self.raw_prompt_logprobs = output.prompt_logprobs
            texts = map(self._names.text_of, self._request.prompt.tokens.tolist())
            self.prompt_logprobs = [
                TokenLogprob(text, value, name_tokens(top, self._names))
                for text, (value, top) in zip(texts, output.prompt_logprobs, strict=False)
            ]
        is_missing = ("logprobs" in wanted and not output.logprobs) or (
            "prompt_logprobs" in wanted and self.prompt_logprobs is None
        )
        if output.tokens and is_missing:
            raise ApiError(400, "this model's engine does not return these log-probabilities", param="logprobs")
        self.logprobs = [
            TokenLogprob(unescape(piece), value, name_tokens(top, self._names))
            for piece, (value, top) in zip(pieces, output.logprobs, strict=False)
        ]
        if len(pieces) < len(self.tokens) <= len(output.logprobs):
            value, top = output.logprobs[len(self.tokens) - 1]
            text = self._names.text_of(self.tokens[-1])
            self.end_logprob = TokenLogprob(text, value, name_tokens(top, self._names))
