"""Tests of carrying out many calls at once."""

import contextlib
import os
import signal
import threading
import time
from multiprocessing import active_children, get_context

import pytest

from dynabench.experiment import cost
from dynabench.experiment.cost import num_processes
from dynabench.experiment.parallel import in_parallel
from dynabench.interrupt import Interrupt


def late(number):
    time.sleep(0.02)
    return number, os.getpid()


def test_calls_are_spread_over_as_many_processes_as_were_asked_for():
    for _ in range(3):
        with Interrupt() as interrupt:
            results = dict(in_parallel([(late, (n,)) for n in range(6)], 2, interrupt=interrupt))
        assert {place: number for place, (number, _) in results.items()} == {n: n for n in range(6)}
        pids = {pid for _, pid in results.values()}
        assert 1 <= len(pids) <= 2
        assert os.getpid() not in pids


def test_a_single_call_is_carried_out_here():
    with Interrupt() as interrupt:
        results = list(in_parallel([(late, (1,))], 2, interrupt=interrupt))
    assert results == [(0, (1, os.getpid()))]


def known_here():
    return list(KNOWN)


KNOWN = []


def test_processes_know_what_this_one_knew_when_they_began():
    KNOWN.append("a workload")
    try:
        with Interrupt() as interrupt:
            results = list(in_parallel([(known_here, ())] * 2, 2, interrupt=interrupt))
    finally:
        KNOWN.clear()
    assert [found for _, found in results] == [["a workload"]] * 2


def test_calls_whose_results_nobody_takes_any_more_end(tmp_path):
    """Whoever takes results fails, as on a full disk: the calls under way are told to end."""
    with Interrupt() as interrupt:
        results = in_parallel([(late, (1,)), (until_raised, (interrupt.flag,))], 2, interrupt=interrupt)
        next(results)
        results.close()
        assert interrupt.flag.is_raised()


def until_raised(flag):
    while not flag.is_raised():
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("jobs", "work_s", "expected"),
    [(0, 0.0, 1), (0, 0.49, 1), (0, 0.5, 2), (0, 0.75, 3), (0, 1e3, 8), (1, 1e3, 1), (3, 0.01, 3)],
)
def test_processes_are_as_many_as_have_enough_to_do_unless_a_number_is_asked_for(monkeypatch, jobs, work_s, expected):
    monkeypatch.setattr(cost, "num_cores", lambda: 8)
    assert num_processes(jobs, work_s) == expected


def test_two_short_runs_of_a_small_workload_are_not_worth_a_process():
    assert cost.expected_s(2 * 1200) < 2 * cost.WORTH_S


def deaf():
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(60)


def test_a_second_signal_kills_calls_that_never_end_and_no_other_process():
    def ask_twice():
        for _ in range(2):
            time.sleep(1.0)
            os.kill(os.getpid(), signal.SIGTERM)

    other = get_context("spawn").Process(target=time.sleep, args=(60,))
    other.start()
    asking = threading.Thread(target=ask_twice)
    with Interrupt() as interrupt, pytest.raises(KeyboardInterrupt):
        asking.start()
        list(in_parallel([(deaf, ())] * 2, 2, interrupt=interrupt))
    asking.join()
    try:
        assert active_children() == [other]
    finally:
        other.kill()
        other.join()


def test_a_single_call_is_carried_out_elsewhere_if_it_is_to_run_apart():
    with Interrupt() as interrupt:
        [(_, (_, pid))] = in_parallel([(late, (1,))], 1, interrupt=interrupt, is_apart=True)
    assert pid != os.getpid()
