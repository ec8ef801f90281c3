"""The log of requests in virtual time: when and where everything happened to them."""

import math
from collections.abc import Callable, Sequence
from typing import Final

from dynabench.virtual.rank import Rank
from dynabench.virtual.tiers import SourceColumns
from mocker import Sequence as EngineSequence
from mocker.timing.choose import SimulatedEngine
from reports.record.records import RequestLog
from serving.life.flight import Flight
from serving.router import Router, RoutingDecision

REQUESTS_PER_TIDY: Final = 1 << 14
"""Requests that end between two times to tidy up."""


class Stamps:
    """Writes what happens to requests into their log."""

    def __init__(
        self,
        log: RequestLog,
        engines: Sequence[SimulatedEngine],
        *,
        is_apart: bool,
        block_size: int,
        answer_s: float,
        tidy: Callable[[], object],
    ) -> None:
        self.log = log
        self._tidy = tidy  # called now and then
        self.answer_s = answer_s
        """Time from the end of a step to the client (s)."""
        self._sources = SourceColumns(engines, log)
        self._is_apart = is_apart
        self._block_size = block_size

    def placed(self, number: int, decision: RoutingDecision, router: Router) -> None:
        """Record what a router knew when it placed a request."""
        log = self.log
        log.predicted_tokens[number] = decision.overlap_blocks * self._block_size
        if decision.best_blocks is not None:
            log.best_tokens[number] = decision.best_blocks * self._block_size
        log.queue_depth[number] = router.load(decision.slot).num_requests - 1

    def second_token(self, number: int, time: float) -> None:
        """Record when a request had its second token, unless that is known."""
        if math.isnan(self.log.second_token_s[number]):
            self.log.second_token_s[number] = time

    def left(self, flight: Flight, sequence: EngineSequence, time: float) -> None:
        """Record a part of an answer whose rank the request leaves; what the rank was to generate later does not count."""
        if self.log.second_token_s[flight.number] > time:
            self.log.second_token_s[flight.number] = math.nan
        if sequence.first_token_s >= 0 and math.isnan(self.log.admitted_s[flight.number]):
            self._prompt_computed(flight.number, _computed(flight, sequence))

    def ended(self, flight: Flight, sequence: EngineSequence, rank: Rank, end: float) -> None:
        """Record an answer that is complete, or that has broken off; if several ranks generated it, as if one had."""
        log, number, generated = self.log, flight.number, flight.generated
        if number % REQUESTS_PER_TIDY == 0:
            self._tidy()
        log.worker[number] = rank.number
        log.finish_reason[number] = sequence.finish_reason
        log.preemptions[number] = sequence.num_preemptions
        computed = sequence if flight.prefill is None else _computed(flight, sequence)
        if computed is not sequence:
            log.preemptions[number] += computed.num_preemptions
        if generated is None:
            self._prompt_computed(number, computed)
        elif sequence.is_token_shipped and sequence.first_scheduled_s < 0:  # its last token came with its KV
            rank.engine.add_gap(generated.last_token_s, end)
        if not sequence.is_failed:  # the token that came with the KV may be all that was requested
            first_s = sequence.first_token_s if sequence.first_token_s >= 0 else end
            log.first_token_s[number] = first_s + self.answer_s
        if self._is_apart:
            log.decode_start_s[number] = sequence.first_scheduled_s
        log.last_token_s[number] = end + self.answer_s
        log.second_token_s[number] += self.answer_s

    def _prompt_computed(self, number: int, computed: EngineSequence) -> None:
        """Record how the prompt was computed; where an answer continues, it is computed again, which does not count."""
        self.log.cached_tokens[number] = computed.cached_tokens
        self.log.admitted_s[number] = computed.first_scheduled_s
        self._sources.note(number, computed)


def _computed(flight: Flight, sequence: EngineSequence) -> EngineSequence:
    """Return the sequence that computed a prompt: the one that answers, unless a prefill rank did."""
    prefill = flight.prefill
    return prefill.call if prefill is not None and isinstance(prefill.call, EngineSequence) else sequence
