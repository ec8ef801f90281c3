"""The traffic that a planner sees in virtual time: sums over the requests since it last looked."""

from serving.planner import Traffic


class Window:
    """Sums over the requests since the last look."""

    __slots__ = (
        "_cached_tokens",
        "_e2e_s",
        "_first_tokens",
        "_gap_s",
        "_num_arrived",
        "_num_ended",
        "_num_gaps",
        "_output_tokens",
        "_prompt_tokens",
        "_prompt_tokens_ended",
        "_ttft_s",
    )

    def __init__(self) -> None:
        self._num_arrived = self._first_tokens = self._num_ended = 0
        self._prompt_tokens = self._prompt_tokens_ended = self._cached_tokens = self._output_tokens = self._num_gaps = 0
        self._ttft_s = self._e2e_s = self._gap_s = 0.0

    def on_arrival(self, isl: int) -> None:
        """Take note of a request that has come."""
        self._num_arrived += 1
        self._prompt_tokens += isl

    def on_first_token(self, ttft_s: float) -> None:
        """Take note of an answer that has begun."""
        self._first_tokens += 1
        self._ttft_s += ttft_s

    def on_end(self, *, isl: int, osl: int, cached_tokens: int, e2e_s: float, decode_s: float) -> None:
        """Take note of an answer that has ended, `decode_s` after its first token."""
        self._num_ended += 1
        self._prompt_tokens_ended += isl
        self._output_tokens += osl
        self._cached_tokens += cached_tokens
        self._e2e_s += e2e_s
        self._num_gaps += osl - 1
        self._gap_s += decode_s

    def take(self, duration_s: float) -> Traffic:
        """Return the traffic since the last call, `duration_s` ago, and begin again."""
        traffic = Traffic(
            duration_s=duration_s,
            num_requests=self._num_arrived,
            isl=_mean(self._prompt_tokens, self._num_arrived),
            osl=_mean(self._output_tokens, self._num_ended),
            hit_share=_mean(self._cached_tokens, self._prompt_tokens_ended),
            ttft_s=_mean(self._ttft_s, self._first_tokens),
            itl_s=_mean(self._gap_s, self._num_gaps),
            e2e_s=_mean(self._e2e_s, self._num_ended),
        )
        self.__init__()  # type: ignore[misc]
        return traffic


def _mean(total: float, count: int) -> float | None:
    return total / count if count else None
