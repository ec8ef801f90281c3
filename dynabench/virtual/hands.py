"""What is done for flights at ranks, on the links between them and at later times."""

from collections.abc import Callable, Sequence
from functools import partial

from dynabench.virtual.clock import ARRIVAL, Clock
from dynabench.virtual.prompts import Prepared, Prompts
from dynabench.virtual.rank import Rank
from dynabench.virtual.stamps import Stamps
from dynabench.virtual.transfers import Transfers
from mocker import Sequence as EngineSequence
from serving.life.effects import (
    Abort,
    Deliver,
    Drop,
    Effect,
    Effects,
    Extend,
    Keep,
    Lease,
    LetGo,
    Miss,
    Pause,
    Transfer,
)
from serving.life.flight import Flight
from serving.life.leg import Leg, Stage
from serving.life.terms import Generated

EXPIRED = "its KV had left the prefill worker before the decode worker could read it: the lease had expired"
GONE = "its KV had left the prefill worker before the decode worker could read it: that worker was gone"


class Hands:
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
        """Work on ranks.

        Args:
            clock: the clock.
            ranks: all ranks, by number.
            prompts: makes what is sent.
            transfers: carries KV between them.
            stamps: records what happens.
            react: carries out what a flight asks for when something has happened.
        """
        self.pauses_s = 0.0
        """Total time between the end of a prefill and the choice of a decode rank, over all requests."""
        self._clock = clock
        self._ranks = ranks
        self._prompts = prompts
        self._transfers = transfers
        self._stamps = stamps
        self._react = react

    def send(self, flight: Flight, stage: Stage) -> None:
        """Send a request to its rank."""
        if stage == "prefill":
            self._send_prefill(flight)
            return
        leg = flight.decode
        assert leg is not None
        rank, sequence = self._ranks[leg.slot], sequence_of(leg)
        rank.add(sequence)
        if flight.generated is not None and flight.generated.num_tokens == 1:
            rank.await_second_token(sequence)

    def _send_prefill(self, flight: Flight) -> None:
        leg, prepared, now = flight.prefill, flight.payload, self._clock.now
        assert leg is not None
        assert isinstance(prepared, Prepared)
        self._stamps.log.prefill_queued_s[flight.number] = now
        leg.call = self._prompts.to_prefill(flight, prepared, now)
        self._ranks[leg.slot].add(leg.call)

    def act(self, flight: Flight, effect: Effect) -> None:
        """Carry out an effect."""
        now, ranks, log = self._clock.now, self._ranks, self._stamps.log
        match effect:
            case Transfer():
                if flight.leaving is None:
                    log.transfer_start_s[flight.number] = now
                self._transfers.start(flight, effect, self._end_transfer)
            case Extend():
                self._transfers.extend(flight, effect)
            case Drop():
                self._transfers.drop(flight)
            case Miss(leg):
                if not leg.is_moved:
                    log.transfer_start_s[flight.number] = now
                self._clock.at(now, ARRIVAL, partial(self._miss, flight, leg))
            case Deliver(leg, num_valid_blocks):
                if not leg.is_moved:
                    log.transfer_end_s[flight.number] = now
                ranks[leg.slot].arrive(sequence_of(leg), num_valid_blocks)
            case Abort(leg):
                ranks[leg.slot].abort(sequence_of(leg))
                if leg.has_blocks:
                    ranks[leg.slot].arrive(sequence_of(leg), 0)
            case Keep(leg):
                ranks[leg.slot].readers[flight.number] = None
            case LetGo(leg) if ranks[leg.slot].prefills:
                ranks[leg.slot].let_go(sequence_of(leg))
            case LetGo(leg):
                ranks[leg.slot].on_read(flight.number)
            case Lease(leg, until_s):
                if flight.is_leased(leg):
                    self._clock.at(until_s, ARRIVAL, partial(self._end_lease, flight, leg))
            case Pause(leg, after_s):
                self.pauses_s += after_s
                self._clock.at(now + after_s, ARRIVAL, partial(self._end_pause, flight, leg))
            case _:
                raise AssertionError(f"{effect} concerns no rank")

    def _end_transfer(self, flight: Flight) -> None:
        self._react(flight, flight.kv_arrived())

    def _miss(self, flight: Flight, leg: Leg) -> None:
        self._react(flight, flight.kv_missed(leg))

    def _end_lease(self, flight: Flight, leg: Leg) -> None:
        self._react(flight, flight.lease_over(leg))

    def _end_pause(self, flight: Flight, leg: Leg) -> None:
        self._react(flight, flight.to_decode(leg))


def sequence_of(leg: Leg) -> EngineSequence:
    """Return a leg's sequence in the rank's engine."""
    assert isinstance(leg.call, EngineSequence)
    return leg.call


def note_answer(flight: Flight, sequence: EngineSequence, rank: Rank) -> None:
    """Tell a flight which tokens of its answer a rank has generated, before it continues elsewhere."""
    engine = rank.engine
    num_new = engine.num_known_tokens(sequence) - sequence.num_prompt
    if num_new > 0 and sequence.first_token_s >= 0:
        last_token_s = sequence.waited_since_s if sequence.waited_since_s >= 0 else engine.known_until_s
        admitted_s, num_cached = sequence.first_scheduled_s, sequence.cached_tokens
        flight.has_said(Generated(num_new, sequence.first_token_s, last_token_s, admitted_s, num_cached))


def missing_kv(flight: Flight) -> str:
    """Return why the KV of a prompt was not there to be read."""
    return GONE if flight.prefill is not None and flight.prefill.state == "gone" else EXPIRED
