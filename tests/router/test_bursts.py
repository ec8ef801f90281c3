"""Many equal prompts at once, behind a prefix that one worker has cached."""

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.router import ROUTER_MODES, Mode, Prompt, PromptBlocks, Router, RouterConfig

OURS = ("marginal", "marginal-all")
SIZE = 64


def burst(mode, count, *, workers, blocks, tail=0, begun=0):
    """Route equal prompts at once, of which the first `begun` have their first token; return the requests of each."""
    router = Router(mode, RouterConfig(), block_size=SIZE, rng=random.Random(1))
    for slot in range(workers):
        router.add_rank(slot)
    prompt = Prompt(blocks * SIZE + tail, PromptBlocks.of(tuple(f"block {number}" for number in range(blocks))))
    if router.index is not None:
        router.index.store(0, prompt.blocks.ids)
    slots = []
    for number in range(count):
        slots.append(router.pick(number, prompt, 0.0).slot)
        if number < begun:
            router.on_first_token(number)
    return Counter(slots)


@pytest.mark.parametrize("mode", OURS)
@settings(max_examples=12, deadline=None)
@given(
    workers=st.integers(2, 8),
    each=st.integers(32, 48),
    blocks=st.integers(1, 400),
    tail=st.integers(0, SIZE - 1),
    begun=st.floats(0, 1),
)
def test_a_burst_behind_a_cached_prefix_is_spread(mode, workers, each, blocks, tail, begun):
    count = each * workers
    sent = burst(mode, count, workers=workers, blocks=blocks, tail=tail, begun=int(begun * count))
    assert max(sent.values()) <= 1.3 * each


@pytest.mark.parametrize("mode", OURS)
@settings(max_examples=12, deadline=None)
@given(count=st.integers(1, 300), blocks=st.integers(1, 400))
def test_a_cached_prefix_is_worth_a_dozen_requests_at_most(mode, count, blocks):
    sent = burst(mode, count, workers=8, blocks=blocks)
    assert max(sent.values()) <= 12 + min(sent[slot] for slot in range(8))


@pytest.mark.parametrize("mode", [mode for mode in ROUTER_MODES if not mode.startswith("oracle-")])
@pytest.mark.parametrize("count", [1, 61, 200])
def test_a_bound_spreads_a_burst_in_any_mode(mode, count):
    sent = burst(f"{mode}+bound(1.25)", count, workers=8, blocks=256, tail=1)
    assert max(sent.values()) <= math.ceil(1.25 * count / 8)


@pytest.mark.parametrize("mode", [mode for mode in ROUTER_MODES if not mode.startswith("oracle-")])
def test_a_mode_says_whether_it_herds(mode):
    sent = burst(mode, 500, workers=8, blocks=256)
    assert ROUTER_MODES[mode].herds == (max(sent.values()) > 1.3 * 500 / 8)


def test_a_bound_that_no_worker_is_within_is_refused():
    with pytest.raises(ValueError, match=r"bound\(0.5\) leaves out every worker; expected 1 or more"):
        Mode.parse("kv+bound(0.5)")


@pytest.mark.parametrize(("mode", "expected"), [("marginal", SIZE), ("lmetric", 0)])
def test_only_our_own_rule_knows_that_the_last_token_is_always_computed(mode, expected):
    router = Router(mode, RouterConfig(), block_size=SIZE, rng=random.Random(1))
    router.add_rank(0)
    prompt = Prompt(2 * SIZE, PromptBlocks.of(("a", "b")))
    router.index.store(0, prompt.blocks.ids)
    assert router.pick("request", prompt, 0.0).prefill_tokens == expected


def test_a_prompt_shares_the_blocks_that_another_is_computing():
    router = Router("marginal-all", RouterConfig(), block_size=SIZE, rng=random.Random(1))
    router.add_rank(0)
    long, other = (Prompt(3 * SIZE + 1, PromptBlocks.of(("a", "b", last))) for last in "cd")
    assert router.pick("first", long, 0.0).prefill_tokens == 3 * SIZE + 1
    assert router.pick("second", other, 0.0).prefill_tokens == SIZE + 1
    router.on_finish("first")
    router.on_finish("second")
    assert router.pick("third", other, 0.0).prefill_tokens == 3 * SIZE + 1
