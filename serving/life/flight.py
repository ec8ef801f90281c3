"""One life of a request, from its arrival to its end. A core: inputs in, effects out (see `effects`).

    begin --+-- Place prefill .. Send .. prefill_ended --+-- Place decode .. Send .. ended ---- Answer
            |                                            |
            +-- bypassed, or no prefill workers ---------+

    source first        Place and Send prefill; its KV is kept; Place and Send decode; has_blocks -> Transfer
    destination first   Place both, Send decode; has_blocks -> Send prefill; it ends -> Transfer, or chunk by chunk before
    hand_over           a decode worker leaves: it keeps the KV; Place and Send decode; has_blocks -> Transfer;
                        a request without KV goes back to `begin`
    every transfer      kv_arrived -> Deliver, LetGo

Whatever goes wrong, `Life` decides what follows: to begin again, to wait for a worker, or to fail. All that a flight has
at workers, at routers and on links is given back before that.

Only the driver on a clock moves KV (`has_blocks` and what follows) and hands requests over. Only the one on sockets makes
calls, which may fail (`prefill_failed`), and may make both at once (`meets`, `is_answering`).

A flight is the only record of a request's state. It has neither a clock nor callbacks: whoever drives it passes the time,
carries out what is returned, in order, and reports what came of it, perhaps before going on with the rest.
"""

from collections.abc import Collection

from serving.life.effects import (
    ANSWER,
    BEGIN,
    NOTHING,
    PLACE_DECODE,
    PLACE_PREFILL,
    RELEASE_BOTH,
    RELEASE_PREFILL,
    SEND_BOTH,
    SEND_DECODE,
    SEND_PREFILL,
    TRANSFER,
    Abort,
    Answer,
    Begin,
    DecodeLater,
    Deliver,
    Drop,
    Effects,
    Extend,
    Fail,
    Keep,
    Lease,
    LetGo,
    Miss,
    Transfer,
    Wait,
)
from serving.life.leg import Leg, Stage
from serving.life.life import Finished, Life, PlaceAgain, Refused
from serving.life.terms import Generated, Terms

GONE = "its worker is gone"
DESERTED = "it waited at the router, but no worker became available"


class Flight:
    """All state of one request in flight."""

    __slots__ = (
        "_life", "decode", "failed_at", "generated", "is_bypassed", "is_destination_first", "is_over", "is_under_way", "leaving",
        "meets", "number", "payload", "prefill", "terms", "waits_for",
    )  # fmt: skip

    def __init__(self, number: int, terms: Terms) -> None:
        """Start with a request that has not begun, by its number."""
        self.number = number
        self.payload: object = None  # for the driver: what it sends
        self.terms = terms
        self.prefill: Leg | None = None
        self.decode: Leg | None = None
        self.leaving: Leg | None = None
        """The decode worker that leaves, until its KV is read."""
        self.is_under_way = False
        """Whether KV is being read."""
        self.waits_for: str | None = None
        """While it waits for a worker: what it fails with if none comes in time."""
        self.generated: Generated | None = None
        self.is_bypassed = False
        """Whether one worker computes the prompt and answers it, as was settled before it began."""
        self.is_destination_first = False
        self.meets = False
        """Whether both workers have the request at once and wait for each other: nobody else can read the KV."""
        self.failed_at: Collection[int] = ()  # the workers that are chosen last
        self.is_over = False
        self._life: Life | None = None

    @property
    def num_migrations(self) -> int:
        """How often it has lost a worker and continued on another."""
        return 0 if self._life is None else self._life.num_migrations

    @property
    def may_bypass(self) -> bool:
        """Whether it is worth asking, before `begin`, if a decode worker should compute the prompt."""
        terms, life = self.terms, self._life
        is_settled = terms.is_pinned or terms.is_whole or (life is not None and (life.is_prefilled or life.is_whole))
        return terms.config.conditional_disagg != "never" and not is_settled

    @property
    def num_generated(self) -> int:
        """Tokens of the answer from workers that are gone, or leave."""
        return 0 if self.generated is None else self.generated.num_tokens

    # To the first worker

    def begin(self, now: float, *, has_prefill: bool = False, bypass: int | None = None) -> Effects:
        """Go to a worker, at the arrival or when `Begin` says so.

        Args:
            now: the time.
            has_prefill: whether there are prefill workers.
            bypass: the worker that should compute the prompt and answer it, if that is settled.
        """
        config = self.terms.config
        self.is_bypassed = bypass is not None
        # For speed: there is nothing to decide.
        if self._life is None and not has_prefill and not config.enforce_disagg:
            self.decode = Leg(bypass)
            return PLACE_DECODE
        life = self._life or self._start_life()
        stage = life.next_stage(now=now, has_prefill=has_prefill, bypasses=bypass is not None)
        if isinstance(stage, Refused):
            return self.nobody(stage.message, now)
        if stage == "decode":
            self.decode = Leg(bypass, reads_kv=life.is_prefilled)
            return PLACE_DECODE
        self.prefill = Leg()
        self.is_destination_first = config.flow == "destination-first"
        if self.is_destination_first and self.terms.needs_blocks_first:
            self.decode = Leg(reads_kv=True)
            return PLACE_DECODE
        return PLACE_PREFILL

    def placed(self, stage: Stage, slot: int, *, meets: bool | None = None) -> Effects:
        """Continue at the worker that a router has chosen.

        Args:
            stage: the stage it was chosen for.
            slot: the worker.
            meets: whether it is sent to both workers at once, if that is up to this prefill worker.
        """
        prefill, decode = self.prefill, self.decode
        if stage == "decode":
            assert decode is not None
            decode.slot, decode.state = slot, "sent"
            if not self.meets or prefill is None or prefill.state != "chosen":
                return SEND_DECODE
            prefill.state = "sent"
            return SEND_BOTH
        assert prefill is not None
        prefill.slot, prefill.state = slot, "chosen"
        if meets is not None:
            self.is_destination_first = self.meets = meets
        if not self.is_destination_first or (decode is not None and decode.has_blocks):
            prefill.state = "sent"
            return SEND_PREFILL
        assert decode is None
        self.decode = Leg(reads_kv=True)
        return PLACE_DECODE

    def nobody(self, message: str, now: float) -> Effects:
        """Wait, if it may, because no worker can take the request; KV that is kept for it stays there."""
        return self._after(message, "unavailable", None, now)

    def wake(self) -> Effects:
        """Begin again, because a worker has come."""
        if self.waits_for is None:
            return NOTHING
        self.waits_for = None
        return BEGIN

    def patience_over(self, now: float) -> Effects:
        """Fail, if no worker has come."""
        if self.waits_for is None or (self._life is not None and now < self._life.waits_until):
            return NOTHING
        return self.fail(self.waits_for, "unavailable")

    def deserted(self, stage: Stage) -> Effects:
        """Leave the router of a stage that has no worker left: begin again without prefill workers, fail without the others."""
        return self._restart() if stage == "prefill" else self.fail(DESERTED, "unavailable")

    def _restart(self, *, is_next: bool = True) -> Effects:
        """Begin again elsewhere, through no fault of a worker that had the request."""
        return (*self._given_up(), Begin(is_next))

    # KV from one worker to another

    def prefill_ended(self, now: float) -> Effects:
        """Continue with the decode worker, now that the prompt is computed."""
        leg, life, config = self.prefill, self._life, self.terms.config
        assert leg is not None
        assert life is not None
        assert leg.state == "sent"
        leg.state = "kept"
        if self.meets:
            return RELEASE_PREFILL
        follows = life.on_end("", "", leg.slot, stage="prefill", now=now)
        assert isinstance(follows, PlaceAgain), "what was prefilled is decoded"
        if self.is_destination_first:
            return (*RELEASE_PREFILL, *self._read())
        lease = Lease(leg, now + config.kv_lease_duration_s)
        if self.terms.handover_s:
            return (*RELEASE_PREFILL, DecodeLater(leg, self.terms.handover_s), lease)
        return (*RELEASE_PREFILL, *self.to_decode(leg), lease)

    def to_decode(self, prefill: Leg) -> Effects:
        """Look for a decode worker after a pause, unless the request has begun again since."""
        if self.prefill is not prefill or self.decode is not None or self.waits_for is not None:
            return NOTHING
        self.decode = Leg(reads_kv=True)
        return PLACE_DECODE

    def has_blocks(self) -> Effects:
        """Continue, now that the decode worker has blocks for the KV that it waits for."""
        leg, prefill = self.decode, self.prefill
        assert leg is not None
        assert leg.reads_kv
        leg.has_blocks = True
        if self.leaving is not None or not self.is_destination_first or (prefill is not None and prefill.was_kept):
            return self._read()
        assert prefill is not None
        if prefill.state == "sought":
            return PLACE_PREFILL
        prefill.state = "sent"
        return SEND_PREFILL

    def _read(self) -> Effects:
        """Start to read KV, if it is still there and not being sent yet."""
        assert self.decode is not None
        source = self.leaving or self.prefill
        if source is None or source.state != "kept":
            return (Miss(self.decode),)
        if self.is_under_way:
            return NOTHING  # it is sent chunk by chunk
        self.is_under_way = True
        return TRANSFER

    def computed(self, num_blocks: int, *, is_last: bool) -> Effects:
        """Send blocks of a prompt that are computed, perhaps the last (see `Leg.take_blocks_to_send`)."""
        if self.is_under_way:
            return (Extend(num_blocks, is_last),)
        self.is_under_way = True
        return (Transfer(num_blocks, is_last),)

    def kv_arrived(self) -> Effects:
        """Let the decode worker continue with the KV, and the other one free it."""
        decode, prefill, leaving = self.decode, self.prefill, self.leaving
        assert decode is not None
        self.is_under_way = decode.has_blocks = False
        if leaving is not None:
            self.leaving, leaving.state = None, "over"
            return (Deliver(decode), LetGo(leaving))
        assert prefill is not None
        prefill.state = "over"
        return (LetGo(prefill), Deliver(decode))

    def kv_missed(self, decode: Leg) -> Effects:
        """Report to the decode worker that the KV was gone before it could be read."""
        if self.decode is not decode or not decode.has_blocks:
            return NOTHING
        decode.has_blocks = False
        return (Deliver(decode, 0),)

    def is_leased(self, prefill: Leg) -> bool:
        """Return whether the lease of KV can end: nobody renews it."""
        if self.prefill is not prefill or prefill.state != "kept":
            return False
        is_awaited = self.decode is not None and self.decode.state == "sent"
        return not (is_awaited and self.terms.config.kv_lease_renewal)

    def lease_over(self, prefill: Leg) -> Effects:
        """Free KV that was not read in time."""
        if not self.is_leased(prefill):
            return NOTHING
        prefill.state = "expired"
        return (LetGo(prefill), *self._cut_off())

    def _cut_off(self) -> Effects:
        """End the transfer, if there is one: the KV is gone."""
        if not self.is_under_way:
            return NOTHING
        assert self.decode is not None
        self.is_under_way = self.decode.has_blocks = False
        return (Drop(), Deliver(self.decode, 0))

    # The answer

    def has_said(self, generated: Generated | None) -> None:
        """Note what a worker generated, if anything, before the request continues elsewhere."""
        if generated is not None:
            self.generated = generated if self.generated is None else self.generated.then(generated)

    def ended(self, now: float, message: str = "", kind: str = "", *, is_full: bool = False) -> Effects:
        """Continue after the end of the call to the decode worker.

        Args:
            now: the time.
            message: what went wrong.
            kind: the kind of the `CallError`, empty if nothing went wrong.
            is_full: whether the answer has as many tokens as it may have.
        """
        decode, prefill, life = self.decode, self.prefill, self._life
        assert decode is not None
        decode.state = "over"
        if not kind and (prefill is None or prefill.state == "over"):
            self.is_over = True
            return ANSWER
        if prefill is not None and kind == "invalid":
            kind = "engine"  # what one worker passes to the other is not the client's fault
        if prefill is not None and kind == "engine" and prefill.state == "gone":
            kind = "lost"  # the KV went with its worker, and can be computed elsewhere
        if prefill is not None and prefill.slot is not None and kind in ("lost", "overloaded"):
            assert life is not None
            life.failed_at.add(prefill.slot)  # either may be the cause: try neither again
        return self._after(message, kind, decode, now, is_full=is_full)

    def prefill_failed(self, now: float, message: str, kind: str) -> Effects:
        """Continue after a prefill that failed, unless the answer has begun all the same."""
        prefill, decode = self.prefill, self.decode
        assert prefill is not None
        prefill.state = "over"
        if decode is not None and decode.is_answering:
            return RELEASE_PREFILL
        return self._after(message, kind, prefill, now, stage="prefill")

    def lost(self, leg: Leg, now: float) -> Effects:
        """Continue without a worker that is gone.

        Where it only kept the KV of a prompt, the decode worker decides what becomes of the request. A request that
        was never sent there begins again, and nothing counts against it.
        """
        if leg is self.prefill and leg.state == "kept":
            leg.state = "gone"
            return self._cut_off()
        if leg is self.prefill and leg.state == "chosen":
            return self._restart()
        if leg.state not in ("sent", "kept"):
            return NOTHING
        stage: Stage = "prefill" if leg is self.prefill else "decode"
        return self._after(GONE, "lost", leg, now, stage=stage)

    def hand_over(self, generated: Generated | None, *, is_answering: bool, has_kv: bool) -> Effects:
        """Continue on another decode worker, if this one, which leaves, can part with the request; else it is asked again.

        Args:
            generated: what this worker has generated.
            is_answering: whether it has begun the answer: the other one reads its KV.
            has_kv: whether the request may have KV, here or at a prefill worker, or in between; else it begins again.
        """
        if has_kv and not is_answering:
            return NOTHING
        self.has_said(generated)
        if not is_answering:
            return self._restart(is_next=False)
        old = self.decode
        assert old is not None
        assert self.leaving is None
        old.state = "kept"
        self.leaving = old
        self.decode = Leg(reads_kv=True, is_moved=True)
        return (Abort(old), Keep(old), *PLACE_DECODE)

    def cancelled(self) -> Effects:
        """End, because nobody wants the answer any more."""
        self.is_over, self.waits_for = True, None
        return self._given_up(keeps_kv=False)

    # What follows

    def _start_life(self) -> Life:
        """Return its policy, which it has from its first decision on."""
        terms = self.terms
        life = self._life = Life(terms.limit, is_pinned=terms.is_pinned, config=terms.config, is_whole=terms.is_whole)
        self.failed_at = life.failed_at
        return life

    def _after(
        self, message: str, kind: str, leg: Leg | None, now: float, *, stage: Stage = "decode", is_full: bool = False
    ) -> Effects:
        """Return what follows the end of a call, as `Life` decides."""
        life, slot = self._life or self._start_life(), None if leg is None else leg.slot
        follows = life.on_end(message, kind, slot, stage=stage, is_full=is_full, now=now)
        if isinstance(follows, Finished):
            return (*self.cancelled(), Answer(follows.reason))
        if isinstance(follows, Refused):
            return self.fail(follows.message, follows.kind, leg)
        has_begun = self.num_generated or (self.decode is not None and self.decode.is_answering)
        if has_begun and not self.terms.can_continue:
            problem = "an answer with a constraint cannot continue elsewhere: the constraint would begin again"
            return self.fail(f"{message}; {problem}", kind, leg)
        given_up = self._given_up()
        if not follows.waits:
            return (*given_up, *BEGIN)
        self.waits_for = message
        return (*given_up, Wait(life.waits_until))

    def fail(self, message: str, kind: str, leg: Leg | None = None) -> Effects:
        """End without an answer."""
        return (*self.cancelled(), Fail(message, kind, leg))

    def _given_up(self, *, keeps_kv: bool = True) -> Effects:
        """Give back all that the request has anywhere, but keep the KV of a computed prompt if it can be used again."""
        prefill, decode, leaving, life = self.prefill, self.decode, self.leaving, self._life
        if prefill is None and decode is None:
            return NOTHING
        effects: list[Abort | Drop | LetGo] = [Drop()] if self.is_under_way else []
        if leaving is not None:
            leaving.state = "over"
            effects.append(LetGo(leaving))
        if prefill is not None and life is not None and not (keeps_kv and life.is_prefilled and prefill.was_kept):
            if prefill.state == "kept":
                effects.append(LetGo(prefill))
            elif prefill.state == "sent":
                effects.append(Abort(prefill))
            prefill.state, self.prefill = "over", None
            life.is_prefilled = False
        if decode is not None and decode.state == "sent":
            effects.append(Abort(decode))
        self.decode = self.leaving = None
        self.is_under_way = False
        return (*effects, *RELEASE_BOTH)
