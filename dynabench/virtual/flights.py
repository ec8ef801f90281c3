"""Flights in virtual time: what happens at routers, ranks and links goes in, and their effects are carried out there.

The life of a request is in `serving.life.flight`, which decides what follows; only facts are reported from here. Of what
happens at one instant, an effect that must not interrupt what the engine is doing gets its own turn on the clock.
"""

from collections.abc import Callable
from functools import partial

from dynabench.virtual.arrivals import Arrivals
from dynabench.virtual.bypass import bypassing_slot
from dynabench.virtual.clock import ARRIVAL, Clock
from dynabench.virtual.prompts import Prepared, Prompts
from dynabench.virtual.rank import Rank, number_of
from dynabench.virtual.rank_effects import RankEffects, able, generated_by, missing_kv, sequence_of
from dynabench.virtual.routing import Routers, Routing
from dynabench.virtual.stamps import Stamps
from dynabench.virtual.transfers import Transfers
from mocker import Sequence as EngineSequence
from mocker import StepOutput
from serving.life.effects import Answer, Begin, Effects, Fail, Place, Release, Wait
from serving.life.flight import Flight
from serving.life.leg import Leg, Stage
from serving.life.terms import Terms
from serving.router import Prompt, RoutingDecision
from serving.router.decision import NoWorkersError


class Flights:
    """All requests in flight."""

    def __init__(
        self,
        terms: Terms,
        clock: Clock,
        routers: Routers,
        ranks: list[Rank],
        *,
        prompts: Prompts,
        transfers: Transfers,
        arrivals: Arrivals,
        stamps: Stamps,
    ) -> None:
        self.choose: Callable[[int], int] | None = None
        """Chooses the slot for a request, by the request's number, instead of the router."""
        self.num_ended = 0
        """Requests that are answered, refused or have failed."""
        self.num_refused = 0
        """Requests that are too long for the engines."""
        self.num_lost = 0
        """How often requests lost their rank."""
        self._of: dict[int, Flight] = {}
        self._terms = terms
        self._clock = clock
        self._routers = routers
        self._decode = routers.decode
        self._ranks = ranks
        self._prompts = prompts
        self.rank_effects = RankEffects(clock, ranks, prompts, transfers, stamps, self.act)
        self.can = {
            **able(Place, self._place),
            **able(Release, self._release),
            **able(Answer, self._answer),
            **able(Begin, self._begin_soon),
            **able(Wait, self._wait),
            **able(Fail, self._fail),
            **self.rank_effects.can,
        }
        """How to carry out each effect. A request has about ten: a `match` would ask one class after another for each."""
        self._transfers = transfers
        self._arrivals = arrivals
        self._stamps = stamps
        self._may_hold = routers.decode.router.may_hold

    def __getitem__(self, number: int) -> Flight:
        """Return a request that is in flight."""
        return self._of[number]

    def __len__(self) -> int:
        """Return how many are in flight."""
        return len(self._of)

    def begin(self, number: int) -> None:
        """Send a request on its way."""
        flight = self._of[number] = Flight(number, self._terms)
        if self._prompts.has_limits and (reason := self._prompts.refusal(number)) is not None:
            self.num_refused += 1
            self.act(flight, flight.fail(f"HTTP 400: {reason}", "invalid"))
        else:
            self._begin(flight)

    def _begin(self, flight: Flight) -> None:
        prepared = flight.payload = self._prompts.prepare(flight)
        prefill = self._routers.prefill
        if prefill is not None:
            self._begin_apart(flight, prepared.prompt, prefill)
        elif self.choose is None:
            self.act(flight, flight.begin(self._clock.now))
        else:
            self._begin_chosen(flight, prepared, self.choose)

    def _begin_apart(self, flight: Flight, prompt: Prompt, prefill: Routing) -> None:
        has_prefill, bypass = bool(prefill.ranks), None
        if has_prefill and flight.may_bypass:
            try:
                bypass = bypassing_slot(
                    self._terms.config,
                    prompt,
                    self._prompts.columns.lengths(flight.number)[1],
                    decode=self._decode,
                    prefill=prefill,
                    ranks=self._ranks,
                    block_size=self._prompts.block_size,
                )
            except NoWorkersError as error:
                self.act(flight, flight.nobody(str(error), self._clock.now))
                return
        self.act(flight, flight.begin(self._clock.now, has_prefill=has_prefill, bypass=bypass))

    def _begin_chosen(self, flight: Flight, prepared: Prepared, choose: Callable[[int], int]) -> None:
        self._decode.catch_up(prepared.prompt)
        try:
            slot = choose(flight.number)
        except NoWorkersError as error:
            self.act(flight, flight.nobody(str(error), self._clock.now))
        else:
            self.send_to(flight, slot)

    def send_to(self, flight: Flight, slot: int) -> None:
        """Send a request to a rank without asking the router."""
        self.act(flight, flight.begin(self._clock.now, bypass=slot))

    def on_step(self, rank: Rank, output: StepOutput) -> None:
        """Process the output of a rank's step."""
        if rank.prefills and self._routers.prefill is not None:
            self._on_prefill_step(rank, output, self._routers.prefill)
            return
        if self._decode.sends_events_at_once and rank.engine.outbox.events:
            self._decode.on_events(rank)
        if output.sampled or output.finished:
            self._on_output(rank, output)

    def _on_output(self, rank: Rank, output: StepOutput) -> None:
        """Process first tokens and answers that have ended."""
        router, arrivals = self._decode.router, self._arrivals
        for sequence in output.sampled:
            router.on_first_token(sequence.id)
        if output.sampled:
            rank.note_first_tokens(output)
        for sequence in output.finished:
            flight = self._of[number_of(sequence)]
            self._stamps.ended(flight, sequence, rank, output.end)
            if sequence.is_failed:
                self.act(flight, flight.ended(output.end, sequence.failure or missing_kv(flight), "engine"))
            else:
                self.act(flight, flight.ended(output.end))
        if arrivals.counter is not None:
            arrivals.counter.on_output(output, self._stamps.log, self._prompts.columns)
        if output.finished and arrivals.waits_for_answers:
            arrivals.await_next()
        if self._may_hold:
            self._release_held("decode", self._decode)
        if rank.is_handing_over and output.sampled:
            self.hand_over(rank)

    def on_second_token(self, sequence: EngineSequence, time: float) -> None:
        """Record when a request had its second token."""
        self._stamps.second_token(number_of(sequence), time)

    def _on_prefill_step(self, rank: Rank, output: StepOutput, routing: Routing) -> None:
        """Process the output of a step of a rank that only prefills."""
        if routing.sends_events_at_once and rank.engine.outbox.events:
            routing.on_events(rank)
        if self._transfers.sends_chunks:
            self._send_chunks_of(output)
        log = self._stamps.log
        for sequence in output.finished:
            number = number_of(sequence)
            flight = self._of[number]
            log.prefill_worker[number] = rank.number
            log.prefill_end_s[number] = output.end
            self.act(flight, flight.prefill_ended(output.end))
        if output.finished:
            self._release_prefills(routing)

    def _send_chunks_of(self, output: StepOutput) -> None:
        """Send the blocks that a step has filled, and all remaining blocks at the end of a prompt.

        A prompt that was preempted is computed again from its cached blocks, and its last token may be dropped, so its
        progress is unknown before its end.
        """
        for sequence, count in output.chunks:
            has_ended = sequence in output.finished
            if has_ended or not (sequence.is_over or sequence.num_preemptions):
                self._chunk_computed(self._of[number_of(sequence)], sequence, count, is_last=has_ended)

    def _chunk_computed(self, flight: Flight, sequence: EngineSequence, count: int, *, is_last: bool) -> None:
        """Report that a chunk of a flight's prompt was computed."""
        source, target = flight.prefill, flight.decode
        assert source is not None
        assert target is not None
        num_blocks = source.take_blocks_to_send(
            count,
            num_cached=sequence.cached_tokens,
            num_prompt=sequence.num_prompt,
            block_size=self._prompts.block_size,
            num_there=sequence_of(target).num_cached_blocks,
            is_last=is_last,
        )
        self.act(flight, flight.computed(num_blocks, is_last=is_last))

    def on_loads(self, sequences: list[EngineSequence]) -> None:
        """Continue with the sequences for which a rank has allocated blocks."""
        for sequence in sequences:
            flight = self._of[number_of(sequence)]
            assert flight.decode is not None
            if not flight.decode.is_moved:
                self._stamps.log.decode_blocks_s[flight.number] = self._clock.now
            self.act(flight, flight.has_blocks())

    def on_worker(self) -> None:
        """Let those go on that wait for a worker, now that one has come."""
        for flight in list(self._of.values()):
            if flight.waits_for is not None:
                self.act(flight, flight.wake())
        self.release()

    def on_gone(self, rank: Rank) -> None:
        """Let the requests of a rank that is gone continue elsewhere; those that need its KV do without it."""
        for number in list(rank.readers):
            flight = self._of[number]
            assert flight.leaving is not None
            self._lose(flight, flight.leaving)
        if rank.prefills:
            for flight in list(self._of.values()):
                if flight.prefill is not None and flight.prefill.slot == rank.number:
                    self._lose(flight, flight.prefill)
        else:
            for sequence in rank.sequences:
                flight = self._of[number_of(sequence)]
                if flight.decode is not None and flight.decode.call is sequence:  # it was not given up before
                    self._stamps.left(flight, sequence, self._clock.now)
                    flight.has_said(generated_by(rank, sequence))
                    self._lose(flight, flight.decode)
        self.release()

    def _lose(self, flight: Flight, leg: Leg) -> None:
        self.num_lost += leg.state == "sent" or leg is flight.leaving
        self.act(flight, flight.lost(leg, self._clock.now))

    def hand_over(self, rank: Rank) -> None:
        """Let the requests of a leaving rank continue on others, if there are any; ask again as its prompts are computed."""
        if rank.prefills or not self._decode.ranks:
            return
        rank.is_handing_over = True
        rank.engine.advance(self._clock.now)
        is_apart = self._routers.prefill is not None
        for sequence in rank.sequences:
            flight, generated = self._of[number_of(sequence)], generated_by(rank, sequence)
            is_answering = sequence.decoding and sequence.first_token_s >= 0
            has_kv = is_apart or sequence.num_blocks > 0 or sequence.is_remote_prefill
            if effects := flight.hand_over(generated, is_answering=is_answering, has_kv=has_kv):
                self._stamps.left(flight, sequence, self._clock.now)
                self.act(flight, effects)

    def release(self) -> None:
        """Release requests that wait at any router, after something has changed."""
        if self._may_hold:
            self._release_held("decode", self._decode)
        if self._routers.prefill is not None:
            self._release_prefills(self._routers.prefill)

    def _release_held(self, stage: Stage, routing: Routing) -> None:
        for number, decision in routing.release():
            self._placed(self._of[number], stage, decision)

    def _release_prefills(self, routing: Routing) -> None:
        self._release_held("prefill", routing)
        if not routing.ranks:
            for number in routing.held:
                self.act(self._of[number], self._of[number].deserted("prefill"))

    def give_up_held(self) -> bool:
        """Let those fail that wait at the router of ranks which answer, if there are none; return whether any did."""
        held = [] if self._decode.ranks else self._decode.held
        for number in held:
            self.act(self._of[number], self._of[number].deserted("decode"))
        return bool(held)

    def act(self, flight: Flight, effects: Effects) -> None:
        """Carry out effects in order."""
        for effect in effects:
            self.can[type(effect)](flight, effect)

    def _place(self, flight: Flight, place: Place) -> None:
        """Have a rank chosen, unless the request has to wait at the router."""
        stage, prepared = place.stage, flight.payload
        assert isinstance(prepared, Prepared)
        try:
            if stage == "decode":
                decision = self._place_decode(flight, prepared)
            else:
                assert self._routers.prefill is not None
                decision = self._routers.prefill.place(flight.number, prepared.prompt, 1)
        except NoWorkersError as error:
            self.act(flight, flight.nobody(str(error), self._clock.now))
            return
        if decision is not None:
            self._placed(flight, stage, decision)

    def _place_decode(self, flight: Flight, prepared: Prepared) -> RoutingDecision | None:
        number, leg, now, is_apart = flight.number, flight.decode, self._clock.now, self._routers.prefill is not None
        assert leg is not None
        if is_apart and not leg.is_moved:
            self._stamps.log.decode_queued_s[number] = now
        sequence = leg.call = self._prompts.to_decode(flight, prepared, now)
        if leg.reads_kv:
            sequence.is_remote_prefill = True
            sequence.is_token_shipped = flight.is_destination_first and not leg.is_moved
        output_length = prepared.request.output_length
        is_local = is_apart and not leg.reads_kv
        return self._decode.place(number, prepared.prompt, output_length, leg.only, is_local=is_local)

    def _placed(self, flight: Flight, stage: Stage, decision: RoutingDecision) -> None:
        if stage == "prefill":
            assert self._routers.prefill is not None
            self._stamps.placed(flight.number, decision, self._routers.prefill.router)
        elif flight.decode is not None and not flight.decode.reads_kv:
            self._stamps.placed(flight.number, decision, self._decode.router)
        self.act(flight, flight.placed(stage, decision.slot))

    def _release(self, flight: Flight, release: Release) -> None:
        routing = self._decode if release.stage == "decode" else self._routers.prefill
        if routing is not None:
            routing.forget(flight.number)

    def _answer(self, flight: Flight, _: Answer) -> None:
        self._end(flight, self._stamps.answer_s)

    def _end(self, flight: Flight, delay_s: float) -> None:
        """Forget a request; its client learns of the end after a delay."""
        del self._of[flight.number]
        self.num_ended += 1
        self._arrivals.on_end(flight.number, delay_s)

    def _fail(self, flight: Flight, fail: Fail) -> None:
        self._stamps.log.error[flight.number] = fail.message
        self._end(flight, self._stamps.answer_s if fail.kind == "engine" else 0.0)
        if self._arrivals.waits_for_answers:
            self._arrivals.await_next()

    def _begin_soon(self, flight: Flight, begin: Begin) -> None:
        if begin.is_next:
            self._clock.at(self._clock.now, ARRIVAL, partial(self._begin_again, flight))
        else:
            self._begin_again(flight)

    def _begin_again(self, flight: Flight) -> None:
        self._put_last(flight)
        self._begin(flight)

    def _put_last(self, flight: Flight) -> None:
        """Treat a request as the one that came last, where several are treated in order."""
        self._of[flight.number] = self._of.pop(flight.number)

    def _wait(self, flight: Flight, wait: Wait) -> None:
        self._put_last(flight)
        self._clock.at(wait.until_s, ARRIVAL, partial(self._end_wait, flight))

    def _end_wait(self, flight: Flight) -> None:
        self.act(flight, flight.patience_over(self._clock.now))
