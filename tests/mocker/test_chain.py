"""Names of blocks in chains whose ids cover several."""

from hypothesis import given
from hypothesis import strategies as st

from mocker import BlockChain


@given(st.integers(0, 20), st.integers(1, 5), st.integers(0, 24), st.integers(1, 8))
def test_the_ids_of_a_span_are_those_that_begin_in_it(num_named, per_id, start, length):
    chain = BlockChain(range(num_named), num_named, blocks_per_id=per_id)
    stop = start + length
    begun = [index for index in range(len(chain.ids)) if start <= chain.first_block(index) < stop]
    first, end, begins = chain.span(start, stop)
    assert list(range(first, end)) == begun
    assert begins is (chain.first_block(chain.index_of(start)) == start)
