"""What routing costs: one request among 8, 64 and 1,024 ranks, and the index of which rank has which prefix."""

import random
from itertools import count

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from serving.router import Prompt, PromptBlocks, Router, RouterConfig
from serving.router.index import PrefixIndex

BLOCK_SIZE = 16
PROMPT_BLOCKS = 64
NUM_REQUESTS = 4
"""In flight on each rank."""


def prompt(number: int) -> Prompt:
    """Return a prompt of 1,024 tokens; one in four shares its first half with 31 others."""
    own = [(number, block) for block in range(PROMPT_BLOCKS)]
    if number % 4 == 0:
        own[: PROMPT_BLOCKS // 2] = [(-1 - number // 128, block) for block in range(PROMPT_BLOCKS // 2)]
    return Prompt(PROMPT_BLOCKS * BLOCK_SIZE, PromptBlocks.of(own))


def busy_router(mode: str, num_ranks: int) -> Router:
    """Return a router that has routed some requests to each rank, and saw what was cached there."""
    router = Router(mode, RouterConfig(), block_size=BLOCK_SIZE, rng=random.Random(0))
    for slot in range(num_ranks):
        router.add_rank(slot)
    for number in range(NUM_REQUESTS * num_ranks):
        asked = prompt(number)
        decision = router.pick(number, asked, 0.0)
        if isinstance(router.index, PrefixIndex):
            router.index.store(decision.slot, asked.blocks.ids)
    return router


@pytest.mark.parametrize("num_ranks", [8, 64, 1024])
@pytest.mark.parametrize("mode", ["round-robin", "kv", "marginal"])
def test_a_request_is_routed_and_ends(benchmark: BenchmarkFixture, mode: str, num_ranks: int) -> None:
    router, asked = busy_router(mode, num_ranks), prompt(4)

    def route() -> None:
        router.pick("one more", asked, 0.0)
        router.on_first_token("one more")
        router.on_finish("one more")

    benchmark(route)


def test_the_index_stores_a_prompt_and_forgets_it(benchmark: BenchmarkFixture) -> None:
    index, numbers = PrefixIndex(), count()

    def use(ids: list[tuple[int, int]]) -> None:
        index.store(3, ids)
        index.remove(3, ids)

    def prepared() -> tuple[tuple[list[tuple[int, int]]], dict[str, object]]:
        number = next(numbers)
        return ([(number, block) for block in range(PROMPT_BLOCKS)],), {}

    benchmark.pedantic(use, setup=prepared, rounds=2000, warmup_rounds=100)


@pytest.mark.parametrize("num_ranks", [8, 1024])
def test_the_index_finds_who_has_how_much_of_a_prompt(benchmark: BenchmarkFixture, num_ranks: int) -> None:
    """Every eighth rank has a part of it, from 1 block to 63."""
    index, asked = PrefixIndex(), prompt(1).blocks
    for slot in range(0, num_ranks, 8):
        index.store(slot, asked.ids[: 1 + slot // 8 % (PROMPT_BLOCKS - 1)])
    assert len(benchmark(index.overlaps, asked)) == num_ranks // 8
