"""Galloping look-ups against walks, block by block."""

from hypothesis import given
from hypothesis import strategies as st

from foundation.galloping import num_held
from serving.router.blocks import depths
from serving.router.books import PromptBlocks, RankBooks


@given(st.integers(0, 70), st.integers(0, 70), st.integers(0, 72))
def test_the_end_of_what_is_held_is_found_wherever_it_is_and_whatever_is_guessed(num_ids, num_cached, guess):
    assert num_held(set(range(num_cached)), range(num_ids), num_ids, guess) == min(num_ids, num_cached)


@given(st.integers(0, 40), st.lists(st.integers(0, 40), max_size=6))
def test_the_ends_of_many_holders_are_found_together(num_ids, holders):
    masks = {}
    for worker, num_cached in enumerate(holders):
        for id in range(num_cached):
            masks[id] = masks.get(id, 0) | 1 << worker
    found = {}
    for depth, mask in depths(masks, range(num_ids), num_ids):
        found |= {worker: depth for worker in range(len(holders)) if mask >> worker & 1}
    assert found == {
        worker: min(num_cached, num_ids) for worker, num_cached in enumerate(holders) if min(num_cached, num_ids)
    }


def test_books_count_the_blocks_that_requests_in_flight_share_once():
    books = RankBooks()
    six, eight = PromptBlocks(["a", "b"], 6, 4), PromptBlocks(["a", "b"], 8, 4)
    books.add(six, has_tail=True, prompt_tokens=390, prefill_tokens=100)
    assert (books.decode_blocks, books.num_active_blocks(eight)) == (7, 6)
    books.add(eight, has_tail=False, prompt_tokens=512, prefill_tokens=0)
    assert (books.decode_blocks, books.num_active_blocks(six)) == (9, 6)
    books.remove(six, has_tail=True, prompt_tokens=390)
    assert (books.decode_blocks, books.num_active_blocks(eight)) == (8, 8)
    books.remove(eight, has_tail=False, prompt_tokens=512)
    assert (books.decode_blocks, books.num_active_blocks(eight), books.num_requests) == (0, 0, 0)
    assert books.prompt_tokens == 0


def test_books_count_the_requests_in_flight_that_have_a_whole_prompt():
    books = RankBooks()
    six, eight = PromptBlocks(["a", "b"], 6, 4), PromptBlocks(["a", "b", "c"], 12, 4)
    for _ in range(2):
        books.add(six, has_tail=False, prompt_tokens=384, prefill_tokens=0)
    assert (books.num_equal(six, 384), books.num_equal(six, 390), books.num_equal(eight, 384)) == (2, 0, 0)
    assert (books.num_equal(PromptBlocks.of([]), 384), books.prompt_tokens) == (0, 768)
    books.remove(six, has_tail=False, prompt_tokens=384)
    assert books.num_equal(six, 384) == 1


def test_books_know_no_block_of_another_prompt():
    books = RankBooks()
    books.add(PromptBlocks.of(["a", "b"]), has_tail=False, prompt_tokens=128, prefill_tokens=0)
    assert books.num_active_blocks(PromptBlocks.of(["a", "c", "d"])) == 1
    assert books.num_active_blocks(PromptBlocks.of([])) == 0
