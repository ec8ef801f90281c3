import pytest

from workloads import Request, Workload
from workloads.pacer import Pacer
from workloads.pacing import LoadConfig


def workload(*rows):
    """Rows of (arrival, session, after, delay)."""
    return Workload(
        "w",
        512,
        [Request(time, 1, 1, (n,), session, after, delay) for n, (time, session, after, delay) in enumerate(rows)],
    )


def test_an_open_loop_never_waits_for_answers():
    pacer = Pacer(workload((0.0, "", (), 0), (0.5, "", (), 0), (0.5, "", (), 0)), LoadConfig())
    assert pacer.next_s() == 0.0
    assert pacer.due(0.0) == [(0, 0.0)]
    assert pacer.due(0.4) == []
    assert pacer.due(3.0) == [(1, 0.5), (2, 0.5)]  # late, but meant for 0.5
    assert not pacer.is_over
    for number in range(3):
        pacer.on_end(number, 4.0)
    assert pacer.is_over


def test_a_limit_delays_sending_but_not_the_intended_time():
    pacer = Pacer(workload((0.0, "", (), 0), (1.0, "", (), 0)), LoadConfig(max_concurrency=1))
    assert pacer.due(0.0) == [(0, 0.0)]
    assert pacer.next_s() is None
    assert pacer.due(2.0) == []
    pacer.on_end(0, 5.0)
    assert pacer.due(5.0) == [(1, 1.0)]


def test_a_closed_loop_means_to_send_when_a_slot_is_free():
    pacer = Pacer(workload(*[(100.0, "", (), 0)] * 3), LoadConfig(concurrency=2))
    assert pacer.due(0.0) == [(0, 0.0), (1, 0.0)]
    pacer.on_end(1, 7.0)
    assert pacer.due(7.5) == [(2, 7.0)]


def test_a_turn_comes_its_think_time_after_the_answer():
    pacer = Pacer(workload((0.0, "s", (), 0), (0.0, "s", (0,), 2.5)), LoadConfig())
    assert pacer.due(0.0) == [(0, 0.0)]
    assert pacer.next_s() is None
    pacer.on_end(0, 4.0)
    assert pacer.next_s() == 6.5
    assert pacer.due(6.5) == [(1, 6.5)]


def test_a_call_waits_for_all_it_depends_on():
    pacer = Pacer(
        workload((0.0, "", (), 0), (0.0, "", (0,), 0), (0.0, "", (0,), 0), (0.0, "", (1, 2), 1.0)), LoadConfig()
    )
    pacer.due(0.0)
    pacer.on_end(0, 1.0)
    assert pacer.due(1.0) == [(1, 1.0), (2, 1.0)]
    pacer.on_end(2, 2.0)
    assert pacer.next_s() is None
    pacer.on_end(1, 3.0)
    assert pacer.due(9.0) == [(3, 4.0)]


def test_what_waits_for_a_failed_call_is_never_sent():
    pacer = Pacer(workload((0.0, "", (), 0), (0.0, "", (0,), 0), (0.0, "", (1,), 0)), LoadConfig())
    pacer.due(0.0)
    assert pacer.on_end(0, 1.0, is_failed=True) == [1, 2]
    assert pacer.is_over


def test_sessions_are_kept_in_progress():
    rows = [(0.0, "a", (), 0), (0.0, "b", (), 0), (0.0, "c", (), 0), (0.0, "a", (0,), 5.0)]
    pacer = Pacer(workload(*rows), LoadConfig(session_concurrency=2))
    assert pacer.due(0.0) == [(0, 0.0), (1, 0.0)]
    pacer.on_end(0, 1.0)  # its session thinks, so there is no room for another
    assert pacer.due(2.0) == []
    pacer.on_end(1, 3.0)
    assert pacer.due(3.0) == [(2, 3.0)]
    assert pacer.due(6.0) == [(3, 6.0)]


def test_only_the_window_counts():
    load = LoadConfig(warmup_s=10, measure_s=20)
    assert [load.is_measured(time) for time in (9.9, 10.0, 30.0, 30.1)] == [False, True, True, False]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"concurrency": 0}, "concurrency must be at least 1, not 0"),
        ({"concurrency": 1, "max_concurrency": 2}, "concurrency and max_concurrency cannot be combined"),
        ({"warmup_s": -1.0}, "warmup_s must be at least 0, not -1.0"),
        ({"measure_s": 0.0}, "measure_s must be greater than 0, not 0.0"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, problem):
    with pytest.raises(ValueError, match=problem):
        LoadConfig(**settings)


def test_streams_begin_evenly_and_send_their_next_request_at_once():
    pacer = Pacer(workload(*[(0.0, "", (), 0)] * 8), LoadConfig(concurrency=4, ramp_s=2.0))
    assert pacer.due(0.0) == [(0, 0.0)]
    assert pacer.next_s() == 0.5
    assert pacer.due(0.6) == [(1, 0.5)]
    pacer.on_end(0, 0.7)
    assert pacer.due(0.7) == [(2, 0.7)]
    assert pacer.due(9.0) == [(3, 1.0), (4, 1.5)]
    assert pacer.next_s() is None
    pacer.on_end(1, 9.5)
    assert pacer.due(9.5) == [(5, 9.5)]


def test_sessions_begin_evenly_and_send_their_next_turn_at_once():
    rows = [(0.0, "a", (), 0), (0.0, "a", (0,), 0), (0.0, "b", (), 0), (0.0, "c", (), 0)]
    pacer = Pacer(workload(*rows), LoadConfig(session_concurrency=2, ramp_s=2.0))
    assert pacer.due(0.0) == [(0, 0.0)]
    pacer.on_end(0, 0.3)
    assert pacer.due(0.3) == [(1, 0.3)]
    assert pacer.next_s() == 1.0
    assert pacer.due(1.0) == [(2, 1.0)]
    pacer.on_end(1, 1.4)
    assert pacer.due(1.4) == [(3, 1.4)]


def test_streams_only_begin_evenly_in_a_closed_loop():
    with pytest.raises(ValueError, match=r"ramp_s is 2, but nothing grows without concurrency"):
        LoadConfig(ramp_s=2.0, max_concurrency=4)
