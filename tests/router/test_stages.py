"""Routers of prefill and of decode workers, and looking before choosing."""

import random

import pytest

from serving.router import ROUTER_MODES, Prompt, PromptBlocks, Router, RouterConfig
from serving.router.decision import AllBusyError, NoWorkersError

LIVE_MODES = [mode for mode in ROUTER_MODES if not mode.startswith("oracle-")]


def router(stage, mode="kv", num_workers=2, *, follows_events=False, **settings):
    core = Router(
        mode,
        RouterConfig(**settings),
        block_size=4,
        rng=random.Random(1),
        stage=stage,
        follows_events=follows_events,
    )
    for worker in range(num_workers):
        core.add_rank(worker)
    return core


def prompt(*ids, tail=0):
    return Prompt(4 * len(ids) + tail, PromptBlocks.of(ids))


def load(core, worker):
    books = core.load(worker)
    return books.num_requests, books.prefill_tokens, books.decode_blocks, books.num_decoding, books.context_tokens


def test_a_prefill_worker_holds_no_blocks_of_requests_in_flight():
    core = router("prefill", num_workers=1)
    core.pick("r", prompt("a", "b", tail=1), now=0.0)
    assert load(core, 0) == (1, 9, 0, 0, 0)
    core.on_first_token("r")
    core.on_finish("r")
    assert load(core, 0) == (0, 0, 0, 0, 0)


def test_a_prefill_router_weighs_what_is_cached_against_what_is_to_be_computed():
    core = router("prefill")
    core.index.store(0, ["a", "b"])
    decision = core.pick("r1", prompt("a", "b", "c"), now=0.0)
    # 3 blocks of prefill less the overlap, and 3 that the prompt would fill anywhere.
    assert (decision.slot, decision.costs) == (0, [1 + 3, 3 + 3])
    assert core.pick("r2", prompt("a", "b", "c"), now=0.0).costs == [1 + 1 + 3, 3 + 3]


def test_a_decode_router_looks_at_blocks_alone():
    core = router("decode")
    assert core.index is None
    assert not core.wants_events
    first = core.pick("r1", prompt("a", "b", "c"), now=0.0)
    assert first.best_blocks is None
    # The prompt's 3 blocks of prefill are the same everywhere; r1's 3 blocks are not shared with r2.
    second = core.pick("r2", prompt("a", "b", "c"), now=0.0)
    assert second.slot == 1 - first.slot
    assert second.costs[first.slot] == 3 + 3 + 3
    assert second.costs[second.slot] == 3 + 3


def test_blocks_at_a_decode_worker_count_whole_for_each_request():
    core = router("decode", num_workers=1)
    core.pick("r1", prompt("a", "b", tail=1), now=0.0)
    core.pick("r2", prompt("a", "b", "c"), now=0.0)
    core.pick("r3", prompt(tail=3), now=0.0)
    assert core.load(0).decode_blocks == 3 + 3 + 1
    core.on_finish("r1")
    assert core.load(0).decode_blocks == 3 + 1
    core.on_finish("r2")
    core.on_finish("r3")
    assert load(core, 0) == (0, 0, 0, 0, 0)


def test_a_request_decodes_from_the_moment_it_is_sent_to_a_decode_worker():
    core = router("decode", num_workers=1)
    core.pick("r", prompt("a", tail=2), now=0.0)
    assert load(core, 0) == (1, 0, 2, 1, 6)
    core.on_first_token("r")
    assert load(core, 0) == (1, 0, 2, 1, 6)
    core.on_finish("r")
    assert load(core, 0) == (0, 0, 0, 0, 0)


def test_a_local_prompt_is_work_for_its_decode_worker():
    core = router("decode", follows_events=True)
    core.index.store(1, ["a", "b"])
    assert core.pick("r", prompt("a", "b", "c"), now=0.0, only=1, is_local=True).overlap_blocks == 2
    assert load(core, 1) == (1, 4, 3, 0, 0)
    core.on_first_token("r")
    assert load(core, 1) == (1, 0, 3, 1, 12)


@pytest.mark.parametrize("mode", ["kv", "round-robin"])
def test_a_decode_router_that_follows_events_uses_them_for_local_prompts_alone(mode):
    core = router("decode", mode, follows_events=True)
    assert core.wants_events
    core.index.store(1, ["a", "b", "c"])
    assert core.peek(prompt("a", "b", "c"), now=0.0).scored.found_blocks == [0, 3]
    assert core.pick("r", prompt("a", "b", "c"), now=0.0).scored.found_blocks == [0, 0]


def test_a_decode_router_that_holds_requests_looks_at_blocks_alone_too():
    core = router("decode", "kv+late(8)", follows_events=True)
    core.index.store(1, ["a", "b", "c"])
    assert core.place("r", prompt("a", "b", "c"), 0.0).scored.found_blocks == [0, 0]


def test_peeking_at_decode_workers_finds_the_one_that_has_most_of_the_prompt():
    core = router("decode", follows_events=True)
    core.pick("r1", prompt("x", "y"), now=0.0, only=1)
    core.index.store(1, ["a", "b", "c"])
    decision = core.peek(prompt("a", "b", "c"), now=0.0)
    assert (decision.slot, decision.overlap_blocks) == (1, 3)
    assert core.pick("r2", prompt("a", "b", "c"), now=0.0).slot == 0


def test_without_events_a_decode_router_may_guess_what_its_workers_have():
    core = router("decode", follows_events=True, use_kv_events=False)
    worker = core.pick("r", prompt("a", "b"), now=0.0).slot
    assert core.peek(prompt("a", "b"), now=1.0).scored.num_found(worker) == 2


@pytest.mark.parametrize("stage", ["aggregated", "prefill", "decode"])
@pytest.mark.parametrize("mode", [*LIVE_MODES, "kv+temp(1)", "kv+stale(1000)", "lmetric+eps(20)"])
def test_peeking_changes_nothing(mode, stage):
    looking, other = router(stage, mode, 4), router(stage, mode, 4)
    rng = random.Random(5)
    for number in range(60):
        asked = prompt(*rng.choices("abc", k=rng.randrange(4)), tail=1)
        for _ in range(rng.randrange(3)):
            looking.peek(prompt("z"), now=number / 10)
        seen = looking.peek(asked, now=number / 10)
        picks = [core.pick(number, asked, now=number / 10, is_local=True) for core in (looking, other)]
        for pick in picks:
            assert (pick[:5], pick.candidates) == (seen[:5], seen.candidates)
        assert [load(looking, worker) for worker in range(4)] == [load(other, worker) for worker in range(4)]
        if number > 10 and rng.random() < 0.5:
            looking.on_finish(number - 10)
            other.on_finish(number - 10)


def test_peeking_fails_as_picking_does():
    with pytest.raises(NoWorkersError):
        router("prefill", num_workers=0).peek(prompt("a"), now=0.0)
    core = router("prefill", num_workers=1, busy_threshold=0.5)
    core.on_load(0, kv_usage=0.9)
    with pytest.raises(AllBusyError):
        core.peek(prompt("a"), now=0.0)


@pytest.mark.parametrize("stage", ["prefill", "decode"])
@pytest.mark.parametrize("mode", LIVE_MODES)
def test_books_are_empty_when_all_requests_have_ended(mode, stage):
    core, rng = router(stage, mode, 3, follows_events=True), random.Random(7)
    for number in range(30):
        asked = prompt(*range(rng.randrange(5)), tail=rng.randrange(1, 4))
        core.pick(number, asked, now=float(number), is_local=rng.random() < 0.3)
        if rng.random() < 0.5:
            core.on_first_token(number)
    for number in range(30):
        core.on_finish(number)
    assert [load(core, worker) for worker in range(3)] == [(0, 0, 0, 0, 0)] * 3
