"""The search for the cheapest layout: it is found whatever layouts there are, with few simulations."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynabench.capacity.search import Layout, Question, Search
from reports.figures.outcomes import Outcome


def found(layouts, needed, *, max_gpus=64, at_once=1):
    """Search where layout i needs `needed[i]` workers; return the search and how many simulations it took."""
    search, count = Search(layouts, max_gpus=max_gpus), 0
    while (question := search.next()) is not None:
        ahead = search.ahead(at_once)
        assert question == ahead[0]
        assert len(set(ahead)) == len(ahead) <= at_once, "nothing is simulated twice"
        layout = search.layouts[question.layout]
        assert question.workers not in layout.states
        assert layout.floor <= question.workers
        assert layout.gpus(question.workers) <= max_gpus
        search.learn(question, "met" if question.workers >= needed[question.layout] else "missed")
        count += 1
    return search, count


LAYOUTS = st.lists(
    st.tuples(
        st.sampled_from([1, 2, 4, 8]),  # GPUs of a worker
        st.integers(0, 8),  # GPUs beside
        st.sampled_from([1.0, 1.5, 2.5]),  # price
        st.integers(1, 5),  # floor
        st.integers(0, 12),  # workers that it needs beyond its floor
        st.integers(0, 3),  # rank
        st.sampled_from([None, 1.0, 4.0]),  # price of the GPUs beside
    ),
    min_size=1,
    max_size=12,
)


@given(LAYOUTS, st.integers(1, 4))
def test_the_cheapest_is_found_and_those_that_cost_the_same_are_tried(drawn, at_once):
    layouts = [Layout(str(place), each, fixed, price, floor, rank, fixed_price=beside) for place, (each, fixed, price, floor, _, rank, beside) in enumerate(drawn)]  # fmt: skip
    needed = [floor + more for *_, floor, more, _, _ in drawn]
    search, _ = found(layouts, needed, at_once=at_once)
    costs = {
        place: layout.cost(needed[place]) for place, layout in enumerate(layouts) if layout.gpus(needed[place]) <= 64
    }
    if not costs:
        assert search.best is None
        return
    best = search.best
    assert layouts[best.layout].cost(best.workers) == pytest.approx(min(costs.values()))
    for place, cost in costs.items():
        if math.isclose(cost, min(costs.values())):
            assert layouts[place].met == needed[place]


def test_a_layout_that_cannot_be_cheaper_is_not_simulated():
    cheap, dear = Layout("cheap", 4, floor=1), Layout("dear", 4, floor=3)
    search, count = found([cheap, dear], [2, 3])
    assert (search.best.layout, search.best.workers) == (0, 2)
    assert (dear.states, count) == ({}, 2)


def test_a_challenger_gets_one_try():
    layouts = [Layout("first", 4, floor=2), *(Layout(str(place), 4, floor=3, rank=1.0) for place in range(20))]
    _, count = found(layouts, [6, *[9] * 20])
    assert count <= 5 + 20


def test_what_is_impossible_is_left_alone_and_nothing_is_promised():
    search, count = found([Layout("x", 1, impossible="weights of 140 GB do not fit")], [1])
    assert (search.best, count) == (None, 0)


def test_where_nothing_meets_the_limits_all_gpus_were_tried():
    search, _ = found([Layout("x", 4), Layout("y", 8)], [100, 100], max_gpus=32)
    assert search.best is None
    assert [layout.low for layout in search.layouts] == [9, 5]


def test_workers_of_another_price_count_at_it():
    layout = Layout("x", 2, fixed_gpus=4, price=3.0, fixed_price=2.0)
    assert (layout.gpus(3), layout.cost(3)) == (10, 26.0)
    assert (layout.most(26.0, is_below=False), layout.most(26.0, is_below=True)) == (3, 2)


def test_a_layout_of_which_little_is_hoped_comes_last_though_its_bound_is_low():
    doubtful, likely = Layout("doubtful", 1, expected=14), Layout("likely", 4)
    assert [question.layout for question in Search([doubtful, likely], max_gpus=64).ahead(1)] == [1]
    search, count = found([doubtful, likely], [14, 2])
    assert (search.best.layout, search.best.workers) == (1, 2)
    assert count <= 4


def test_one_that_needs_far_more_than_was_hoped_gives_way():
    runaway, other = Layout("runaway", 1), Layout("other", 8)
    search, _ = found([runaway, other], [64, 1])
    assert (search.best.layout, search.best.workers) == (1, 1)
    assert max(runaway.states) < 16


def missing(workers):
    """Say what is missed where few workers miss TPOT and many miss TTFT, as where each computes a shared prefix once."""
    named = (("tpot", workers < 9), ("ttft", workers > 13))
    return [Outcome(limit, "missed") for limit, is_missed in named if is_missed]


def test_numbers_that_were_skipped_are_tried_where_more_workers_miss_other_limits():
    search, tried = Search([Layout("x", 1)], max_gpus=64), []
    while (question := search.next()) is not None:
        outcomes = missing(question.workers)
        search.learn(question, "missed" if outcomes else "met", outcomes)
        tried.append(question.workers)
    assert (search.best, tried) == ((0, 9), [1, 2, 3, 5, 8, 16, 12, 10, 9])


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 4))
def test_a_range_of_numbers_that_meet_the_limits_is_found_if_it_lies_between_two_that_were_tried(least, most, floor):
    search = Search([Layout("x", 1, floor=floor)], max_gpus=64)
    while (question := search.next()) is not None:
        outcomes = [
            Outcome(limit, "missed")
            for limit, is_missed in (("tpot", question.workers < least), ("ttft", question.workers > most))
            if is_missed
        ]
        search.learn(question, "missed" if outcomes else "met", outcomes)
    if floor < least <= most:
        assert search.best == (0, least)
    elif least > most:
        assert search.best is None
    else:
        assert search.best is None or search.best.workers <= most


def test_more_load_needs_no_fewer_workers_and_one_that_missed_needs_as_many_for_each_unit_of_load():
    met, missed = Layout("met", 1, floor=2), Layout("missed", 1)
    for workers, state in ((2, "missed"), (3, "met")):
        Search([met], max_gpus=64).learn(Question(0, workers), state)
    Search([missed], max_gpus=64).learn(Question(0, 4), "missed")
    assert [met.low_at(times) for times in (1, 2)] == [3, 3]
    assert [missed.low_at(times) for times in (1, 1.25, 2)] == [5, 6, 9]
