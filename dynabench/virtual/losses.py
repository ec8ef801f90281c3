"""Requests whose rank is gone: the tokens of their answer become part of their prompt, and another rank goes on.

A request's life (`serving.life`) decides how often it may do that, and how long it waits while there is no worker. It is the
same on the wall clock.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from dynabench.virtual.clock import ARRIVAL, Clock
from dynabench.virtual.rank import Rank, number_of
from mocker import Sequence
from mocker.step import StepLog
from reports.records import RequestLog
from serving.life import DisaggregationConfig, Life, PlaceAgain, Refused


class Generated(NamedTuple):
    """The part of an answer that has been given."""

    num_tokens: int
    first_token_s: float
    """When its first token came."""
    last_token_s: float
    admitted_s: float
    """When the request was first scheduled."""
    cached_tokens: int
    """Of its prompt, at that time."""


class Losses:
    """What has become of requests that have lost their rank."""

    def __init__(
        self,
        clock: Clock,
        limit: int,
        config: DisaggregationConfig,
        *,
        dispatch: Callable[[int], object],
        fail: Callable[[int, str], object],
    ) -> None:
        """Begin without any.

        Args:
            clock: the time.
            limit: how often a request may lose its rank before it fails.
            config: how requests are spread over prefill and decode workers.
            dispatch: sends a request on its way again.
            fail: ends a request, with a message.
        """
        self.generated: dict[int, Generated] = {}
        """Of requests that had begun."""
        self.num_lost = 0
        """Times that a request lost its rank."""
        self._lives: dict[int, Life] = {}
        self._waiting: dict[int, None] = {}  # for a worker, in order
        self._clock = clock
        self._limit = limit
        self._config = config
        self._dispatch = dispatch
        self._fail = fail

    def note(self, sequence: Sequence, rank: Rank) -> None:
        """Note which tokens of an answer a rank has given, before the request goes on elsewhere."""
        engine, number = rank.engine, number_of(sequence)
        before = self.generated.get(number)
        num_new = engine.num_known_tokens(sequence) - sequence.num_prompt
        if num_new <= 0 or sequence.first_token_s < 0:
            return
        last_s = sequence.waited_since_s if sequence.waited_since_s >= 0 else engine.known_until_s
        admitted_s = before.admitted_s if before else sequence.first_scheduled_s
        cached_tokens = before.cached_tokens if before else sequence.cached_tokens
        num_generated = num_new + (before.num_tokens if before else 0)
        self.generated[number] = Generated(num_generated, sequence.first_token_s, last_s, admitted_s, cached_tokens)

    def num_generated(self, number: int) -> int:
        """Return how many tokens of a request's answer were given by ranks that are gone."""
        given = self.generated.get(number)
        return 0 if given is None else given.num_tokens

    def go_on(self, sequence: Sequence) -> None:
        """Let a sequence continue an answer: its first token came before, and it has waited since the last one."""
        given = self.generated[number_of(sequence)]
        sequence.first_token_s, sequence.waited_since_s = given.first_token_s, given.last_token_s

    def amend(self, sequence: Sequence, end: float, log: RequestLog, gaps: StepLog) -> None:
        """Correct the log of a request that has ended: if several ranks gave its answer, log it as if one had."""
        number = number_of(sequence)
        if (given := self.generated.get(number)) is not None:
            log.admitted_s[number] = given.admitted_s
            log.cached_tokens[number] = given.cached_tokens
            if sequence.is_token_shipped and sequence.first_scheduled_s < 0:  # its last token came with its KV
                gaps.add_gap(end - given.last_token_s)

    def life(self, number: int) -> Life:
        """Return the life of a request: what it may still do."""
        return self._lives.get(number) or Life(self._limit, config=self._config)

    def on_lost(self, sequence: Sequence, rank: Rank, life: Life | None = None) -> None:
        """Let a request whose rank is gone go on elsewhere, if it may."""
        self.note(sequence, rank)
        self.on_kv_lost(number_of(sequence), rank, life)

    def on_kv_lost(self, number: int, rank: Rank, life: Life | None = None) -> None:
        """Let a request that has lost its KV, or its rank, go on elsewhere, if it may."""
        self.num_lost += 1
        self._follow(number, "its worker is gone", "lost", rank.number, life)

    def on_nobody(self, number: int, message: str, life: Life | None = None) -> None:
        """Let a request wait that no rank can take, if it may."""
        self._follow(number, message, "unavailable", -1, life)

    def dispatch_again(self, number: int) -> None:
        """Send a request on its way again, at this instant."""
        self._clock.at(self._clock.now, ARRIVAL, partial(self._dispatch, number))

    def on_worker(self) -> None:
        """Dispatch the requests that wait for a worker, as there is one."""
        waiting, self._waiting = self._waiting, {}
        for number in waiting:
            self.dispatch_again(number)

    def _stop_waiting(self, number: int, message: str) -> None:
        if number in self._waiting:
            del self._waiting[number]
            self._fail(number, message)

    def _follow(self, number: int, message: str, kind: str, slot: int, life: Life | None) -> None:
        now = self._clock.now
        life = self._lives[number] = life or self.life(number)
        follows = life.on_end(message, kind, slot, now=now)
        match follows:
            case PlaceAgain(after_s) if after_s:  # live it asks again and again
                self._waiting[number] = None
                self._clock.at(life.waits_until, ARRIVAL, partial(self._stop_waiting, number, message))
            case PlaceAgain():
                self.dispatch_again(number)
            case Refused(reason, _):
                self._fail(number, reason)
            case _:
                raise AssertionError(f"request {number} has not ended")
