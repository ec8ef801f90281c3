"""Media in prompts: what is encoded in which step, what the encoder's cache keeps, and whom that holds up.

The rules are vLLM's (`Scheduler._try_schedule_encoder_inputs`, `EncoderCacheManager`); tests/real_engines/test_vllm_scheduler.py
compares them with the real ones at random.
"""

import pytest

from mocker import BlockChain, EngineConfig, Sequence
from mocker.media import MediaItem
from mocker.speculation.drafter import Drafter
from mocker.vllm.core import VllmCore

VERSIONS = ("0.32", "0.33")


def core(version="0.33", drafter=None, **more):
    """Return a scheduler whose steps have 64 tokens, and whose encoder makes and keeps as many."""
    given = {"block_size": 16, "num_gpu_blocks": 100, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    given |= {"async_scheduling": False, "max_tokens_per_mm_item": 64, "engine_version": version}
    config = EngineConfig(**(given | more))
    return VllmCore(config, config.num_gpu_blocks, drafter=drafter)


def sequence(id, prompt, *media, output=1, ids=None):
    items = tuple(MediaItem(*item) for item in media)
    ids = [(id, place) for place in range(prompt // 16)] if ids is None else ids
    return Sequence(id, num_prompt=prompt, max_tokens=output, chain=BlockChain(ids), media=items)


def steps_of(made, *sequences):
    """Run these until they end; return the tokens that each step computes, and how many are encoded for it."""
    for one in sequences:
        made.add(one)
    found = []
    while made.running or made.waiting:
        batch = made.schedule()
        found.append(({one.id: count for one, count in made.num_new_tokens(batch)}, batch.num_encoder_tokens))
        made.update(batch)
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_a_step_encodes_an_item_before_its_first_token_and_ends_before_one_that_it_cannot_encode(version):
    first, second = sequence("a", 48, (8, 40, "x")), sequence("b", 48, (8, 40, "y"))
    # The second has 16 tokens of the step, of which 8 come before its item.
    assert steps_of(core(version), first, second) == [({"a": 48, "b": 8}, 40), ({"b": 40}, 40)]


@pytest.mark.parametrize(
    ("version", "steps"),
    [
        ("0.32", [({"a": 30}, 30), ({"b": 50, "c": 10}, 50)]),
        ("0.33", [({"a": 30, "c": 10}, 30), ({"b": 50}, 50)]),
    ],
)
def test_a_request_that_begins_with_an_item_without_room_holds_up_those_behind_it_in_0_32_only(version, steps):
    requests = sequence("a", 30, (0, 30, "x")), sequence("b", 50, (0, 50, "y")), sequence("c", 10)
    assert steps_of(core(version), *requests) == steps


def test_a_long_item_is_encoded_once_and_computed_in_chunks():
    assert steps_of(core(), sequence("a", 100, (10, 64, "x"))) == [({"a": 64}, 64), ({"a": 36}, 0)]


def test_equal_items_are_encoded_once_within_a_request_and_among_requests():
    made = core(enable_prefix_caching=False)
    steps = steps_of(made, sequence("a", 50, (0, 20, "x"), (25, 20, "x")))
    assert [encoded for _, encoded in steps] == [20]
    assert [encoded for _, encoded in steps_of(made, sequence("b", 50, (30, 20, "x")))] == [0]
    counts = made.encoder.counts
    assert (counts.computed, counts.computed_tokens, counts.found, counts.found_tokens) == (1, 20, 2, 40)


def test_nothing_is_encoded_for_tokens_whose_kv_is_cached():
    made = core()
    assert steps_of(made, sequence("a", 40, (0, 32, "x"), ids=[1, 2])) == [({"a": 40}, 32)]
    made.encoder.__init__(made.config)  # its cache is empty again
    assert steps_of(made, sequence("b", 40, (0, 32, "x"), ids=[1, 2])) == [({"b": 8}, 0)]


def test_the_cache_forgets_first_what_has_been_unused_longest():
    made = core(enable_prefix_caching=False)
    for id in ("x", "y", "x", "z"):  # z needs the room of one, and x was used after y
        steps_of(made, sequence(f"with {id}", 30, (0, 30, id)))
    encoded = {id: steps_of(made, sequence(f"again {id}", 30, (0, 30, id)))[0][1] for id in ("x", "z", "y")}
    assert encoded == {"x": 0, "z": 0, "y": 30}


def test_an_item_in_use_is_not_forgotten():
    made = core(enable_prefix_caching=False, max_num_batched_tokens=20, max_tokens_per_mm_item=30)
    steps = steps_of(made, sequence("a", 30, (0, 30, "x")), sequence("b", 30, (0, 30, "y")))
    # When a's last tokens are computed, b waits for the room of its item, though there are tokens left.
    assert steps == [({"a": 20}, 30), ({"a": 10}, 0), ({"b": 20}, 30), ({"b": 10}, 0)]


@pytest.mark.parametrize("version", VERSIONS)
def test_items_that_must_be_computed_whole_are_not_divided(version):
    made = core(version, disable_chunked_mm_input=True, max_tokens_per_mm_item=60)
    steps = steps_of(made, sequence("a", 120, (20, 60, "x")))
    assert steps == [({"a": 20}, 0), ({"a": 64}, 60), ({"a": 36}, 0)]


@pytest.mark.parametrize(
    ("version", "steps"),
    [
        ("0.32", [({"text": 14, "a": 50}, 60), ({"a": 10}, 0)]),
        ("0.33", [({"text": 14}, 0), ({"a": 60}, 60)]),
    ],
)
def test_a_chunk_that_begins_with_such_an_item_divides_it_in_0_32_only(version, steps):
    made = core(version, disable_chunked_mm_input=True, max_tokens_per_mm_item=60)
    assert steps_of(made, sequence("text", 14), sequence("a", 60, (0, 60, "x"))) == steps


def test_a_preempted_request_has_its_items_found_when_it_comes_back():
    made = core(num_gpu_blocks=6, enable_prefix_caching=False, watermark=0.0)
    steps = steps_of(made, sequence("a", 30, (0, 20, "x"), output=20), sequence("b", 30, (0, 20, "y"), output=20))
    resumed = [encoded for tokens, encoded in steps if tokens.get("b", 0) > 30]
    assert resumed == [0]
    assert (made.encoder.counts.computed, made.encoder.counts.found) == (2, 1)


def test_an_item_larger_than_any_that_the_model_makes_is_refused_though_the_encoder_s_budget_has_room():
    media = (0, 30, "x"), (30, 65, "y")
    with pytest.raises(
        ValueError, match=r"item 'y' of its prompt .*: it has 65 tokens, and max_tokens_per_mm_item is 64"
    ):
        core(max_num_batched_tokens=100).add(sequence("a", 100, *media))
    with pytest.raises(
        ValueError, match=r"item 'x' of its prompt .*: it has 30 tokens, and max_tokens_per_mm_item is not"
    ):
        core(max_tokens_per_mm_item=None).add(sequence("a", 100, *media))


@pytest.mark.parametrize("name", ["max_num_batched_tokens", "long_prefill_token_threshold"])
def test_limits_that_would_divide_every_whole_item_are_refused(name):
    with pytest.raises(
        ValueError, match=f"{name} is 50, and disable_chunked_mm_input is true; expected at least 64, for"
    ):
        core(**{"disable_chunked_mm_input": True, name: 50})


@pytest.mark.parametrize("method", ["eagle", "draft_model"])
def test_a_drafter_needs_room_for_a_token_beside_a_whole_item(method):
    drafts = {"num_speculative_tokens": 2, "speculative_method": method, "disable_chunked_mm_input": True}
    with pytest.raises(
        ValueError, match=r"max_num_batched_tokens is 64, .* at least 65, .* and a token for the drafter"
    ):
        EngineConfig(max_tokens_per_mm_item=64, max_num_batched_tokens=64, max_num_seqs=8, **drafts)
    EngineConfig(max_tokens_per_mm_item=63, max_num_batched_tokens=64, max_num_seqs=8, **drafts)


class NoneAccepted(Drafter):
    def proposed(self, sequence):
        return 1

    def accepted(self, sequence, num_drafts):
        return 0


def test_with_eagle_0_32_locks_up_before_an_item_that_the_cache_cannot_hold_beside_the_one_before_it():
    found = {}
    for version in VERSIONS:
        made = core(version, NoneAccepted(), num_speculative_tokens=1, speculative_method="eagle")
        made.add(sequence("a", 100, (0, 40, "x"), (40, 40, "y")))
        chunks = []
        for _ in range(4):
            if (batch := made.schedule()) is None:
                break
            chunks.append([count for _, count in made.num_new_tokens(batch)])
            made.update(batch)
        found[version] = chunks, made.stall()
    assert found["0.33"] == ([[40], [60]], None)
    chunks, stall = found["0.32"]
    assert chunks == [[39]]  # the drafter would read the next item's first token, so the first one is still needed
    assert (
        "it cannot go on: the encoder's cache has no room for its next item beside those that running requests"
        in str(stall)
    )


def test_an_engine_whose_locked_requests_are_aborted_is_no_longer_locked():
    made = core("0.32", NoneAccepted(), num_speculative_tokens=1, speculative_method="eagle")
    locked = sequence("a", 100, (0, 40, "x"), (40, 40, "y"))
    made.add(locked)
    made.update(made.schedule())
    assert made.schedule() is None
    assert made.stall() is not None
    made.abort(locked)
    assert made.schedule() is None
    assert made.stall() is None
    assert steps_of(made, sequence("b", 20)) == [({"b": 20}, 0)]
