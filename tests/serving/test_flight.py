"""One life of a request: whatever happens to it, and in whatever order, nothing of it stays anywhere."""

from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from serving.life import DisaggregationConfig
from serving.life.effects import (
    Abort,
    Answer,
    Begin,
    Fail,
    Keep,
    Place,
    Release,
    Send,
)
from serving.life.flight import Flight
from serving.life.terms import Generated, Terms
from tests.support.examples import worth

STAGES = ("prefill", "decode")


class World:
    """A driver with workers that are only numbers: what is booked, sent, held and under way is counted here."""

    def __init__(self, terms, *, num_workers=2, may_hold=False):
        self.now = 0.0
        self.flight = Flight(0, terms)
        self.terms = terms
        self.workers = {stage: set(range(10 * place, 10 * place + num_workers)) for place, stage in enumerate(STAGES)}
        self.names = count(100)
        self.may_hold = may_hold
        self.booked, self.waits_at = {}, set()
        self.at = {}  # legs by worker: those that are sent
        self.held, self.kept = set(), set()  # prefill legs whose KV is held, and legs that leave
        self.is_under_way = self.is_chunked = False  # chunked: more chunks follow
        self.loading, self.got = set(), set()  # decode legs that wait for KV, and those that have it or know it is gone
        self.due = []  # appointments
        self.ends = []

    @property
    def is_over(self):
        return bool(self.ends)

    def begin(self):
        self.act(self.flight.begin(self.now, has_prefill=bool(self.workers["prefill"])))

    def act(self, effects):
        for effect in effects:
            assert not self.is_over, f"{effect} after the end"
            getattr(self, f"on_{type(effect).__name__.lower()}")(effect)

    def on_place(self, effect):
        stage = effect.stage
        assert stage not in self.booked
        assert stage not in self.waits_at
        if not self.workers[stage]:
            self.act(self.flight.nobody("nobody is there", self.now))
        elif self.may_hold:
            self.waits_at.add(stage)
        else:
            self.place(stage)

    def place(self, stage):
        slot = min(self.workers[stage])
        self.booked[stage] = slot
        self.act(self.flight.placed(stage, slot))

    def on_send(self, effect):
        leg = getattr(self.flight, effect.stage)
        assert leg.slot == self.booked[effect.stage]
        self.at[leg] = effect.stage

    def on_release(self, effect):
        self.booked.pop(effect.stage, None)
        self.waits_at.discard(effect.stage)

    def on_abort(self, effect):
        assert self.at.pop(effect.leg) in STAGES
        self.loading.discard(effect.leg)

    def on_keep(self, effect):
        self.kept.add(effect.leg)

    def on_letgo(self, effect):
        (self.held if effect.leg in self.held else self.kept).remove(effect.leg)

    def on_transfer(self, effect):
        assert not self.is_under_way
        assert self.flight.decode in self.loading
        self.is_under_way = True

    def on_extend(self, effect):
        assert self.is_under_way

    def on_drop(self, effect):
        assert self.is_under_way
        self.is_under_way = self.is_chunked = False

    def on_miss(self, effect):
        self.due.append(lambda: self.flight.kv_missed(effect.leg))

    def on_deliver(self, effect):
        self.loading.remove(effect.leg)
        self.got.add(effect.leg)

    def on_lease(self, effect):
        if self.flight.is_leased(effect.leg):
            self.due.append(lambda: self.flight.lease_over(effect.leg))

    def on_decodelater(self, effect):
        self.due.append(lambda: self.flight.to_decode(effect.leg))

    def on_begin(self, effect):
        if effect.is_next:
            self.due.append(lambda: self.begin() or ())
        else:
            self.begin()

    def on_wait(self, effect):
        assert effect.until_s > self.now

    def on_answer(self, effect):
        self.at = {leg: stage for leg, stage in self.at.items() if leg is not self.flight.decode}
        self.ends.append(effect)

    def on_fail(self, effect):
        self.ends.append(effect)

    @property
    def is_empty(self):
        return not (self.booked or self.waits_at or self.at or self.held or self.kept or self.loading) and not (
            self.is_under_way
        )

    # What may happen

    @property
    def slots(self):
        """The workers that are there, and those that leave."""
        legs = [
            leg
            for leg in (self.flight.leaving, self.flight.prefill, self.flight.decode)
            if leg and leg.slot is not None
        ]
        return {slot for slots in self.workers.values() for slot in slots} | {leg.slot for leg in legs}

    @property
    def awaits_blocks(self):
        leg = self.flight.decode
        return leg in self.at and leg.reads_kv and leg not in self.loading and leg not in self.got

    @property
    def answers(self):
        leg = self.flight.decode
        return leg in self.at and (not leg.reads_kv or leg in self.got)

    def meet(self):
        """Keep the next appointment; what has ended meanwhile is not harmed by it."""
        self.act(self.due.pop(0)())

    def come(self, stage):
        self.workers[stage].add(next(self.names))
        self.act(self.flight.wake())
        if stage in self.waits_at:
            self.waits_at.discard(stage)
            self.place(stage)

    def finish(self):
        """Let all go well from now on."""
        while not self.is_over:
            for stage in STAGES:
                if not self.workers[stage]:
                    self.come(stage)
            if self.due:
                self.meet()
            elif self.waits_at:
                stage = min(self.waits_at)
                self.waits_at.discard(stage)
                self.place(stage)
            elif self.is_under_way and not self.is_chunked:
                self.end_transfer()
            elif self.has("prefill"):
                self.end_prefill()
            elif self.awaits_blocks:
                self.give_blocks()
            elif self.flight.waits_for is not None:  # for another worker than those that are there
                self.act(self.flight.wake())
            else:
                assert self.answers, vars(self)
                self.end_decode()
        while self.due:
            self.meet()

    def has(self, stage):
        return any(each == stage for each in self.at.values())

    def give_blocks(self):
        leg = self.flight.decode
        self.loading.add(leg)
        self.act(self.flight.has_blocks())

    def send_chunk(self):
        self.is_chunked = True
        self.act(self.flight.computed(1, is_last=False))

    def end_prefill(self):
        leg = self.flight.prefill
        if self.is_chunked:
            self.is_chunked = False
            self.act(self.flight.computed(1, is_last=True))
        del self.at[leg]
        self.held.add(leg)
        self.act(self.flight.prefill_ended(self.now))

    def end_transfer(self):
        self.is_under_way = False
        self.act(self.flight.kv_arrived())

    def end_decode(self, kind=""):
        del self.at[self.flight.decode]
        self.act(self.flight.ended(self.now, "it went wrong", kind))

    def lose(self, slot):
        """Let a worker be gone, with all that it has."""
        for stage in STAGES:
            self.workers[stage].discard(slot)
            if self.booked.get(stage) == slot:
                del self.booked[stage]
        flight = self.flight
        for leg in [each for each in (flight.leaving, flight.prefill, flight.decode) if each and each.slot == slot]:
            if leg in (flight.leaving, flight.prefill, flight.decode):
                self.held.discard(leg) if leg is flight.prefill else None
                self.act(flight.lost(leg, self.now))
        if not self.workers["prefill"] and "prefill" in self.waits_at:
            self.act(flight.deserted("prefill"))


TERMS = st.builds(
    Terms,
    limit=st.integers(0, 2),
    config=st.builds(
        DisaggregationConfig,
        flow=st.sampled_from(["source-first", "destination-first"]),
        enforce_disagg=st.booleans(),
        prefill_fallback=st.booleans(),
        kv_lease_renewal=st.booleans(),
    ),
    handover_s=st.sampled_from([0.0, 0.1]),
    is_pinned=st.booleans(),
    can_continue=st.booleans(),
    needs_blocks_first=st.booleans(),
)
KINDS = ["lost", "draining", "unknown", "overloaded", "unavailable", "engine", "invalid", "full"]


class Fates(RuleBasedStateMachine):
    """Anything that a driver could report, in any order."""

    @initialize(terms=TERMS, num_workers=st.integers(0, 2), may_hold=st.booleans())
    def arrive(self, terms, num_workers, may_hold):
        self.world = World(terms, num_workers=num_workers, may_hold=may_hold and terms.needs_blocks_first)
        self.world.begin()

    @precondition(lambda self: not self.world.is_over and self.world.waits_at)
    @rule()
    def a_router_places_it(self):
        stage = min(self.world.waits_at)
        if self.world.workers[stage]:
            self.world.waits_at.discard(stage)
            self.world.place(stage)

    @precondition(lambda self: self.world.has("prefill"))
    @rule()
    def its_prefill_ends(self):
        self.world.end_prefill()

    @precondition(lambda self: self.world.has("prefill"))
    @rule(kind=st.sampled_from(KINDS))
    def its_prefill_fails(self, kind):
        del self.world.at[self.world.flight.prefill]
        self.world.act(self.world.flight.prefill_failed(self.world.now, "it went wrong", kind))

    @precondition(lambda self: self.world.awaits_blocks)
    @rule()
    def its_decode_worker_has_blocks(self):
        self.world.give_blocks()

    @precondition(lambda self: self.world.has("prefill") and self.world.flight.decode in self.world.loading)
    @rule()
    def a_chunk_is_computed(self):
        self.world.send_chunk()

    @precondition(lambda self: self.world.is_under_way and not self.world.is_chunked)
    @rule()
    def its_kv_arrives(self):
        self.world.end_transfer()

    @precondition(lambda self: self.world.answers)
    @rule()
    def a_token_comes(self):
        self.world.flight.decode.is_answering = True

    @precondition(lambda self: self.world.answers)
    @rule(kind=st.sampled_from(["", *KINDS]))
    def its_answer_ends(self, kind):
        self.world.end_decode(kind)

    @precondition(lambda self: self.world.answers and not self.world.flight.leaving)
    @rule(generated=st.integers(0, 3), is_answering=st.booleans())
    def its_worker_leaves(self, generated, is_answering):
        flight = self.world.flight
        self.world.workers["decode"].discard(flight.decode.slot)
        self.world.booked.pop("decode", None)  # its router has forgotten the worker
        said = Generated(generated, 0.0, 1.0) if generated else None
        self.world.act(flight.hand_over(said, is_answering=is_answering, has_kv=flight.prefill is not None))

    @precondition(lambda self: self.world.due)
    @rule()
    def something_is_due(self):
        self.world.meet()

    @precondition(lambda self: self.world.slots and not self.world.is_over)
    @rule(place=st.integers(0, 9))
    def a_worker_is_gone(self, place):
        slots = sorted(self.world.slots)
        self.world.lose(slots[place % len(slots)])

    @precondition(lambda self: not self.world.is_over)
    @rule(stage=st.sampled_from(STAGES))
    def a_worker_comes(self, stage):
        self.world.come(stage)

    @rule(after_s=st.sampled_from([0.1, 31.0]))
    def time_passes(self, after_s):
        self.world.now += after_s
        self.world.act(self.world.flight.patience_over(self.world.now))

    @invariant()
    def who_has_ended_has_nothing_left(self):
        if hasattr(self, "world") and self.world.is_over:
            assert self.world.flight.is_over
            assert self.world.is_empty, vars(self.world)

    def teardown(self):
        if hasattr(self, "world"):
            self.world.finish()
            assert len(self.world.ends) == 1
            assert self.world.is_empty, vars(self.world)


Fates.TestCase.settings = settings(max_examples=worth(150), stateful_step_count=25, deadline=None)
TestFates = Fates.TestCase


@pytest.mark.parametrize("end", ["wake", "patience"])
def test_kv_stays_while_its_request_waits_for_a_decode_worker(end):
    world = World(Terms(), num_workers=1)
    world.workers["decode"].clear()
    world.begin()
    world.end_prefill()
    assert world.flight.waits_for == "nobody is there"
    assert world.held == {world.flight.prefill}
    if end == "patience":
        world.now = 30.0
        world.act(world.flight.patience_over(world.now))
        assert world.ends == [Fail("nobody is there", "unavailable")]
    else:
        world.come("decode")
        world.finish()
        assert world.ends == [Answer("stop")]
    assert world.is_empty


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_prompt_that_was_computed_is_not_sent_again_to_the_worker_that_computed_it(is_gone):
    world = World(Terms(config=DisaggregationConfig(flow="destination-first")), num_workers=1)
    world.begin()
    world.give_blocks()
    world.end_prefill()
    if is_gone:
        world.lose(world.flight.prefill.slot)
    world.end_decode("draining")
    world.finish()
    assert world.ends == [Answer("stop")]


def test_kv_that_went_with_its_worker_is_computed_again():
    world = World(Terms(limit=1), num_workers=2)
    world.begin()
    world.end_prefill()
    world.lose(world.flight.prefill.slot)
    world.end_decode("engine")
    assert not world.is_over
    assert world.flight.num_migrations == 1
    world.finish()
    assert world.ends == [Answer("stop")]


def test_patience_that_began_again_does_not_end_when_the_first_would_have():
    world = World(Terms(limit=3), num_workers=0)
    for worker, now in (("first", 0.0), ("second", 20.0)):
        world.now = now
        world.come("decode")
        world.meet() if world.due else world.begin()
        world.lose(world.flight.decode.slot)
        world.meet()
        assert world.flight.waits_for == "nobody is there", worker
    world.act(world.flight.patience_over(30.0))
    assert not world.is_over
    world.act(world.flight.patience_over(50.0))
    assert world.ends == [Fail("nobody is there", "unavailable")]


def test_a_worker_that_leaves_keeps_what_it_has_begun_until_it_answers():
    flight = Flight(0, Terms())
    flight.begin(0.0)
    flight.placed("decode", 3)
    leg = flight.decode
    assert flight.hand_over(None, is_answering=False, has_kv=True) == ()
    said = Generated(1, 0.0, 1.0)
    assert flight.hand_over(said, is_answering=True, has_kv=True) == (Abort(leg), Keep(leg), Place("decode"))
    assert flight.num_generated == 1


def test_a_request_that_has_no_kv_at_a_worker_that_leaves_begins_again_elsewhere():
    flight = Flight(0, Terms())
    flight.begin(0.0)
    flight.placed("decode", 3)
    leg = flight.decode
    effects = flight.hand_over(None, is_answering=False, has_kv=False)
    assert Abort(leg) in effects
    assert effects[-1] == Begin(is_next=False)


def test_a_request_does_without_prefill_workers_but_not_without_any():
    flight = Flight(0, Terms())
    flight.begin(0.0, has_prefill=True)
    assert flight.deserted("prefill")[-1] == Begin()
    flight.begin(0.0)
    assert isinstance(flight.deserted("decode")[-1], Fail)
    assert flight.is_over


def test_a_plain_request_needs_three_inputs():
    flight = Flight(0, Terms())
    assert flight.begin(0.0) == (Place("decode"),)
    assert flight.placed("decode", 3) == (Send("decode"),)
    assert flight.ended(1.0) == (Release("decode"), Answer("stop"))
