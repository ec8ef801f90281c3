"""Steps in time, and the log of the gaps between their tokens."""

import pytest

from mocker import BlockChain, EngineConfig, Sequence, new_engine
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig

SIZE = 4


def engine_with_a_sequence(*, is_async):
    """Return an engine whose steps last 2 ms, with a sequence of 5 tokens."""
    config = EngineConfig(block_size=SIZE, num_gpu_blocks=9, async_scheduling=is_async)
    times = TimingConfig(timing="constant", constant_prefill_ms=2, constant_decode_ms=2)
    made = new_engine(config, resolve(config, times).timing, num_blocks=9)
    made.add(Sequence("a", num_prompt=4, max_tokens=5, chain=BlockChain(range(2))))
    return made


def test_a_gap_that_a_driver_adds_is_not_prolonged_by_the_batch_that_goes_on():
    made = engine_with_a_sequence(is_async=False)
    for number in range(5):
        made.schedule(0.002 * number)
        made.complete()
        if number == 2:
            made.add_gap(1.0, 8.0)
    assert gaps(made.log) == [0.002, 0.002, 7.0, 0.002, 0.002]


@pytest.mark.parametrize("max_iterations", [1, 100])
@pytest.mark.parametrize("is_async", [False, True])
def test_the_gap_in_which_an_engine_is_paused_lasts_until_the_next_token(is_async, max_iterations):
    made = engine_with_a_sequence(is_async=is_async)
    made.schedule(0.0)
    now = made.complete().end
    made.pause("all")
    while made.schedule(now) is not None:
        now = made.complete().end
    made.resume()
    now += 10
    while made.schedule(now, max_iterations=max_iterations) is not None:
        now = made.complete().end
    assert sorted(gaps(made.log)) == pytest.approx([0.002, 0.002, 0.002, 10.002])


def gaps(log):
    """Return all gaps in the order of their rows; their times do not change from step to step here."""
    rows = [log.rows[place : place + 5] for place in range(0, len(log.rows), 5)]
    return [first for first, _, _, count, tokens in rows for _ in range(int(count * tokens))]
