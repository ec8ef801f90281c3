"""What the KV block pool costs: storing, finding and evicting the 256 blocks of a prompt."""

from itertools import count

from pytest_benchmark.fixture import BenchmarkFixture

from mocker import BlockChain, Sequence
from mocker.vllm.block_pool import BlockPool

NUM_BLOCKS = 1 << 14
PROMPT_BLOCKS = 256


def sequence(number: int) -> Sequence:
    """Return a request whose prompt shares no block with any other's."""
    ids = range(number * PROMPT_BLOCKS, (number + 1) * PROMPT_BLOCKS)
    return Sequence(number, num_prompt=PROMPT_BLOCKS * 16, max_tokens=1, chain=BlockChain(ids))


def cache(pool: BlockPool, one: Sequence) -> None:
    """Compute a prompt and end it: its blocks stay cached."""
    pool.allocate(PROMPT_BLOCKS)
    one.num_blocks = PROMPT_BLOCKS
    pool.store(one, PROMPT_BLOCKS)
    pool.release(one, PROMPT_BLOCKS)
    pool.events.clear()


def full_pool() -> BlockPool:
    """Return a pool in which every block is cached, and none is held."""
    pool = BlockPool(NUM_BLOCKS, enable_prefix_caching=True)
    for number in range(NUM_BLOCKS // PROMPT_BLOCKS):
        cache(pool, sequence(number))
    return pool


def test_a_prompt_is_stored_and_evicts_the_oldest(benchmark: BenchmarkFixture) -> None:
    pool, numbers = full_pool(), count(NUM_BLOCKS)
    benchmark.pedantic(cache, setup=lambda: ((pool, sequence(next(numbers))), {}), rounds=2000, warmup_rounds=100)


def test_a_prompt_is_looked_up(benchmark: BenchmarkFixture) -> None:
    pool, chain = full_pool(), sequence(7).chain
    assert benchmark(pool.num_cached, chain, PROMPT_BLOCKS) == PROMPT_BLOCKS


def test_a_cached_prompt_is_held_and_released(benchmark: BenchmarkFixture) -> None:
    pool, one = full_pool(), sequence(7)

    def use() -> None:
        pool.share(one, PROMPT_BLOCKS)
        pool.release(one, PROMPT_BLOCKS)

    benchmark(use)
