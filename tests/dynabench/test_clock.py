"""The clock of virtual time."""

import pytest

from dynabench.virtual.clock import ARRIVAL, COMPLETION, SCHEDULING, Clock
from dynabench.virtual.processes import Processes


def test_at_one_instant_completions_come_before_arrivals_and_arrivals_before_scheduling():
    clock, seen = Clock(), []
    for name, priority in (("schedule", SCHEDULING), ("arrive", ARRIVAL), ("complete", COMPLETION), ("again", ARRIVAL)):
        clock.at(1.0, priority, lambda name=name: seen.append(name))
    clock.run()
    assert seen == ["complete", "arrive", "again", "schedule"]


def test_a_time_is_kept_as_it_is_given():
    clock, seen = Clock(), []
    clock.at(0.1, ARRIVAL, lambda: clock.at(0.1 + 0.2, ARRIVAL, lambda: seen.append(clock.now)))
    assert clock.peek() == 0.1
    clock.run()
    assert seen == [0.1 + 0.2]
    assert clock.peek() == float("inf")


def test_processes_of_simpy_run_between_appointments():
    clock, seen = Clock(), []
    processes = Processes(clock)

    def process():
        yield processes.timeout(2.0)
        seen.append(("process", clock.now))

    processes.process(process())
    clock.at(1.0, ARRIVAL, lambda: seen.append(("appointment", clock.now)))
    clock.at(3.0, ARRIVAL, lambda: seen.append(("late", clock.now)))
    processes.run(until=2.5)
    assert seen == [("appointment", 1.0), ("process", 2.0)]


def test_a_run_until_an_event_goes_on_with_whoever_else_waited_for_it():
    processes, seen = Processes(Clock()), []
    event = processes.timeout(1.0, value="done")

    def process():
        seen.append((yield event))

    def waiting():
        yield processes.timeout(0.5)
        processes.process(process())

    processes.process(waiting())
    assert processes.run(until=event) == "done"
    assert seen == []  # the run ended before it was this process's turn
    processes.run()
    assert seen == ["done"]


def test_a_failure_that_nobody_takes_is_raised():
    processes = Processes(Clock())

    def process():
        yield processes.timeout(1.0)
        raise KeyError("lost")

    processes.process(process())
    with pytest.raises(KeyError, match="lost"):
        processes.run()
