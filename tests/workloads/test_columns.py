import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads import Request
from workloads.columns import CHUNK, RequestColumns, numbered
from workloads.workload import in_order, select

IDS = st.lists(st.integers(-(2**70), 2**70) | st.integers(0, 9), max_size=4).map(tuple)
TEXTS = st.none() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)


@st.composite
def requests(draw):
    """Any requests there can be, each behind what it waits for."""
    made = []
    for number in range(draw(st.integers(0, 6))):
        after = draw(st.lists(st.integers(0, number - 1), unique=True, max_size=2)) if number else []
        lengths = draw(st.integers(1, 2**40)), draw(st.integers(1, 2**20))
        more = draw(st.sampled_from(["", "s"])), tuple(after), draw(st.sampled_from([0.0, 0.5])), draw(TEXTS)
        made.append(Request(draw(st.floats(0, 1e9)), *lengths, draw(IDS), *more, priority=draw(st.integers(-2, 2))))
    return made


@given(made=requests())
def test_columns_hold_all_that_requests_do(made):
    columns = RequestColumns.of(made)
    assert list(columns) == made == [columns[place] for place in range(len(made))]
    assert columns == made
    assert list(pickle.loads(pickle.dumps(columns))) == made
    assert list(columns[1:4]) == made[1:4]
    assert list(RequestColumns.joined([columns, columns])) == made * 2


@given(made=requests(), numbers=st.lists(st.integers(0, 5), unique=True))
def test_some_rows_are_those_requests(made, numbers):
    numbers = [number for number in numbers if number < len(made)]
    assert list(RequestColumns.of(made).take(numbers)) == [made[number] for number in numbers]


def test_a_request_waits_for_those_that_are_left_by_their_new_numbers():
    made = [Request(0.0, 1, 1, (0,)), Request(1.0, 1, 1, (1,)), Request(0.0, 1, 1, (2,), after=(0, 1))]
    assert [request.after for request in select(made, [1, 2])] == [(), (0,)]


def test_a_request_that_waits_for_a_later_one_is_put_after_it():
    late, early, waiting = Request(5.0, 1, 1, (0,)), Request(3.0, 1, 1, (1,)), Request(0.0, 1, 1, (2,), after=(0,))
    ordered = in_order([late, early, waiting], "w")
    assert [(request.hash_ids, request.arrival_s, request.after) for request in ordered] == [
        ((1,), 0.0, ()),
        ((0,), 2.0, ()),
        ((2,), 2.0, (1,)),
    ]


def test_columns_of_several_chunks_are_filled_and_read_in_order():
    made = [Request(float(number), 1 + number, 1, (number,) * (number % 3)) for number in range(2 * CHUNK + 1)]
    assert list(RequestColumns.of(iter(made))) == made


def test_a_field_that_no_request_has_takes_no_memory():
    assert RequestColumns.of([Request(0.0, 1, 1, (0,))] * 3).more == {}


@pytest.mark.parametrize(("ids", "wanted", "count"), [([5, 5, 2], [5, 5, 2], 6), ([2**40, -1, 2**40], [1, 0, 1], 2)])
def test_ids_are_numbered_so_that_equal_ones_are_equal(ids, wanted, count):
    columns = RequestColumns.of([Request(0.0, 1, 1, tuple(ids))])
    numbers, found = numbered(columns.ids)
    assert (numbers.tolist(), found) == (wanted, count)
