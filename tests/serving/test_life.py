"""What becomes of a request, stage by stage: the drawing and the table of `serving.life.life`, row by row."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.life import DisaggregationConfig, Finished, Life, PlaceAgain, Refused
from serving.life.life import ELSEWHERE, MAX_REFUSALS, PATIENCE_S

NEVER_BEGUN = sorted(ELSEWHERE)
HOPELESS = ["invalid", "full", "engine"]


def life(limit=0, *, is_pinned=False, **settings):
    return Life(limit, is_pinned=is_pinned, config=DisaggregationConfig(**settings))


def prefilling(limit=0, **settings):
    """Return a request that is at a prefill worker."""
    started = life(limit, **settings)
    assert started.next_stage(now=100.0, has_prefill=True) == "prefill"
    return started


def decoding(limit=0, **settings):
    """Return a request that a prefill worker has prefilled and that is at a decode worker."""
    started = prefilling(limit, **settings)
    assert end(started, "", instance_id=7) == PlaceAgain()
    assert started.next_stage(now=100.0, has_prefill=True) == "decode"
    return started


def end(state, kind, instance_id=1, is_full=False, now=100.0):
    return state.on_end("it is gone", kind, instance_id, is_full=is_full, now=now)


def refused(kind):
    return Refused("it is gone", kind)


# The next stage


def test_a_request_goes_to_a_prefill_worker_if_there_is_one():
    assert life().next_stage(now=100.0, has_prefill=True) == "prefill"
    assert life().next_stage(now=100.0, has_prefill=False) == "decode"


def test_a_request_that_bypasses_prefill_workers_is_decoded_at_once():
    assert life().next_stage(now=100.0, has_prefill=True, bypasses=True) == "decode"


def test_a_request_for_one_instance_is_decoded_there():
    assert life(is_pinned=True).next_stage(now=100.0, has_prefill=True) == "decode"


def test_without_prefill_workers_a_request_waits_for_one_if_they_are_enforced_and_not_forever():
    state = life(enforce_disagg=True)
    assert not state.waits_until
    for now in (100.0, 100.0 + PATIENCE_S / 2):  # asking again prolongs nothing
        assert state.next_stage(now=now) == Refused(
            "there is no prefill worker, and enforce_disagg is on", "unavailable"
        )
    assert state.waits_until == 100.0 + PATIENCE_S
    assert end(state, "unavailable", now=99.9 + PATIENCE_S) == PlaceAgain(waits=True)
    assert end(state, "unavailable", now=100.0 + PATIENCE_S) == refused("unavailable")
    assert state.next_stage(now=101.0, has_prefill=True) == "prefill"


def test_a_request_that_finds_a_prefill_worker_at_once_may_not_wait():
    state = life(enforce_disagg=True)
    assert state.next_stage(now=100.0, has_prefill=True) == "prefill"
    assert not state.waits_until


@pytest.mark.parametrize("bypassing", [{"is_pinned": True}, {"bypasses": True}])
def test_what_needs_no_prefill_worker_does_not_fail_for_want_of_one(bypassing):
    state = life(enforce_disagg=True, is_pinned=bypassing.get("is_pinned", False))
    assert state.next_stage(now=100.0, bypasses=bypassing.get("bypasses", False)) == "decode"


def test_what_was_prefilled_is_decoded_though_the_prefill_workers_have_gone():
    assert decoding(enforce_disagg=True).next_stage(now=100.0, has_prefill=False) == "decode"


def test_a_refused_stage_may_be_asked_for_again():
    state = prefilling(limit=1, enforce_disagg=True)
    end(state, "lost", now=100.0)
    assert isinstance(state.next_stage(now=100.0, has_prefill=False), Refused)
    assert state.waits_until == 100.0 + PATIENCE_S
    assert state.next_stage(now=100.0, has_prefill=True) == "prefill"


# Ended well


def test_a_request_that_was_prefilled_is_to_be_decoded_then():
    state = prefilling()
    assert end(state, "") == PlaceAgain()
    assert state.is_prefilled
    assert state.next_stage(now=100.0, has_prefill=True) == "decode"
    assert end(state, "") == Finished("stop")


def test_an_engine_that_ends_without_saying_why_is_done():
    assert end(life(limit=3), "") == Finished("stop")


def test_what_has_all_its_tokens_is_finished_though_its_instance_is_lost():
    assert end(life(limit=3), "lost", is_full=True) == Finished("length")


def test_a_request_that_waits_to_be_decoded_may_wait_for_a_decode_worker():
    state = prefilling()
    end(state, "", now=100.0)
    assert state.waits_until == 100.0 + PATIENCE_S
    state.next_stage(now=100.0, has_prefill=True)
    assert end(state, "unavailable", now=101.0) == PlaceAgain(waits=True)
    assert state.failed_at == set()


# Never begun


@pytest.mark.parametrize("kind", NEVER_BEGUN)
@pytest.mark.parametrize("started", [life, prefilling, decoding])
def test_a_call_that_was_never_begun_goes_elsewhere_eight_times_and_is_no_migration(started, kind):
    state = started()
    stage = state.stage
    for instance in range(8):
        assert end(state, kind, instance) == PlaceAgain()
        assert state.next_stage(now=100.0, has_prefill=started is not life) == stage
    assert end(state, kind, instance_id=8) == refused(kind)
    assert state.num_migrations == 0


@pytest.mark.parametrize("kind", ["draining", "unknown"])
@pytest.mark.parametrize("before", ["lost", "draining"])
@pytest.mark.parametrize("started", [life, prefilling, decoding])
def test_an_instance_that_is_about_to_leave_is_called_again_after_pauses_while_the_request_may_wait(
    started, before, kind
):
    state = started(limit=1)
    end(state, before, instance_id=1, now=100.0)
    for number in range(2 * MAX_REFUSALS):
        assert end(state, kind, instance_id=1, now=100.0 + number) == PlaceAgain(waits=True)
    assert end(state, kind, instance_id=1, now=100.0 + PATIENCE_S) == refused(kind)


def test_a_prompt_that_decode_workers_may_compute_does_not_wait_for_a_prefill_worker_that_is_about_to_leave():
    state = prefilling(prefill_fallback=True)
    for _ in range(MAX_REFUSALS + 1):
        assert end(state, "draining", instance_id=1) == PlaceAgain()
    assert state.next_stage(now=100.0, has_prefill=True) == "decode"


def test_a_request_that_one_worker_computes_whole_is_not_prefilled_apart():
    for has_prefill in (True, False):
        state = Life(0, config=DisaggregationConfig(enforce_disagg=True), is_whole=True)
        assert state.next_stage(now=100.0, has_prefill=has_prefill) == "decode"


def test_refusals_count_across_stages():
    state = prefilling()
    for instance in range(5):
        assert end(state, "overloaded", instance) == PlaceAgain()
    end(state, "", instance_id=5)
    assert state.next_stage(now=100.0, has_prefill=True) == "decode"
    for instance in range(6, 9):
        assert end(state, "draining", instance) == PlaceAgain()
    assert end(state, "overloaded", instance_id=9) == refused("overloaded")
    assert state.failed_at == {0, 1, 2, 3, 4, 6, 7, 8}


def test_a_call_to_the_one_instance_asked_for_goes_nowhere_else():
    assert end(life(is_pinned=True), "draining") == refused("draining")


def test_a_lost_request_for_one_instance_goes_nowhere_else_whatever_its_limit_is():
    state = life(limit=3, is_pinned=True)
    assert end(state, "lost") == refused("lost")
    assert state.num_migrations == 0


# Lost


def test_a_lost_request_goes_on_as_often_as_its_limit_says():
    state = life(limit=2)
    assert end(state, "lost", instance_id=1) == PlaceAgain()
    assert end(state, "lost", instance_id=2) == PlaceAgain()
    assert (state.num_migrations, state.failed_at) == (2, {1, 2})
    exhausted = Refused("it is gone and the migration limit of 2 is exhausted", "lost")
    assert end(state, "lost", instance_id=3) == exhausted
    assert end(life(limit=0), "lost") == refused("lost")


def test_a_request_lost_while_decoding_is_prefilled_again():
    state = decoding(limit=1)
    assert end(state, "lost") == PlaceAgain()
    assert not state.is_prefilled
    assert state.next_stage(now=100.0, has_prefill=True) == "prefill"
    end(state, "")
    assert state.next_stage(now=100.0, has_prefill=True) == "decode"
    assert end(state, "lost") == Refused("it is gone and the migration limit of 1 is exhausted", "lost")


def test_a_request_lost_while_decoding_is_decoded_whole_if_no_prefill_worker_is_left():
    state = decoding(limit=1)
    end(state, "lost")
    assert state.next_stage(now=100.0, has_prefill=False) == "decode"
    assert not state.is_prefilled


def test_a_request_lost_while_prefilling_is_prefilled_elsewhere():
    state = prefilling(limit=1)
    assert end(state, "lost", instance_id=4) == PlaceAgain()
    assert (state.next_stage(now=100.0, has_prefill=True), state.num_migrations, state.failed_at) == ("prefill", 1, {4})


def test_a_prefill_worker_has_no_last_token_to_give():
    assert end(prefilling(limit=1), "lost", is_full=True) == PlaceAgain()


# Unavailable


def test_it_may_wait_for_an_instance_only_after_it_was_lost_and_not_forever():
    state = life(limit=1)
    assert not state.waits_until
    end(state, "lost", now=100.0)
    assert state.waits_until == 100.0 + PATIENCE_S


def test_a_router_that_has_nobody_to_pass_it_on_to_is_asked_again_while_it_may_wait():
    state = life(limit=1)
    assert end(state, "unavailable") == refused("unavailable")
    end(state, "lost", instance_id=1, now=100.0)
    assert end(state, "unavailable", instance_id=2, now=101.0) == PlaceAgain(waits=True)
    assert state.failed_at == {1}  # the router is fine
    assert end(state, "unavailable", now=100.0 + PATIENCE_S) == refused("unavailable")


# Anything else


@pytest.mark.parametrize("kind", HOPELESS)
@pytest.mark.parametrize("started", [life, prefilling, decoding])
def test_what_would_fail_anywhere_is_refused(started, kind):
    assert end(started(limit=3), kind) == refused(kind)


@pytest.mark.parametrize("kind", ["unavailable", "lost", *HOPELESS])
def test_with_fallback_a_decode_worker_computes_a_prompt_whose_prefill_failed(kind):
    state = prefilling(prefill_fallback=True)
    assert end(state, kind) == PlaceAgain()
    assert state.next_stage(now=100.0, has_prefill=True) == "decode"
    assert not state.is_prefilled
    assert end(state, kind, now=200.0) == refused(kind)


def test_with_fallback_too_many_refusals_lead_to_a_decode_worker():
    state = prefilling(prefill_fallback=True)
    for _ in range(MAX_REFUSALS):
        end(state, "overloaded")
        assert state.next_stage(now=100.0, has_prefill=True) == "prefill"
    end(state, "overloaded")
    assert state.next_stage(now=100.0, has_prefill=True) == "decode"


def test_with_fallback_a_lost_prefill_is_tried_elsewhere_first():
    state = prefilling(limit=1, prefill_fallback=True)
    end(state, "lost")
    assert state.next_stage(now=100.0, has_prefill=True) == "prefill"
    end(state, "lost")
    assert state.next_stage(now=100.0, has_prefill=True) == "decode"


def test_after_a_fallback_a_lost_request_asks_no_prefill_worker_any_more():
    state = prefilling(limit=1, prefill_fallback=True)
    end(state, "engine")
    state.next_stage(now=100.0, has_prefill=True)
    end(state, "lost")
    assert state.next_stage(now=100.0, has_prefill=True) == "decode"


def test_after_a_fallback_no_prefill_worker_is_enforced():
    state = prefilling(prefill_fallback=True, enforce_disagg=True)
    end(state, "engine")
    assert state.next_stage(now=100.0, has_prefill=False) == "decode"


# Every life ends

KINDS = st.sampled_from(["", "lost", "unavailable", *NEVER_BEGUN, *HOPELESS])


@given(st.integers(0, 4), st.booleans(), st.booleans(), st.data())
def test_every_life_ends_after_a_bounded_number_of_placements(limit, prefill_fallback, is_pinned, data):
    state, now, num_placements, num_pauses = (
        life(limit, is_pinned=is_pinned, prefill_fallback=prefill_fallback),
        0.0,
        0,
        0,
    )
    # Each migration begins with a prefill; the rest are placed once more each.
    bound = 2 * (limit + 1) + MAX_REFUSALS + 1
    while True:
        stage = state.next_stage(now=now, has_prefill=data.draw(st.booleans()), bypasses=data.draw(st.booleans()))
        assert not (state.is_prefilled and stage == "prefill")
        num_placements += 1
        kind, is_full = data.draw(KINDS), data.draw(st.booleans())
        now += data.draw(st.floats(0, 2 * PATIENCE_S))
        follows = end(state, kind, data.draw(st.integers(0, 9)), is_full, now)
        if not isinstance(follows, PlaceAgain):
            break
        assert state.waits_until >= now
        num_pauses += follows.waits
        assert num_placements - num_pauses <= bound
    assert isinstance(follows, Refused) == (kind != "" and not (is_full and state.stage == "decode"))


def test_a_router_that_stays_without_instances_is_not_asked_forever():
    state, now, num_pauses = life(limit=1), 0.0, 0
    end(state, "lost", now=now)
    while isinstance(follows := end(state, "unavailable", now=now), PlaceAgain):
        assert follows.waits
        now += 0.5
        num_pauses += 1
    assert num_pauses == PATIENCE_S / 0.5
