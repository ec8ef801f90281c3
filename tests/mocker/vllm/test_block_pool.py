"""The pool of runs does what a pool of single blocks does, in any order of what a scheduler may ask."""

import random
from dataclasses import dataclass, field

import pytest

from mocker import BlockChain, Sequence
from mocker.events import BlockRemoved, BlockStored
from mocker.vllm.block_pool import BlockPool

NUM_BLOCKS = 14
MOST = 8
"""Blocks of a sequence."""


@dataclass(eq=False)
class Block:
    """A block with content."""

    key: object
    holders: list[Sequence] = field(default_factory=list)


class SingleBlocks:
    """vLLM's pool, block by block: of several with the same content the oldest is found."""

    def __init__(self, num_blocks):
        self.free = [None] * num_blocks  # None: without content
        self.cached = {}
        self.tables = {}
        self.removed = []

    def find(self, chain, limit):
        found = []
        while len(found) < limit and (blocks := self.cached.get(chain.key(len(found)))):
            found.append(blocks[0])
        return found

    def share(self, sequence, num_blocks):
        for block in self.find(sequence.chain, num_blocks):
            self.free = [each for each in self.free if each is not block]
            block.holders.append(sequence)
            self.tables.setdefault(sequence, []).append(block)

    def allocate(self, count):
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            if block is not None:
                self.removed.append(block.key)
                self.cached[block.key] = [each for each in self.cached[block.key] if each is not block]

    def store(self, sequence, num_full):
        table = self.tables.setdefault(sequence, [])
        for place in range(len(table), num_full):
            block = Block(sequence.chain.key(place), [sequence])
            table.append(block)
            self.cached.setdefault(block.key, []).append(block)

    def release(self, sequence, num_blocks):
        table = self.tables.pop(sequence, [])
        self.free[:0] = [None] * (num_blocks - len(table))
        for block in reversed(table):
            block.holders.remove(sequence)
            if not block.holders:
                self.free.append(block)


class Both:
    """Both pools, asked the same and compared."""

    def __init__(self):
        self.runs, self.single = BlockPool(NUM_BLOCKS, enable_prefix_caching=True), SingleBlocks(NUM_BLOCKS)

    def start(self, sequence, count):
        """Begin a sequence with what is cached of it, and `count` more blocks."""
        chain = sequence.chain
        hits = self.runs.num_cached(chain, MOST)
        found = self.single.find(chain, MOST)
        assert hits == len(found)
        num_unheld = self.runs.num_unheld(chain, hits)
        assert num_unheld == sum(not block.holders for block in found)
        if num_unheld + count > self.runs.num_free:
            return False
        self.runs.share(sequence, hits)
        self.single.share(sequence, hits)
        return True

    def grow(self, sequence, count):
        self.runs.allocate(count)
        self.single.allocate(count)
        sequence.num_blocks += count

    def store(self, sequence, num_full):
        self.runs.store(sequence, num_full)
        self.single.store(sequence, num_full)

    def release(self, sequence):
        num_blocks = sequence.num_blocks
        self.runs.release(sequence, num_blocks)
        self.single.release(sequence, num_blocks)

    def compare(self):
        assert self.runs.queue() == [None if block is None else block.key for block in self.single.free]
        removed = [key for event in self.runs.events if isinstance(event, BlockRemoved) for key in event.keys()]  # noqa: SIM118
        assert all(isinstance(event, BlockRemoved | BlockStored) for event in self.runs.events)
        assert removed == self.single.removed
        self.runs.events, self.single.removed = [], []


def sequence_of(rng, number):
    """Return a sequence whose blocks are others' up to where it goes its own way."""
    own = rng.choice([MOST, MOST, rng.randint(0, MOST)])
    names = [(place, 0 if place < own else number) for place in range(MOST)]
    return Sequence(number, num_prompt=1, max_tokens=1, chain=BlockChain(names))


@pytest.mark.parametrize("part", range(4))
def test_a_pool_of_runs_does_what_one_of_single_blocks_does(part):
    for seed in range(300 * part, 300 * (part + 1)):
        rng, pools, held = random.Random(seed), Both(), []
        for number in range(80):
            sequence = rng.choice(held) if held else None
            match rng.choice(["start", "grow", "grow", "grow", "store", "store", "release"]):
                case "start" if len(held) < 4:
                    sequence = sequence_of(rng, number)
                    if pools.start(sequence, 1):
                        held.append(sequence)
                case "grow" if sequence is not None:
                    count = min(rng.randint(1, 3), MOST + 1 - sequence.num_blocks, pools.runs.num_free)
                    if count > 0:
                        pools.grow(sequence, count)
                case "store" if sequence is not None:
                    pools.store(sequence, min(sequence.num_blocks, MOST))
                case "release" if sequence is not None:
                    held.remove(sequence)
                    pools.release(sequence)
            try:
                pools.compare()
            except AssertionError as error:
                error.add_note(f"seed {seed}, step {number}")
                raise
