"""A planner's view of requests in virtual time: sums since the start, as a real frontend keeps them."""

from dynabench.virtual.rank import number_of
from mocker import Sequence, StepOutput
from reports.record.records import RequestLog
from serving.planner import Counts
from workloads.columns import RequestColumns


class Counter:
    """Counts requests when they arrive, get their first token, and end."""

    def __init__(self) -> None:
        self._num_arrived = self._num_first_tokens = self._num_ended = self._num_gaps = 0
        self._prompt_tokens = self._ended_prompt_tokens = self._cached_tokens = self._output_tokens = 0
        self._ttft_s = self._e2e_s = self._gaps_s = 0.0
        self._shipped = set[int]()  # requests in progress whose first token came with the KV, and is counted

    def on_arrival(self, isl: int) -> None:
        """Count a request that has arrived."""
        self._num_arrived += 1
        self._prompt_tokens += isl

    def on_output(self, output: StepOutput, log: RequestLog, requests: RequestColumns) -> None:
        """Count the answers that began or ended with a step, once they are in the log."""
        for sequence in output.sampled:
            if sequence.is_token_shipped:
                self._on_shipped(sequence, output.end, log)
            elif sequence.first_token_s == output.end:
                self._on_first_token(sequence, output.end, log)
        for sequence in output.finished:
            if sequence.is_failed:
                self._shipped.discard(number_of(sequence))
                continue
            if sequence.is_token_shipped:
                self._on_shipped(sequence, output.end, log)
                self._shipped.discard(number_of(sequence))
            self._on_end(number_of(sequence), output.end, log, requests)

    def _on_first_token(self, sequence: Sequence, time: float, log: RequestLog) -> None:
        self._num_first_tokens += 1
        self._ttft_s += time - log.intended_s[number_of(sequence)]

    def _on_shipped(self, sequence: Sequence, now: float, log: RequestLog) -> None:
        """Count a first token that came with the KV, once: when the next is sampled, or now if it was the only one."""
        number = number_of(sequence)
        if number not in self._shipped:
            self._shipped.add(number)
            self._on_first_token(sequence, sequence.first_token_s if sequence.first_token_s >= 0 else now, log)

    def _on_end(self, number: int, end_s: float, log: RequestLog, requests: RequestColumns) -> None:
        prompt_tokens, output_tokens = requests.lengths(number)
        self._num_ended += 1
        self._ended_prompt_tokens += prompt_tokens
        self._output_tokens += output_tokens
        self._cached_tokens += log.cached_tokens[number]
        self._e2e_s += end_s - log.intended_s[number]
        self._num_gaps += output_tokens - 1
        self._gaps_s += log.last_token_s[number] - log.first_token_s[number]

    @property
    def counts(self) -> Counts:
        """The counts so far."""
        return Counts(
            num_arrived=self._num_arrived,
            prompt_tokens=self._prompt_tokens,
            num_ended=self._num_ended,
            output_tokens=self._output_tokens,
            ended_prompt_tokens=self._ended_prompt_tokens,
            cached_tokens=self._cached_tokens,
            num_first_tokens=self._num_first_tokens,
            ttft_s=self._ttft_s,
            num_gaps=self._num_gaps,
            gaps_s=self._gaps_s,
            num_durations=self._num_ended,
            e2e_s=self._e2e_s,
        )
