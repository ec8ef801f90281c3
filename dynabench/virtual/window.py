"""The traffic that a planner sees in virtual time: sums over the requests since it last looked."""

from collections.abc import Sequence

from mocker import Sequence as EngineSequence
from mocker import StepOutput
from reports.records import RequestLog
from serving.planner import Traffic
from workloads import Request


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

    def on_output(self, output: StepOutput, log: RequestLog, requests: Sequence[Request]) -> None:
        """Take note of the answers that began or ended with a step, once they are in the log."""
        for sequence in output.sampled:
            if sequence.first_token_s == output.end:
                self._first_tokens += 1
                self._ttft_s += output.end - log.intended_s[_number(sequence)]
        for sequence in output.finished:
            if not sequence.is_failed:
                self._on_end(_number(sequence), output.end, log, requests)

    def _on_end(self, number: int, end_s: float, log: RequestLog, requests: Sequence[Request]) -> None:
        request = requests[number]
        self._num_ended += 1
        self._prompt_tokens_ended += request.input_length
        self._output_tokens += request.output_length
        self._cached_tokens += log.cached_tokens[number]
        self._e2e_s += end_s - log.intended_s[number]
        self._num_gaps += request.output_length - 1
        self._gap_s += log.last_token_s[number] - log.first_token_s[number]

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


def _number(sequence: EngineSequence) -> int:
    assert isinstance(sequence.id, int)
    return sequence.id
