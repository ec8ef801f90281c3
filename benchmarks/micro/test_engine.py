"""What the simulated engine costs: an iteration that decodes, and a request from its arrival to its end."""

from itertools import count

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from mocker import BlockChain, Engine, EngineConfig, Sequence, new_engine
from mocker.timing.polynomial import Polynomial

BLOCK_SIZE = 16
NUM_BLOCKS = 1 << 20
PROMPT_BLOCKS = 256


def fresh_engine(*, async_scheduling: bool) -> Engine:
    """Return an idle engine with more blocks than a benchmark fills."""
    config = EngineConfig(block_size=BLOCK_SIZE, num_gpu_blocks=NUM_BLOCKS, async_scheduling=async_scheduling)
    return new_engine(config, Polynomial(NUM_BLOCKS * BLOCK_SIZE, 1.0, 1.0), num_blocks=NUM_BLOCKS)


def request(number: int, *, num_blocks: int, max_tokens: int) -> Sequence:
    """Return a request whose prompt shares no block with any other's."""
    ids = range(number * num_blocks, (number + 1) * num_blocks)
    return Sequence(number, num_prompt=num_blocks * BLOCK_SIZE, max_tokens=max_tokens, chain=BlockChain(ids))


def step(engine: Engine, now: float) -> float:
    """Let an engine make one iteration; return when it ends."""
    made = engine.schedule(now)
    assert made is not None
    engine.complete()
    return made.end


@pytest.mark.parametrize("async_scheduling", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("num_sequences", [1, 64, 256])
def test_one_iteration_in_which_all_sequences_decode(
    benchmark: BenchmarkFixture, num_sequences: int, async_scheduling: bool
) -> None:
    engine, now = fresh_engine(async_scheduling=async_scheduling), 0.0
    for number in range(num_sequences):
        engine.add(request(number, num_blocks=2, max_tokens=1 << 20))
    for _ in range(8):  # until all prompts are computed
        now = step(engine, now)

    def go_on() -> None:
        nonlocal now
        now = step(engine, now)

    benchmark(go_on)


def test_a_prompt_of_4096_tokens_comes_in_is_computed_and_ends(benchmark: BenchmarkFixture) -> None:
    engine, numbers = fresh_engine(async_scheduling=True), count()

    def serve() -> None:
        sequence = request(next(numbers), num_blocks=PROMPT_BLOCKS, max_tokens=1)
        engine.add(sequence)
        now = 0.0
        while not sequence.is_over:
            now = step(engine, now)

    benchmark(serve)
