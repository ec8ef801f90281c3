import math

import msgspec
import pytest

from workloads import Workload, WorkloadError, formats
from workloads.describe import describe_workload
from workloads.formats import mooncake
from workloads.synthesize import SynthConfig, synthesize


def test_the_same_seed_makes_the_same_workload():
    config = SynthConfig(requests=200, turns=3, prefix_depth=2, arrival="gamma", burstiness=0.5)
    assert synthesize(config) == synthesize(config)
    assert synthesize(config) != synthesize(SynthConfig(requests=200, turns=3, prefix_depth=2, seed=1))


def test_a_synthetic_workload_is_a_valid_trace(tmp_path):
    requests = synthesize(SynthConfig(requests=300, turns=4, block_size=64, isl=100))
    with (tmp_path / "s.jsonl").open("wb") as file:
        mooncake.write(Workload("s", 64, requests), file)
    again = formats.read(tmp_path / "s.jsonl", format="mooncake", block_size=64)
    assert len(again) == 300
    assert [request.hash_ids for request in again] == [request.hash_ids for request in requests]


def test_synthetic_lengths_rates_and_sharing_follow_the_dials():
    config = SynthConfig(requests=4000, rate=8, isl=600, osl=50, prefix_blocks=2, prefix_groups=4)
    facts = describe_workload(Workload("s", 512, synthesize(config)))
    assert facts.isl["mean"] == pytest.approx(1024 + 600, rel=0.05)
    assert facts.osl["mean"] == pytest.approx(50, rel=0.05)
    assert facts.rate == pytest.approx(8, rel=0.08)
    assert facts.burstiness_cv == pytest.approx(1, abs=0.1)
    assert facts.endless_cache_hit_share == pytest.approx(1024 / 1624, abs=0.02)
    bursty = describe_workload(
        Workload("b", 512, synthesize(SynthConfig(requests=4000, arrival="gamma", burstiness=0.25)))
    )
    assert bursty.burstiness_cv == pytest.approx(2, abs=0.3)  # 1 / sqrt(burstiness)


def test_ids_are_chained():
    parents = {}
    for request in synthesize(SynthConfig(requests=500, turns=3, prefix_depth=3, prefix_groups=6)):
        for place, hash_id in enumerate(request.hash_ids):
            assert parents.setdefault(hash_id, request.hash_ids[:place]) == request.hash_ids[:place]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"rate": 0.0}, "rate must be greater than 0, not 0.0"),
        ({"rate": math.inf}, "rate must be greater than 0, not inf"),
        ({"turns": 0}, "turns must be at least 1, not 0"),
        ({"prefix_blocks": -1}, "prefix_blocks must be at least 0, not -1"),
        ({"think_time_s": math.nan}, "think_time_s must be at least 0, not nan"),
        ({"prefix_blocks": 4, "max_isl": 2048}, "a prefix of 4 blocks of 512 tokens leaves no room below max_isl 2048"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, problem):
    with pytest.raises(ValueError, match=problem):
        SynthConfig(**settings)


def test_priorities_are_drawn_for_whole_sessions_and_change_nothing_else():
    plain, ranked = (synthesize(SynthConfig(requests=400, turns=3, priority_levels=levels)) for levels in (1, 3))
    found = [request.priority for request in ranked]
    assert [found.count(level) / 400 for level in range(3)] == [pytest.approx(1 / 3, abs=0.1)] * 3
    assert [msgspec.structs.replace(request, priority=0) for request in ranked] == plain


def test_a_rate_that_no_clock_can_hold_is_refused():
    with pytest.raises(WorkloadError, match="the last request would arrive after"):
        synthesize(SynthConfig(requests=20, rate=1e-300))


def test_turns_that_wait_for_answers_come_after_the_turn_before_them_and_its_think_time():
    fixed, waiting = (
        synthesize(SynthConfig(requests=300, turns=4, think_time_s=3, wait_for_answers=waits))
        for waits in (False, True)
    )
    last = {}
    for number, request in enumerate(waiting):
        before = last.get(request.session)
        assert request.after == (() if before is None else (before,))
        thought = 0.0 if before is None else request.arrival_s - waiting[before].arrival_s
        assert request.delay_s == pytest.approx(thought)
        last[request.session] = number
    assert len(last) < 300
    assert [msgspec.structs.replace(one, session="", after=(), delay_s=0.0) for one in waiting] == fixed


def test_single_requests_wait_for_nothing():
    alone = synthesize(SynthConfig(requests=20, wait_for_answers=True))
    assert alone == synthesize(SynthConfig(requests=20))
