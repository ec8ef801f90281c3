"""What is done for flights at ranks, on the links between them and at later times."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from dynabench.virtual.clock import ARRIVAL, Clock
from dynabench.virtual.prompts import Prepared, Prompts
from dynabench.virtual.rank import Rank
from dynabench.virtual.stamps import Stamps
from dynabench.virtual.transfers import Transfers
from mocker import Sequence as EngineSequence
from serving.life.effects import (
    Abort,
    DecodeLater,
    Deliver,
    Drop,
    Effect,
    Effects,
    Extend,
    Keep,
    Lease,
    LetGo,
    Miss,
    Send,
    Transfer,
)
from serving.life.flight import Flight
from serving.life.leg import Leg
from serving.life.terms import Generated

EXPIRED = "its KV had left the prefill worker before the decode worker could read it: the lease had expired"
GONE = "its KV had left the prefill worker before the decode worker could read it: that worker was gone"

TOO_LONG = "invalid"
"""Of an answer that continues, what there is counts as prompt, for which this rank may have no room (see `Engine.add`)."""

E = TypeVar("E", bound=Effect)
Act = Callable[[Flight, Any], object]
"""Carries out an effect of one type, its second argument."""


def able(kind: type[E], act: Callable[[Flight, E], object]) -> dict[type[Any], Act]:
    """Return how to carry out effects of one type, as an entry of a table; the type checker sees that the two fit."""
    return {kind: act}


class RankEffects:
    """Carries out the effects that concern ranks and KV."""

    def __init__(
        self,
        clock: Clock,
        ranks: Sequence[Rank],
        prompts: Prompts,
        transfers: Transfers,
        stamps: Stamps,
        react: Callable[[Flight, Effects], None],
    ) -> None:
        self.pauses_s = 0.0
        """Total time between the end of a prefill and the choice of a decode rank, over all requests."""
        self._clock = clock
        self._ranks = ranks
        self._prompts = prompts
        self._transfers = transfers
        self._stamps = stamps
        self._react = react
        self.can = {
            **able(Send, self._send),
            **able(Transfer, self._transfer),
            **able(Extend, transfers.extend),
            **able(Drop, self._drop),
            **able(Miss, self._miss),
            **able(Deliver, self._deliver),
            **able(Abort, self._abort),
            **able(Keep, self._keep),
            **able(LetGo, self._let_go),
            **able(Lease, self._lease),
            **able(DecodeLater, self._decode_later),
        }
        """How to carry out each of these effects."""

    def _rank_of(self, leg: Leg) -> Rank:
        assert leg.slot is not None
        return self._ranks[leg.slot]

    def _send(self, flight: Flight, send: Send) -> None:
        """Send a request to its rank."""
        if send.stage == "prefill":
            self._send_prefill(flight)
            return
        leg = flight.decode
        assert leg is not None
        assert leg.slot is not None
        rank, sequence = self._ranks[leg.slot], sequence_of(leg)
        try:
            rank.add(sequence)
        except ValueError as error:
            self._react(flight, flight.ended(self._clock.now, str(error), TOO_LONG))
            return
        if flight.generated is not None and flight.generated.num_tokens == 1:
            rank.await_second_token(sequence)

    def _send_prefill(self, flight: Flight) -> None:
        leg, prepared, now = flight.prefill, flight.payload, self._clock.now
        assert leg is not None
        assert isinstance(prepared, Prepared)
        self._stamps.log.prefill_queued_s[flight.number] = now
        leg.call = self._prompts.to_prefill(flight, prepared, now)
        try:
            self._rank_of(leg).add(leg.call)
        except ValueError as error:
            self._react(flight, flight.prefill_failed(self._clock.now, str(error), TOO_LONG))

    def _transfer(self, flight: Flight, transfer: Transfer) -> None:
        if flight.leaving is None:
            self._stamps.log.transfer_start_s[flight.number] = self._clock.now
        self._transfers.start(flight, transfer, self._end_transfer)

    def _end_transfer(self, flight: Flight) -> None:
        self._react(flight, flight.kv_arrived())

    def _drop(self, flight: Flight, _: Drop) -> None:
        self._transfers.drop(flight)

    def _miss(self, flight: Flight, miss: Miss) -> None:
        if not miss.leg.is_moved:
            self._stamps.log.transfer_start_s[flight.number] = self._clock.now
        self._clock.at(self._clock.now, ARRIVAL, partial(self._end_miss, flight, miss.leg))

    def _end_miss(self, flight: Flight, leg: Leg) -> None:
        self._react(flight, flight.kv_missed(leg))

    def _deliver(self, flight: Flight, deliver: Deliver) -> None:
        leg = deliver.leg
        if not leg.is_moved:
            self._stamps.log.transfer_end_s[flight.number] = self._clock.now
        self._rank_of(leg).end_load(sequence_of(leg), deliver.num_valid_blocks)

    def _abort(self, _: Flight, abort: Abort) -> None:
        leg, rank = abort.leg, self._rank_of(abort.leg)
        rank.abort(sequence_of(leg))
        if leg.has_blocks:  # the engine keeps the blocks of a load until the load is reported to have ended
            rank.end_load(sequence_of(leg), 0)

    def _keep(self, flight: Flight, keep: Keep) -> None:
        flight.payload = self._prompts.prepare(flight)  # with the answer so far, for the rank that continues it
        self._rank_of(keep.leg).readers[flight.number] = None

    def _let_go(self, flight: Flight, let_go: LetGo) -> None:
        rank = self._rank_of(let_go.leg)
        if rank.prefills:
            rank.release_kept(sequence_of(let_go.leg))
        else:
            rank.on_read(flight.number)

    def _lease(self, flight: Flight, lease: Lease) -> None:
        if flight.is_leased(lease.leg):
            self._clock.at(lease.until_s, ARRIVAL, partial(self._end_lease, flight, lease.leg))

    def _end_lease(self, flight: Flight, leg: Leg) -> None:
        self._react(flight, flight.lease_over(leg))

    def _decode_later(self, flight: Flight, later: DecodeLater) -> None:
        self.pauses_s += later.after_s
        self._clock.at(self._clock.now + later.after_s, ARRIVAL, partial(self._end_pause, flight, later.leg))

    def _end_pause(self, flight: Flight, leg: Leg) -> None:
        self._react(flight, flight.to_decode(leg))


def sequence_of(leg: Leg) -> EngineSequence:
    """Return a leg's sequence in the rank's engine."""
    assert isinstance(leg.call, EngineSequence)
    return leg.call


def generated_by(rank: Rank, sequence: EngineSequence) -> Generated | None:
    """Return which tokens of an answer a rank has generated."""
    engine = rank.engine
    num_new = engine.num_known_tokens(sequence) - sequence.num_prompt
    if num_new <= 0 or sequence.first_token_s < 0:
        return None
    last_token_s = sequence.waited_since_s if sequence.waited_since_s >= 0 else engine.known_until_s
    return Generated(num_new, sequence.first_token_s, last_token_s)


def missing_kv(flight: Flight) -> str:
    """Return why the KV of a prompt was not there to be read."""
    return GONE if flight.prefill is not None and flight.prefill.state == "gone" else EXPIRED
