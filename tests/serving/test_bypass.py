"""Conditional disaggregation: which prompts a decode worker computes itself; and the rooms of transfers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.life import DisaggregationConfig
from serving.life.bypass import bypasses
from serving.life.room import MAX_ROOM, room


def decide(policy="isl_bounding", *, num_tokens=4000, num_cached=0, prefill_tokens=0, decode_usage=None, **settings):
    return bypasses(
        DisaggregationConfig(conditional_disagg=policy, **settings),
        num_tokens=num_tokens,
        num_cached=num_cached,
        prefill_tokens=prefill_tokens,
        decode_usage=decode_usage,
    )


@pytest.mark.parametrize(
    ("num_tokens", "num_cached", "is_local"),
    [
        (3000, 1200, True),  # 1800 are left, 60%
        (4000, 1000, False),  # 3000 are left
        (2500, 600, False),  # 1900 are left, 76%
    ],
)
def test_a_prompt_is_local_if_little_of_it_is_left(num_tokens, num_cached, is_local):
    assert decide(num_tokens=num_tokens, num_cached=num_cached) is is_local


@pytest.mark.parametrize(
    ("num_tokens", "num_cached", "is_local"),
    [(8000, 5953, True), (8000, 5952, False), (1000, 301, True), (1000, 300, False)],
)
def test_both_bounds_are_exclusive(num_tokens, num_cached, is_local):
    assert decide(num_tokens=num_tokens, num_cached=num_cached) is is_local


def test_the_bounds_are_settings():
    assert decide(num_tokens=4000, num_cached=1000, bypass_max_tokens=3001, bypass_max_ratio=0.8)
    assert not decide(num_tokens=3000, num_cached=1200, bypass_max_tokens=1800)


@pytest.mark.parametrize(("prefill_tokens", "is_local"), [(8192, False), (8193, True)])
def test_a_prompt_is_local_if_the_prefill_worker_is_busy(prefill_tokens, is_local):
    assert decide("prefill_load", prefill_tokens=prefill_tokens) is is_local


@pytest.mark.parametrize(
    ("policy", "when_short", "when_busy", "when_both", "otherwise"),
    [
        ("never", False, False, False, False),
        ("isl_bounding", True, False, True, False),
        ("prefill_load", False, True, True, False),
        ("isl_or_load", True, True, True, False),
    ],
)
def test_a_policy_looks_at_the_prompt_or_the_prefill_worker_or_both(
    policy, when_short, when_busy, when_both, otherwise
):
    short, busy = {"num_cached": 3000}, {"prefill_tokens": 10_000}
    assert [decide(policy, **short), decide(policy, **busy), decide(policy, **short, **busy), decide(policy)] == [
        when_short,
        when_busy,
        when_both,
        otherwise,
    ]


@pytest.mark.parametrize(("usage", "is_local"), [(0.5, True), (0.8, True), (0.81, False), (None, False)])
@pytest.mark.parametrize("policy", ["isl_bounding", "prefill_load", "isl_or_load"])
def test_the_guard_spares_decode_workers_that_are_full_or_do_not_say(policy, usage, is_local):
    asked = {"num_cached": 3000, "prefill_tokens": 10_000, "decode_usage": usage}
    assert decide(policy, **asked, decode_guard=0.8) is is_local
    assert decide(policy, **asked)


def test_a_room_leads_to_the_rank_of_its_prefill_worker():
    assert room(12345, rank=3, dp_size=8) == 98_763
    assert room(12345) == 12_345


@given(st.integers(0, MAX_ROOM), st.integers(1, 512), st.data())
def test_rooms_are_small_enough_and_congruent_to_their_rank(draw, dp_size, data):
    rank = data.draw(st.integers(0, dp_size - 1))
    number = room(draw, rank=rank, dp_size=dp_size)
    assert 0 <= number < 2**63
    assert number % dp_size == rank
    assert 0 <= room(draw) < 2**63


def test_the_largest_room_is_the_largest_draw():
    assert room(2**60 - 1, rank=7, dp_size=8) == 2**63 - 1
    assert room(2**60, rank=7, dp_size=8) == 7
