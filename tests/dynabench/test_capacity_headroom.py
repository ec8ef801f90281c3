"""How much more load a layout takes: the bisection, and what is said of it."""

import pytest

from dynabench.arm import Settings
from dynabench.capacity.candidates import heavier, reached
from dynabench.capacity.headroom import MOST, PRECISION, next_load
from reports.capacity.answer import Held
from reports.figures.outcomes import STEADY_QUEUE, Outcome
from workloads.pacing import LoadConfig

MISSED = [Outcome("ttft.p99 <= 2000 ms", "missed", 2.5, -0.25), Outcome("itl.p99 <= 60 ms", "met", 0.05, 0.1)]


@pytest.mark.parametrize("cliff", [1.0, 1.02, 1.07, 1.1, 1.24, 1.25, 1.33, 1.49, 1.5, 1.77, 1.99])
def test_a_cliff_is_found_to_a_twentieth_in_a_few_steps(cliff):
    met, missed, num_steps = 1.0, None, 0
    while (load := next_load(met, missed)) is not None:
        num_steps += 1
        met, missed = (load, missed) if load <= cliff else (met, load)
    assert met <= cliff < missed <= met * (1 + PRECISION)
    assert num_steps <= 6


def test_no_more_than_twice_the_load_is_tried():
    assert [next_load(1.0, None), next_load(1.5, None), next_load(MOST, None)] == [1.5, 2.0, None]


def test_the_load_to_which_it_holds_is_said_with_what_it_misses_beyond():
    assert str(Held(1.18, 1.24, MISSED)) == "It holds to 1.18x of this traffic, and misses ttft.p99 at 1.24x."
    grows = [Outcome(STEADY_QUEUE, "missed", reason="the queue grows: 2 requests were waiting at first, 90 at the end")]
    why = "at 1.24x, the queue grows, because requests arrive faster than they are answered"
    assert str(Held(1.18, 1.24, grows)) == f"It holds to 1.18x of this traffic, and {why}."
    assert str(Held(2.0)) == "It holds to 2x of this traffic or more."
    assert Held(1.06, 1.1, MISSED).is_near_cliff
    assert str(Held(1.06, 1.1, MISSED)).startswith("It is close to a cliff: it holds to 1.06x of this traffic, ")
    assert not Held(1.1, 1.14, MISSED).is_near_cliff


@pytest.mark.parametrize(("load", "rounded", "up"), [(1.88, 1.875, 2.0), (1.06, 1.0, 1.125), (1.5, 1.5, 1.5)])
def test_a_closed_loop_has_whole_numbers_in_flight(load, rounded, up):
    closed = Settings(load=LoadConfig(concurrency=8))
    assert (reached(closed, load, round), reached(closed, load)) == (rounded, up)
    assert heavier(closed, rounded).load.concurrency == 8 * rounded
    assert reached(Settings(), load, round) == load
