"""By how much demand exceeded what was expected of it."""

import pytest

from serving.planner.surprises import FEWEST, Surprises


def seen(rows, ahead_s=10.0, memory_s=1000.0):
    """Return what is known after (demand, expected) rows of 10 s each."""
    made = Surprises(ahead_s, memory_s)
    for place, (demand, expected) in enumerate(rows):
        made.add(10.0 * place, demand, expected)
    return made


def test_nothing_is_foreseen_from_few_comparisons():
    assert seen([(1.0, 1.0)] * FEWEST).foresee(1.0, 0.9) is None
    assert seen([(1.0, 1.0)] * (FEWEST + 1)).foresee(1.0, 0.9) == 1.0


def test_demand_is_compared_with_what_was_expected_of_its_time():
    """Each demand is three times what was expected 10 s before, and less than what is expected now."""
    made = seen([(3.0, 1.0), (3.0, 10.0)] * 20, ahead_s=20.0)
    assert made.foresee(0.5, 1.0) == pytest.approx(1.5)


def test_a_share_of_all_that_came_is_what_counts_not_of_the_time():
    """Of 40 times 10 s, 4 bring half of all: to hold for 90% of that is to hold for these."""
    rows = [(9.0, 1.0) if place % 10 == 9 else (1.0, 1.0) for place in range(41)]
    assert seen(rows).foresee(1.0, 0.9) == pytest.approx(9.0)
    assert seen(rows).foresee(1.0, 0.4) == pytest.approx(1.0)


def test_what_came_out_of_nothing_does_not_come_on_top_of_what_is_there():
    rows = [(10.0, 0.1), (10.0, 10.0)] * 20
    assert seen(rows).foresee(10.0, 0.99) == pytest.approx(10.0)
    assert seen(rows).foresee(20.0, 0.99) == pytest.approx(20.0)


def test_what_is_too_old_is_forgotten():
    rows = [(9.0, 1.0)] * 30 + [(1.0, 1.0)] * 101
    assert seen(rows).foresee(1.0, 0.99) == pytest.approx(1.0)
