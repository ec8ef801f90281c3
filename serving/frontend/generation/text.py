"""A choice's tokens as text: detokenized, ended by a limit, a token or a stop string, and escaped for JSON."""

from collections.abc import Collection

from serving.frontend.api.sse import escape
from serving.frontend.generation.stops import StopMatcher
from serving.model.detokenizer import Detokenizer


class ChoiceText:
    """The text of one choice; it has ended once `finish_reason` is set."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stops: list[str] | None = None,
        end_token_ids: Collection[int] = (),
        min_tokens: int = 0,
        max_tokens: int | None = None,
        shows_stop: bool = False,
    ) -> None:
        """Prepare for the first tokens.

        Args:
            detokenizer: turns them into text.
            stops: texts that end it.
            end_token_ids: tokens that end it, which have no text.
            min_tokens: how many tokens there are before that may happen.
            max_tokens: how many there may be.
            shows_stop: whether what ends it is part of it.
        """
        self.finish_reason = ""
        self.num_tokens = 0
        """Tokens so far, including the one that ends the answer, which has no text."""
        self._detokenizer = detokenizer
        self.stop_token: int | None = None
        """The token that ended it, if one did."""
        self._shows_stop = shows_stop
        self._matcher = StopMatcher(stops, shows_stop=shows_stop) if stops else None
        self._end_token_ids = frozenset(end_token_ids)
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens

    def push(self, tokens: list[int], finish_reason: str = "") -> list[bytes]:
        """Return the text of each token. With a finish reason these are the last tokens, and text held back is added."""
        self.finish_reason = finish_reason
        if self._max_tokens is not None and self.num_tokens + len(tokens) >= self._max_tokens:
            tokens = tokens[: self._max_tokens - self.num_tokens]
            self.finish_reason = finish_reason or "length"
        shown = tokens
        if self._end_token_ids and not self._end_token_ids.isdisjoint(tokens):
            shown = self._before_end(tokens)
        pieces = self._detokenizer.escaped(shown) if self._matcher is None else None
        if pieces is None:
            pieces = self._finish(self._match(self._detokenizer.texts(shown)))
        else:
            self.num_tokens += len(shown)
        if self.stop_token is not None and not self._shows_stop and not self._has_matched:
            self.num_tokens += 1
        return pieces

    def push_texts(self, texts: list[str], finish_reason: str = "") -> list[bytes]:
        """The same for an engine that returns text; each piece counts as a token."""
        self.finish_reason = finish_reason
        return self._finish(self._match(texts))

    def _before_end(self, tokens: list[int]) -> list[int]:
        """Cut tokens at the first that ends the answer, if the minimum number of tokens is reached by then."""
        for index, token in enumerate(tokens):
            if token in self._end_token_ids and self.num_tokens + index >= self._min_tokens:
                self.finish_reason, self.stop_token = "stop", token
                return tokens[: index + 1] if self._shows_stop else tokens[:index]
        return tokens

    @property
    def stop(self) -> str | None:
        """The stop string that ended it, if one did."""
        return self._matcher.matched if self._matcher is not None and self._matcher.has_stopped else None

    @property
    def _has_matched(self) -> bool:
        return self._matcher is not None and self._matcher.has_stopped

    def _match(self, texts: list[str]) -> list[str]:
        """Let texts through up to a stop string; the piece that ends it is the last."""
        if self._matcher is None:
            return texts
        passed: list[str] = []
        for text in texts:
            may_stop = self.num_tokens + len(passed) >= self._min_tokens
            passed.append(self._matcher.push(text, may_stop=may_stop))
            if self._has_matched:
                self.finish_reason = "stop"
                break
        return passed

    def _finish(self, texts: list[str]) -> list[bytes]:
        """Count pieces and return them escaped, at the end with the text held back."""
        self.num_tokens += len(texts)
        rest = self._held_back() if self.finish_reason else ""
        if rest:
            texts = [*texts[:-1], texts[-1] + rest] if texts else [rest]
        return list(map(escape, texts))

    def _held_back(self) -> str:
        rest = self._detokenizer.flush()
        return rest if self._matcher is None else self._matcher.push(rest) + self._matcher.flush()
