"""TensorRT-LLM's pool of blocks, beside a plain model of its rules."""

import random
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from mocker import BlockChain, BlockRemoved, BlockStored
from mocker.trtllm.block_pool import BlockPool
from tests.support.examples import worth


class Model:
    """The rules, one block at a time: a queue of free blocks, and the text of each block that can be found."""

    def __init__(self, num_blocks):
        self.free = deque(range(num_blocks))
        self.texts = {}
        self.holders = [0] * num_blocks
        self.num_evicted = 0

    def block_of(self, text):
        return next((block for block, known in self.texts.items() if known == text), None)

    def num_cached(self, text, limit):
        return next((n for n in range(limit) if self.block_of(text[: n + 1]) is None), limit)

    def claim(self, text, count):
        blocks = [self.block_of(text[: n + 1]) for n in range(count)]
        for block in blocks:
            if not self.holders[block]:
                self.free.remove(block)
            self.holders[block] += 1
        return blocks

    def take(self, count):
        blocks = []
        for _ in range(count):
            block = self.free.popleft()
            gone = self.texts.get(block)
            if gone is not None:
                forgotten = [other for other, text in self.texts.items() if text[: len(gone)] == gone]
                self.num_evicted += len(forgotten)
                for other in forgotten:
                    del self.texts[other]
            self.holders[block] = 1
            blocks.append(block)
        return blocks

    def store(self, text, blocks, num_full):
        for n in range(num_full):
            if self.block_of(text[: n + 1]) is None:
                self.texts[blocks[n]] = text[: n + 1]

    def release(self, blocks):
        for block in reversed(blocks):
            self.holders[block] -= 1
            if not self.holders[block]:
                self.free.append(block)

    def give_back(self, block):
        self.holders[block] -= 1
        if not self.holders[block]:
            self.free.appendleft(block)


def chain_of(text, blocks_per_id):
    """Name blocks by all text up to them, or several by one id."""
    starts = range(0, len(text), blocks_per_id)
    return BlockChain([text[: start + blocks_per_id] for start in starts], len(text), blocks_per_id=blocks_per_id)


def texts(rng, blocks_per_id):
    """Return a text of a few blocks; those that begin alike are alike up to a whole id."""
    return "".join(rng.choice("ab") * blocks_per_id for _ in range(rng.randint(1, 5)))


@settings(max_examples=worth(300), deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from([1, 1, 3]), st.integers(12, 40))
def test_a_pool_follows_its_rules(seed, blocks_per_id, num_blocks):
    rng = random.Random(seed)
    pool, model = BlockPool(num_blocks, enable_block_reuse=True), Model(num_blocks)
    pool.has_listener = True
    held, found = [], set()  # what can be found, by the events
    for _ in range(60):
        if rng.random() < 0.5:
            text = texts(rng, blocks_per_id)
            chain, limit = chain_of(text, blocks_per_id), rng.randint(0, len(text))
            count = pool.num_cached(chain, limit)
            assert count == model.num_cached(text, limit)
            in_use = sum(model.holders[model.block_of(text[: n + 1])] > 0 for n in range(count))
            assert pool.num_in_use(chain, count) == in_use
            num_new = len(text) - count + rng.randint(0, 2)
            if num_new <= pool.num_free - (count - in_use):
                ours, theirs = pool.claim(chain, count), model.claim(text, count)
                held.append((chain, text, ours + pool.take(num_new), theirs + model.take(num_new)))
        elif held:
            chain, text, ours, theirs = rng.choice(held)
            what = rng.choice(["store", "store", "release", "give back"])
            if what == "store":
                num_full = rng.randint(0, min(len(text), len(ours)))
                pool.store(chain, ours, num_full)
                model.store(text, theirs, num_full)
            elif what == "release":
                assert pool.num_held_alone(ours) == sum(model.holders[block] == 1 for block in theirs)
                pool.release(ours)
                model.release(theirs)
                held = [each for each in held if each[2] is not ours]
            elif len(ours) > len(text):
                pool.give_back(ours.pop())
                model.give_back(theirs.pop())
        for event in pool.events:
            keys = event.keys()
            if isinstance(event, BlockStored):
                assert not found.intersection(keys)
                found.update(keys)
            else:
                assert isinstance(event, BlockRemoved)
                found.difference_update(keys)
        pool.events.clear()
        assert (pool.num_free, pool.num_evicted) == (len(model.free), model.num_evicted)
        assert pool.num_cached_blocks == len(model.texts) == len(found)


def test_all_that_continues_a_block_is_forgotten_with_it():
    pool = BlockPool(4, enable_block_reuse=True)
    long, short = BlockChain(["x", "y", "z"]), BlockChain(["x"])
    first = pool.take(3)
    pool.store(long, first, 3)
    pool.claim(short, 1)
    pool.release(first)
    assert pool.num_cached(long, 3) == 3
    pool.take(1)  # never held anything
    pool.take(1)
    assert pool.num_cached(long, 3) == 2
    assert pool.num_evicted == 1
