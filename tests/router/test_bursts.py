"""Many equal prompts at once, behind a prefix that one worker has cached."""

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.router import ROUTER_MODES, Mode, Prompt, PromptBlocks, Router, RouterConfig, StepCosts
from serving.router.config import DYNAMO_COSTS
from tests.support.examples import worth

OURS = ("marginal", "marginal-all")
SIZE = 64
H100 = (
    StepCosts(0.01301, 22.92e-6, 8.803e-6, 40.5e-9, 8192),  # Llama 3.1 8B
    StepCosts(0.03217, 64.86e-6, 44.55e-6, 25.31e-9, 8192),  # Llama 3.1 70B on four
)


def burst(mode, count, *, workers, blocks, tail=0, begun=0, costs=DYNAMO_COSTS):
    """Route equal prompts at once, of which the first `begun` have their first token; return the requests of each."""
    router = Router(mode, RouterConfig().with_costs(costs), block_size=SIZE, rng=random.Random(1))
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
@settings(max_examples=worth(60), deadline=None)
@given(
    workers=st.integers(2, 8),
    each=st.floats(2, 48),
    blocks=st.integers(1, 2000),
    tail=st.integers(0, SIZE - 1),
    begun=st.floats(0, 1),
    costs=st.sampled_from([DYNAMO_COSTS, *H100]),
)
def test_a_burst_of_equal_prompts_is_spread_whatever_one_worker_has_cached(
    mode, workers, each, blocks, tail, begun, costs
):
    count = int(each * workers)
    sent = burst(mode, count, workers=workers, blocks=blocks, tail=tail, begun=int(begun * count), costs=costs)
    assert max(sent.values()) <= math.ceil(1.3 * count / workers)


@pytest.mark.parametrize(("mode", "horizon"), [("marginal", 200), ("marginal-all", 75)])
@settings(max_examples=12, deadline=None)
@given(count=st.integers(1, 300), blocks=st.integers(1, 400), costs=st.sampled_from([DYNAMO_COSTS, *H100]))
def test_a_cached_prefix_is_worth_the_requests_that_delay_as_long_as_its_prefill(mode, horizon, count, blocks, costs):
    sent = burst(mode, count, workers=8, blocks=blocks, costs=costs)
    tokens = blocks * SIZE
    prefill_s = costs.prefill_token_s * tokens + costs.base_s * math.ceil(tokens / costs.budget_tokens)
    each_s = horizon * (costs.context_token_s * tokens + costs.decode_sequence_s)
    assert max(sent.values()) <= min(sent[slot] for slot in range(8)) + prefill_s / each_s + 2


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
