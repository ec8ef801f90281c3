"""A position in closed form is where counting one iteration after another leads."""

from bisect import bisect_left
from itertools import compress

from hypothesis import given
from hypothesis import strategies as st

from mocker.position import Position, Total, num_full, num_started, num_within, starting, starting_or_filling

SIZES = st.integers(1, 40)


def decoding(num_known, first, num_more=1000):
    position = Position(num_known, num_known + num_more)
    position.begin_decoding(first)
    return position


POSITIONS = st.lists(st.builds(decoding, st.integers(1, 200), st.integers(0, 50)), max_size=6)


def num_blocks(num_tokens, size):
    return -(-num_tokens // size)


def test_a_prompt_is_counted_and_a_decode_follows_the_iterations():
    position = Position(10, 14)
    position.num_computed = 7
    assert [position.computed(iteration) for iteration in (0, 5)] == [7, 7]
    assert position.known(5) == 10
    position.begin_decoding(3)  # computes the tenth token's KV before iteration 3, and knows eleven then
    position.num_computed = 99  # counts no longer
    assert [position.computed(iteration) for iteration in (3, 4, 5)] == [10, 11, 12]
    assert [position.known(iteration) for iteration in (4, 5)] == [12, 13]
    assert position.last_iteration == 5  # its fourteenth token, the last, needs no KV of its own
    position.end_decoding(12)
    assert position.computed(1000) == 12


def test_an_iteration_without_a_token_delays_all_that_follow_but_not_a_last_token_in_flight():
    position = decoding(10, 3, num_more=4)
    position.delay(4)
    assert [position.computed(iteration) for iteration in (5, 6)] == [11, 12]
    assert position.last_iteration == 6
    position.delay(7)
    assert position.last_iteration == 6


@given(num_known=st.integers(1, 500), first=st.integers(0, 100), num_more=st.integers(0, 500))
def test_the_iteration_of_the_last_token_is_what_bisecting_its_position_finds(num_known, first, num_more):
    position = decoding(num_known, first, num_more=num_more + 1)
    iterations = range(first, first + 1001)
    after = iterations[bisect_left(iterations, position.num_total - 1, key=position.computed)]
    assert position.last_iteration + 1 == after


@given(positions=POSITIONS, iterations=st.lists(st.integers(50, 300), min_size=1))
def test_a_total_is_the_sum_over_all_that_decode(positions, iterations):
    total = Total()
    for position in positions:
        total.add(position)
    for iteration in iterations:
        assert total.computed(iteration) == sum(position.computed(iteration) for position in positions)
        if positions:
            gone = positions.pop()
            total.remove(gone)
            gone.end_decoding(gone.computed(iteration))


@given(positions=POSITIONS, iteration=st.integers(50, 300), size=SIZES)
def test_blocks_start_and_fill_where_the_positions_cross_their_edges(positions, iteration, size):
    before = [position.computed(iteration) for position in positions]
    starts = [num_blocks(one + 1, size) > num_blocks(one, size) for one in before]
    fills = [(one + 1) // size > one // size for one in before]
    assert starting(positions, iteration, size) == list(compress(positions, starts))
    either = [start or fill for start, fill in zip(starts, fills, strict=True)]
    assert starting_or_filling(positions, iteration, size) == list(compress(positions, either))
    assert num_full(positions, iteration, size) == [one // size for one in before]


@given(positions=POSITIONS, first=st.integers(50, 300), num=st.integers(0, 200), size=SIZES)
def test_the_blocks_of_many_iterations_are_those_of_each(positions, first, num, size):
    each = [len(starting(positions, iteration, size)) for iteration in range(first, first + num)]
    assert num_started(positions, first, first + num, size) == sum(each)


@given(rises=st.lists(st.integers(0, 5), min_size=1), most=st.integers(0, 40), limit=st.integers(1, 60))
def test_a_leap_is_as_long_as_an_amount_that_never_falls_stays_within_what_is_free(rises, most, limit):
    def amount(count):  # as with speculation: drawn rises, summed
        return sum(rises[place % len(rises)] for place in range(count))

    count = num_within(amount, most, limit)
    assert 0 <= count <= limit
    assert count == 0 or amount(count) <= most
    assert count == limit or amount(count + 1) > most
