import math

import numpy as np
import pytest

from workloads import Request, Workload, WorkloadError
from workloads.describe import describe_workload
from workloads.shape import ShapeConfig, scale_lengths, shape
from workloads.workload import select


def test_shaping_cuts_scales_caps_and_starts_at_zero():
    requests = [Request(float(second), 1500, 10, (0, second + 1, second + 100)) for second in range(10)]
    shaped = shape(Workload("w", 512, requests), ShapeConfig(start_s=2, duration_s=5, rate_scale=2, cap_isl=600))
    assert [request.arrival_s for request in shaped] == [0, 0.5, 1, 1.5, 2]
    assert {(request.input_length, len(request.hash_ids)) for request in shaped} == {(600, 2)}
    assert len(shaped.notes) == 3
    with pytest.raises(WorkloadError, match="no request is left"):
        shape(Workload("w", 512, requests), ShapeConfig(start_s=50))


def test_spreading_ticks_keeps_order_and_stays_inside_the_tick():
    requests = [Request(3.0 * (number // 5), 1, 1, (number,)) for number in range(20)]
    spread = shape(Workload("w", 512, requests), ShapeConfig(spread_ticks=True))
    arrivals = np.array([request.arrival_s for request in spread])
    assert [request.hash_ids for request in spread] == [request.hash_ids for request in requests]
    assert (np.diff(arrivals) >= 0).all()
    assert len(set(arrivals)) == 20


def test_longer_prompts_share_as_much(workload):
    longer = scale_lengths(workload, 2.0, 0.5)
    assert longer.block_size == 1024
    assert describe_workload(longer).isl["mean"] == pytest.approx(2 * describe_workload(workload).isl["mean"], rel=0.01)
    assert describe_workload(longer).osl["mean"] == pytest.approx(describe_workload(workload).osl["mean"] / 2, rel=0.02)
    assert describe_workload(longer).endless_cache_hit_share == pytest.approx(
        describe_workload(workload).endless_cache_hit_share, abs=1e-3
    )


def test_new_arrivals_leave_the_order_and_the_sharing(workload):
    shaped = shape(workload, ShapeConfig(arrival="constant", rate=2.0))
    assert [request.hash_ids for request in shaped] == [request.hash_ids for request in workload]
    assert shaped.requests[2].arrival_s == 1.0
    kept = shape(workload, ShapeConfig(arrival="poisson"))
    assert describe_workload(kept).rate == pytest.approx(describe_workload(workload).rate, rel=0.1)


def test_cutting_keeps_what_requests_wait_for():
    rows = [Request(float(n), 1, 1, (n,), "", (n - 1,) if n else ()) for n in range(5)]
    assert [request.after for request in select(rows, [1, 2, 4])] == [(), (0,), ()]


@pytest.mark.parametrize(
    ("settings", "is_said"),
    [
        ({"max_requests": 3}, True),
        ({"duration_s": 0.5}, True),
        ({"start_s": 9.5}, True),
        ({"max_requests": 4}, False),
        ({"rate_scale": 2.0}, False),
    ],
)
def test_a_cut_that_leaves_no_turn_that_waits_says_so(settings, is_said):
    firsts = [Request(0.0, 8, 4, (n,), f"session {n}") for n in range(3)]
    seconds = [Request(10.0, 8, 4, (n,), f"session {n}", (n,)) for n in range(3)]
    notes = shape(Workload("w", 8, firsts + seconds), ShapeConfig(**settings)).notes
    said = "no turn is left that waits for an answer; --thin keeps whole sessions"
    assert (said in notes) is is_said, notes


def test_first_turns_alone_are_nothing_that_a_cut_made():
    alone = [Request(0.0, 8, 4, (n,), f"session {n}") for n in range(3)]
    assert shape(Workload("w", 8, alone), ShapeConfig(max_requests=2)).notes == ("cut to 2 requests",)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"rate": 2.0}, "choose a process with --arrival"),
        ({"arrival": "poisson", "rate_scale": 2.0}, "with --arrival, use --rate"),
        ({"arrival": "poisson", "rate_profile": "ramp"}, "rate_to is the target of a ramp or sine"),
        ({"thin": 1.5}, "thin must be greater than 0 and at most 1, not 1.5"),
        ({"rate_scale": -1.0}, "rate_scale must be greater than 0, not -1.0"),
        ({"start_s": -1.0}, "start_s must be at least 0, not -1.0"),
        ({"max_requests": 0}, "max_requests must be at least 1, not 0"),
        ({"arrival": "poisson", "rate": math.inf}, "rate must be greater than 0, not inf"),
        ({"isl_scale": 0.0}, "isl_scale must be greater than 0"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, problem):
    with pytest.raises(ValueError, match=problem):
        ShapeConfig(**settings)


def test_how_answers_end_is_a_setting_and_none_leaves_it_as_the_workload_says():
    requests = [Request(0.0, 10, 5, (0,)), Request(1.0, 10, 5, (1,), ends="stop")]
    ends = {
        wanted: [request.ends for request in shape(Workload("w", 16, requests), ShapeConfig(ends=wanted))]
        for wanted in (None, "length", "stop")
    }
    assert ends == {None: ["length", "stop"], "length": ["length"] * 2, "stop": ["stop"] * 2}


@pytest.mark.parametrize(
    ("ends", "context", "limit"),
    [
        ("length", None, 40),
        ("length", 120, 40),
        ("stop", None, 80),  # twice its length
        ("stop", 10_000, 80),
        ("stop", 160, 50),  # half of what the context leaves beyond its 140 tokens
        ("stop", 141, 40),  # no room in which an engine would not know the end
        ("stop", 120, 40),
    ],
)
def test_the_limit_of_an_answer_lies_beyond_its_eos_where_the_context_has_room(ends, context, limit):
    assert Request(0.0, 100, 40, (0,), ends=ends).max_tokens(context) == limit


@pytest.mark.parametrize("config", [{"rate_scale": 1e-300}, {"arrival": "poisson", "rate": 1e-300}])
def test_times_that_no_clock_has_are_refused(workload, config):
    with pytest.raises(WorkloadError, match=r"the last request would arrive after .*e\+.* s; the limit is 1e\+11 s"):
        shape(workload, ShapeConfig(**config))
