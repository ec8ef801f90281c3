"""KV that another engine computed or is to read: who waits for it, whose blocks it takes, and when they are free.

Blocks have 16 tokens and 16 of them can be used, unless a test says otherwise. R1 to R6 were recorded on vLLM's scheduler.
"""

from collections import deque

import pytest

from mocker import BlockChain, EngineConfig, Sequence, new_engine
from mocker.sequence import LOADED, LOADING, OVER, RUNNING, WAITING
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig
from mocker.vllm.core import VllmCore


def scheduler(num_blocks=16, **more):
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "async_scheduling": False, "kv_role": "kv_consumer"}
    config = EngineConfig(block_size=16, num_gpu_blocks=num_blocks + 1, **settings | more)
    return VllmCore(config, config.num_gpu_blocks)


def local(id, prompt, output, *, content=None, **more):
    chain = BlockChain([(content or id, place) for place in range(prompt // 16)])
    return Sequence(id, num_prompt=prompt, max_tokens=output, chain=chain, **more)


def remote(id, prompt, output, **more):
    return local(id, prompt, output, is_remote_prefill=True, **more)


def handed_over(id, prompt, output=1, **more):
    return local(id, prompt, output, is_remote_decode=True, **more)


def queue(made, *sequences):
    for one in sequences:
        made.add(one)


def schedule(made):
    """Schedule a step; return it and the tokens that it computes."""
    batch = made.schedule()
    return batch, {} if batch is None else {one.id: count for one, count in made.num_new_tokens(batch)}


def step(made, *came):
    """Schedule a step and end it, with KV that came meanwhile; return its tokens and the blocks free while it runs."""
    batch, tokens = schedule(made)
    free = made.pool.num_free
    if batch is not None:
        made.update(batch)
    for one in came:
        made.end_load(one)
    return tokens, free


def is_loading(*sequences):
    return all(one.state == LOADING for one in sequences)


# As recorded


def test_r1_the_decode_side_loads_at_once_admits_by_seats_and_computes_the_last_prompt_token():
    made = scheduler(max_num_seqs=2)
    d1, d2, d3 = remote("d1", 60, 4), remote("d2", 64, 3), remote("d3", 60, 3)
    queue(made, d1, d2, d3, local("l", 40, 2))
    assert step(made) == ({"l": 40}, 1)
    assert is_loading(d1, d2, d3)
    assert step(made) == ({"l": 1}, 1)
    assert step(made, d1) == ({}, 4)
    assert step(made, d2, d3) == ({"d1": 1}, 4)
    assert step(made) == ({"d1": 1, "d2": 1}, 4)
    assert step(made) == ({"d1": 1, "d2": 1}, 3)
    assert step(made) == ({"d1": 1, "d2": 1}, 3)
    assert d1.state == d2.state == OVER
    assert [step(made) for _ in range(3)] == [({"d3": 1}, 12)] * 3
    assert made.pool.num_free == 16


def test_r2_the_prefill_side_keeps_the_blocks_until_they_were_read():
    made = scheduler(kv_role="kv_producer")
    made.add(one := handed_over("p", 100))
    assert step(made) == ({"p": 64}, 12)
    assert step(made) == ({"p": 36}, 9)
    assert one.state == OVER
    assert [step(made), step(made)] == [({}, 9), ({}, 9)]
    assert made.retention.release(one)
    assert made.pool.num_free == 16


def test_r3_no_load_starts_in_a_step_whose_budget_running_prefills_use_up():
    made = scheduler(max_num_batched_tokens=32)
    d1, d2 = remote("d1", 112, 2), remote("d2", 60, 2)
    made.add(local("long", 160, 2))
    assert step(made) == ({"long": 32}, 14)
    made.add(d1)
    assert step(made) == ({"long": 32}, 12)
    made.add(d2)
    assert [step(made) for _ in range(3)] == [({"long": 32}, 10), ({"long": 32}, 8), ({"long": 32}, 6)]
    assert step(made) == ({"long": 1}, 5)  # d1 needs 7 blocks, and d2 does not pass it
    assert d1.state == d2.state == WAITING
    assert step(made) == ({}, 5)
    assert is_loading(d1, d2)
    assert made.outbox.loads == [d1, d2]


def test_r4_a_load_leaves_what_running_prefills_still_need():
    made = scheduler(long_prefill_token_threshold=32)
    d1, d2 = remote("d1", 60, 2), remote("d2", 60, 2)
    made.add(local("long", 160, 2))
    assert step(made) == ({"long": 64}, 12)
    queue(made, d1, d2)
    assert step(made) == ({"long": 32}, 6)
    assert is_loading(d1)
    assert d2.state == WAITING  # 6 are free, of which `long` needs 4 more, and d2 needs 4
    assert [step(made) for _ in range(3)] == [({"long": 32}, 4), ({"long": 32}, 2), ({"long": 1}, 1)]
    assert step(made) == ({}, 8)
    assert is_loading(d2)


def test_r5_whoever_is_aborted_while_loading_keeps_its_blocks_until_the_transfer_ends():
    made = scheduler()
    made.add(one := remote("d1", 60, 4))
    assert step(made) == ({}, 12)
    made.abort(one)
    assert made.pool.num_free == 12
    assert not made.end_load(one)
    assert made.pool.num_free == 16
    assert one.state == OVER


def test_r6_behind_a_failed_block_a_prompt_is_computed_here():
    made = scheduler(kv_load_failure_policy="recompute")
    made.add(one := remote("d1", 60, 2))
    assert step(made) == ({}, 12)
    assert not made.end_load(one, num_valid_blocks=2)
    assert step(made) == ({"d1": 28}, 12)
    assert step(made) == ({"d1": 1}, 12)
    assert one.state == OVER


# Who waits for whom


@pytest.mark.parametrize(("num_blocks", "waits"), [(10, 0), (9, 4)])
def test_a_load_waits_for_the_reservation_of_a_prefill_that_runs(num_blocks, waits):
    made = scheduler(num_blocks=num_blocks, max_num_batched_tokens=48, long_prefill_token_threshold=32)
    queue(made, local("long", 96, 2), one := remote("d", 64, 2))
    num_steps = 0
    while one.state == WAITING:  # behind its first chunk `long` needs 4 more blocks, as many as the load
        step(made)
        num_steps += 1
    assert num_steps == 1 + waits


def test_a_watermark_is_kept_free_of_loads_only_while_others_run():
    made = scheduler(watermark=0.2)  # 3 of 17 blocks
    queue(made, first := remote("first", 200, 2), second := remote("second", 32, 2))
    step(made)
    assert is_loading(first, second)  # 13 + 2 blocks of 16, and nobody runs
    other = scheduler(watermark=0.2)
    queue(other, local("l", 16, 9), first := remote("first", 160, 2), second := remote("second", 48, 2))
    assert step(other) == ({"l": 16}, 5)
    assert is_loading(first)
    assert second.state == WAITING


def test_whoever_holds_blocks_is_admitted_before_the_queue():
    made = scheduler(max_num_seqs=1)
    queue(made, local("runs", 16, 2), one := remote("loaded", 60, 2), local("waits", 16, 2))
    step(made)
    assert made.outbox.loads == []  # all seats are taken
    step(made)
    made.add(local("late", 16, 2))
    assert step(made)[0] == {"waits": 16}
    assert is_loading(one)
    made.end_load(one)
    assert step(made)[0] == {"waits": 1}
    assert step(made)[0] == {"loaded": 1}


def test_a_load_takes_no_seat_and_no_budget():
    made = scheduler(max_num_seqs=1, max_num_batched_tokens=16)
    queue(made, one := remote("d", 60, 2), local("l", 16, 2))
    assert step(made) == ({"l": 16}, 11)
    assert is_loading(one)


def test_those_behind_a_load_under_way_are_not_held_up_by_it():
    made = scheduler()
    queue(made, slow := remote("slow", 60, 2), fast := remote("fast", 60, 2))
    step(made, fast)
    assert step(made)[0] == {"fast": 1}
    assert is_loading(slow)


def test_a_load_under_way_is_somebody_whom_a_long_prompt_must_not_keep_waiting():
    made = scheduler(long_prefill_token_threshold=32)
    made.add(remote("d", 60, 2))
    step(made)
    made.add(local("l", 60, 2))
    assert step(made)[0] == {"l": 32}


def test_whoever_needs_more_than_the_budget_is_loaded_whole():
    made = scheduler(max_num_batched_tokens=16)
    made.add(one := remote("d", 100, 2))
    step(made)
    assert (one.num_blocks, made.outbox.loads) == (7, [one])


def test_a_prompt_is_loaded_behind_what_is_cached_here_and_hits_are_shared():
    made = scheduler()
    made.add(local("first", 32, 20, content="same"))
    assert step(made) == ({"first": 32}, 14)
    made.add(one := remote("second", 60, 2, content="same"))
    assert step(made) == ({"first": 1}, 11)  # a block for `first`, and 4 - 2 for `second`
    assert (one.num_blocks, one.num_cached_blocks, one.cached_tokens) == (4, 2, 32)


def test_what_is_under_way_is_no_prefix_hit_and_what_has_come_is():
    made = scheduler()
    queue(made, one := remote("first", 64, 9, content="same"), local("early", 40, 9, content="same"))
    assert step(made, one) == ({"early": 40}, 9)
    assert [len(event.keys()) for event in made.pool.events] == [2]
    made.add(local("late", 60, 9, content="same"))
    assert step(made)[0] == {"early": 1, "first": 1, "late": 60 - 48}


def test_a_preempted_sequence_computes_its_prompt_itself():
    made = scheduler(num_blocks=8)
    queue(made, one := local("first", 60, 20), two := remote("second", 60, 20))
    step(made, two)
    steps = [step(made)[0] for _ in range(40) if two.num_preemptions == 0]
    assert steps[0] == {"first": 1, "second": 1}
    assert two.state == WAITING
    while one.state != OVER:
        step(made)
    assert step(made)[0] == {"second": two.num_known - 48}  # three of its blocks are still cached
    assert made.outbox.loads == [two]


def test_priority_decides_among_those_that_hold_blocks_and_they_still_go_before_the_queue():
    made = scheduler(max_num_seqs=1, scheduling_policy="priority")
    low, high = remote("low", 60, 1, priority=5), remote("high", 60, 1, priority=1)
    made.add(low)
    step(made)
    made.add(high)
    step(made, low, high)
    assert made.holding == [high, low]
    made.add(local("highest", 16, 1, priority=0))
    assert [step(made)[0] for _ in range(3)] == [{"high": 1}, {"low": 1}, {"highest": 16}]


# Aborts


def test_whoever_is_aborted_before_its_turn_loads_nothing():
    made = scheduler(max_num_seqs=1)
    queue(made, local("l", 16, 2), one := remote("d", 60, 2))
    step(made)
    made.abort(one)
    step(made)
    assert (made.outbox.loads, made.waiting, made.pool.num_free) == ([], deque(), 16)


def test_what_has_come_is_free_at_once_when_its_sequence_is_aborted():
    made = scheduler()
    made.add(one := remote("d", 60, 2))
    step(made, one)
    assert one.state == LOADED
    made.abort(one)
    assert (one.state, made.holding, made.pool.num_free) == (OVER, [], 16)


def test_whoever_holds_blocks_and_waits_for_others_is_aborted_with_them():
    made = scheduler(num_blocks=6, kv_load_failure_policy="recompute", watermark=0.2)  # 1 of 7 blocks
    queue(made, one := remote("d", 64, 2), local("l", 16, 9))
    step(made)
    made.end_load(one, num_valid_blocks=2)
    assert step(made)[0] == {"l": 1}
    made.abort(one)
    assert (made.holding, made.pool.num_free) == ([], 4)


# Loads that fail


@pytest.mark.parametrize("num_valid_blocks", [0, 3])
def test_a_failed_load_ends_the_request_and_frees_its_blocks(num_valid_blocks):
    made = scheduler(kv_load_failure_policy="fail")
    made.add(one := remote("d", 60, 2))
    step(made)
    assert made.end_load(one, num_valid_blocks)
    assert (one.state, one.finish_reason, made.pool.num_free) == (OVER, "error", 16)
    assert step(made) == ({}, 16)


def test_blocks_before_a_failed_one_are_cached_and_kept():
    made = scheduler(kv_load_failure_policy="recompute")
    made.add(one := remote("d", 64, 2))
    step(made)
    assert made.pool.events == []
    made.end_load(one, num_valid_blocks=3)
    assert step(made) == ({"d": 16}, 12)
    assert [(event.start, event.stop) for event in made.pool.events] == [(0, 3), (3, 4)]


def test_a_failed_load_of_which_every_block_is_good_is_whole():
    made = scheduler(kv_load_failure_policy="recompute")
    made.add(one := remote("d", 60, 2))
    step(made)
    made.end_load(one, num_valid_blocks=4)
    assert step(made) == ({"d": 1}, 12)
    assert [(event.start, event.stop) for event in made.pool.events] == [(0, 3)]


def test_a_load_that_failed_as_a_whole_begins_again_before_the_queue():
    made = scheduler(kv_load_failure_policy="recompute")
    queue(made, one := remote("d", 60, 2), local("l", 16, 9))
    step(made)
    made.end_load(one, num_valid_blocks=0)
    assert made.pool.num_free == 11  # it keeps its 4 blocks until its turn
    made.add(local("late", 16, 9))
    assert step(made) == ({"l": 1, "d": 60, "late": 3}, 9)  # l: 2 blocks, d: 4, late: 1
    assert made.outbox.loads == [one]  # asked for once


def test_a_prompt_whose_load_failed_keeps_its_place_and_its_reservation_if_it_does_not_fit():
    made = scheduler(num_blocks=6, kv_load_failure_policy="recompute", watermark=0.2)  # 1 of 7 blocks
    queue(made, one := remote("d", 60, 2), local("l", 16, 4))
    step(made)
    made.end_load(one, num_valid_blocks=0)
    made.add(local("late", 16, 9))
    assert step(made) == ({"l": 1}, 4)  # d needs 4 and the watermark
    assert (made.holding, made.num_reserved_blocks()) == ([one], 4)
    assert [step(made)[0] for _ in range(3)] == [{"l": 1}, {"l": 1}, {"d": 60, "late": 4}]


def test_a_load_that_failed_as_a_whole_may_hit_what_was_cached_meanwhile():
    made = scheduler(kv_load_failure_policy="recompute")
    queue(made, one := remote("d", 60, 2, content="same"), local("l", 48, 9, content="same"))
    step(made)
    made.end_load(one, num_valid_blocks=0)
    assert step(made)[0] == {"l": 1, "d": 12}
    assert one.cached_tokens == 48


# Blocks that others are to read


def test_blocks_that_are_held_are_prefix_hits_for_others():
    made = scheduler(kv_role="kv_producer")
    made.add(one := handed_over("first", 48, content="same"))
    assert step(made) == ({"first": 48}, 13)
    made.add(local("second", 60, 1, content="same"))
    assert step(made) == ({"second": 12}, 12)
    assert made.pool.num_free == 13
    made.retention.release(one)
    assert made.pool.num_free == 16


def test_a_held_block_refuses_a_reset_of_the_cache():
    made = scheduler(kv_role="kv_producer")
    made.add(one := handed_over("p", 20))
    step(made)
    assert not made.reset_prefix_cache()
    made.retention.release(one)
    assert made.reset_prefix_cache()


def test_only_what_ends_is_held_and_only_for_those_who_asked():
    made = scheduler(kv_role="kv_producer")
    queue(made, handed_over("asked", 20), local("not", 20, 1), aborted := handed_over("aborted", 100))
    step(made)
    made.abort(aborted)
    assert [one.id for one in made.retention.kept] == ["asked"]
    assert made.pool.num_free == 14
    assert not made.retention.release(aborted)


# Asynchronously


def ahead(made):
    """Yield what each step computes, with the step before it still in flight, and the blocks free once that has ended."""
    flights = deque([made.schedule()])
    while any(flights):
        batch, tokens = schedule(made)
        flights.append(batch)
        if (ended := flights.popleft()) is not None:
            made.update(ended)
        yield tokens, made.pool.num_free


@pytest.mark.parametrize(
    ("kv_role", "free"),
    [("kv_consumer", [15, 15, 14, 16]), ("kv_both", [15, 15, 14, 16]), ("kv_producer", [15, 15, 16, 16])],
)
def test_blocks_of_an_answer_that_stopped_are_free_when_a_consumers_step_in_flight_has_ended(kv_role, free):
    made = scheduler(async_scheduling=True, kv_role=kv_role)
    made.add(local("a", 14, 9, stop_after=3))
    assert list(ahead(made)) == [({"a": 1}, free[0]), ({"a": 1}, free[1]), ({"a": 1}, free[2]), ({}, free[3])]


@pytest.mark.parametrize(
    ("kv_role", "free"),
    [("kv_consumer", [13, 13, 16]), ("kv_both", [13, 13, 16]), ("kv_producer", [16, 16, 16])],
)
def test_blocks_of_an_aborted_answer_are_free_when_a_consumers_last_step_with_it_has_ended(kv_role, free):
    made = scheduler(async_scheduling=True, kv_role=kv_role)
    made.add(one := local("a", 40, 9))
    first, second = made.schedule(), made.schedule()
    made.abort(one)
    seen = [made.pool.num_free]
    for batch in (first, second):
        made.update(batch)
        seen.append(made.pool.num_free)
    assert seen == free


def test_synchronously_blocks_of_an_aborted_answer_are_free_at_once():
    made = scheduler()
    made.add(one := local("a", 40, 9))
    made.schedule()
    made.abort(one)
    assert made.pool.num_free == 16


def test_a_fence_stands_until_the_last_step_that_computes_anything_not_until_an_empty_one():
    made = scheduler(async_scheduling=True)
    made.add(one := local("a", 40, 2))
    first, second = made.schedule(), made.schedule()
    made.update(first)
    third = made.schedule()  # the last token is in flight, so nothing is computed
    assert third.is_empty
    made.abort(one)
    assert made.pool.num_free == 13
    made.update(second)
    assert made.pool.num_free == 16


@pytest.mark.parametrize(
    ("kv_role", "steps"),
    [
        ("kv_consumer", [{"a": 1, "b": 1}, {}, {"a": 1}]),  # nobody gets a token; then b's step has ended
        ("kv_both", [{"a": 1, "b": 1}, {}, {"a": 1}]),
        ("kv_producer", [{"a": 1, "b": 1}, {"a": 1}, {"a": 1}]),
    ],
)
def test_a_consumer_does_not_preempt_who_has_a_step_in_flight(kv_role, steps):
    made = scheduler(num_blocks=4, async_scheduling=True, kv_role=kv_role)
    queue(made, local("a", 31, 9), b := local("b", 31, 9))
    seen = ahead(made)
    assert [next(seen)[0] for _ in range(3)] == steps
    assert b.num_preemptions == 1


@pytest.mark.parametrize(("kv_role", "tokens"), [("kv_consumer", {"d": 1}), ("kv_both", {"d": 1}), ("kv_producer", {})])
def test_where_a_consumer_preempts_nobody_it_still_admits(kv_role, tokens):
    made = scheduler(num_blocks=4, async_scheduling=True, kv_role=kv_role)
    queue(made, one := local("a", 32, 9), two := remote("d", 20, 9))
    made.schedule()
    made.end_load(two)
    assert schedule(made)[1] == tokens  # `a` needs a third block and is its own victim
    assert (one.state == WAITING) == (kv_role == "kv_producer")


def delivered(made, id):
    """Return in which steps a token of a sequence is delivered, when steps run one ahead."""
    flights, steps = deque([made.schedule()]), []
    for number in range(60):
        flights.append(made.schedule())
        batch = flights.popleft()
        if batch is None:
            break
        speaking = [one.id for one in batch.decodes if made.is_delivered(one)]
        sampled, _ = made.update(batch)
        steps += [number] * (id in speaking or id in [one.id for one in sampled])
    return steps


def test_the_output_of_who_is_preempted_is_dropped_and_made_again_on_a_producer():
    tokens = {}
    for kv_role in ("kv_producer", None):
        made = scheduler(num_blocks=4, async_scheduling=True, kv_role=kv_role)
        queue(made, local("a", 31, 4), b := local("b", 31, 4))
        tokens[kv_role] = delivered(made, "b")
        assert b.num_preemptions == 1
        assert len(tokens[kv_role]) == 4
    assert tokens == {"kv_producer": [0, 5, 6, 7], None: [0, 1, 5, 6]}


def test_synchronously_nothing_is_in_flight_that_could_be_dropped():
    tokens = {}
    for kv_role in ("kv_producer", None):
        made = scheduler(num_blocks=4, kv_role=kv_role)
        queue(made, local("a", 31, 4), b := local("b", 31, 4))
        tokens[kv_role] = [step(made)[0] for _ in range(9)]
        assert b.num_preemptions == 1
    assert tokens["kv_producer"] == tokens[None]


def test_nothing_is_dropped_of_who_is_preempted_after_a_step_without_it():
    # `v` needs a block and is its own victim, so in vLLM 0.32 `c` behind it gets nothing; then `a` takes the block that `c` needs.
    made = scheduler(
        num_blocks=3, async_scheduling=True, kv_role="kv_producer", scheduling_policy="priority", engine_version="0.32"
    )
    v, c = local("v", 15, 4, priority=5), local("c", 16, 4, priority=1)
    queue(made, local("a", 14, 4), v)
    first = made.schedule()
    made.add(c)
    second = made.schedule()
    made.update(first)
    third = made.schedule()
    assert (third.preempted, third.starved) == ([v], [c])
    made.update(second)
    assert made.schedule().preempted == [c]
    assert made.dropped == []


def test_a_last_token_that_is_dropped_ends_nothing():
    made = scheduler(num_blocks=3, async_scheduling=True, kv_role="kv_producer")
    queue(made, local("a", 32, 2), one := handed_over("p", 16))
    first, second = made.schedule(), made.schedule()
    assert second.preempted == [one]  # whose only token is in flight
    assert [sequence.id for sequence in made.update(first)[0]] == ["a"]
    assert one.num_known == 16
    made.schedule()
    made.update(second)
    assert schedule(made)[1] == {"p": 16}
    assert one.state != OVER


# In the engine


def engine(**settings):
    made = scheduler(**settings)
    timing = TimingConfig(timing="constant", constant_prefill_ms=1000.0, constant_decode_ms=125.0)
    return new_engine(made.config, resolve(made.config, timing).timing, num_blocks=made.config.num_gpu_blocks)


def test_an_engine_that_loads_has_no_step_and_is_not_idle():
    made = engine()
    made.add(one := remote("d", 60, 2))
    assert made.schedule(0.0) is None
    assert not made.is_idle
    assert (made.outbox.take_loads(), made.outbox.take_loads()) == ([one], [])
    assert made.end_load(one) == []
    assert made.schedule(5.0).end == 5.125  # for the last token of the prompt


def test_a_load_that_ends_during_a_step_has_come_when_the_step_ends():
    made = engine()
    queue(made, one := remote("d", 60, 2), local("l", 16, 9))
    made.schedule(0.0)
    assert made.end_load(one) == []
    assert one.state == LOADING
    made.complete()
    assert one.state == LOADED


def test_what_is_read_during_a_step_is_free_when_the_step_ends():
    made = engine(kv_role="kv_producer")
    queue(made, one := handed_over("p", 20), local("l", 16, 9))
    made.schedule(0.0)
    made.complete()
    made.schedule(1.0)
    free = made.num_free_blocks
    made.release_kept(one)
    assert made.num_free_blocks == free
    made.complete()
    assert made.num_free_blocks == free + 2


def test_a_request_whose_load_fails_is_among_the_finished_of_the_step_or_returned_between_steps():
    made = engine()
    queue(made, one := remote("d", 60, 2), two := remote("e", 60, 2), local("l", 16, 9))
    made.schedule(0.0)
    assert made.end_load(one, 0) == []
    assert made.complete().finished == [one]
    assert made.end_load(two, 0) == [two]


@pytest.mark.parametrize(
    ("kv_role", "first"), [("kv_producer", handed_over("first", 60)), ("kv_consumer", remote("first", 60, 1))]
)
def test_to_wait_for_blocks_that_others_read_or_fill_is_no_stall(kv_role, first):
    made = engine(num_blocks=4, kv_role=kv_role)
    queue(made, first, local("second", 60, 1))
    while made.schedule(0.0):
        made.complete()
    assert made.num_free_blocks == 0
    assert made.schedule(9.0) is None


def test_no_leap_passes_a_fence():
    made = engine(async_scheduling=True)
    queue(made, local("a", 16, 40), one := local("b", 16, 2))
    made.schedule(0.0)
    made.complete()
    made.schedule(1.0)  # b's last token
    made.abort(one)
    made.complete()
    assert made.num_free_blocks == 12  # 2 each
    assert made.schedule(1.125, max_iterations=100).num_iterations == 1
    made.complete()
    assert made.num_free_blocks == 14


@pytest.mark.parametrize("max_iterations", [1, 100])
def test_no_leap_passes_what_lets_in_a_prompt_whose_load_failed(max_iterations):
    made = engine(num_blocks=6, kv_load_failure_policy="recompute", watermark=0.3)  # 2 of 7 blocks
    one = remote("d", 60, 2, content="same")
    runs = Sequence("l", num_prompt=8, max_tokens=40, chain=BlockChain([("same", 0)]))
    queue(made, one, runs)
    made.schedule(0.0)
    made.end_load(one, 0)
    made.complete()
    now = 1.0
    while one.state != RUNNING:
        now = made.schedule(now, max_iterations=max_iterations).end
        made.complete()
    assert one.cached_tokens == 16
    assert one.first_scheduled_s == 1.0 + 7 * 0.125  # with the 16th token of `l`, which fills its block


def test_to_be_read_means_nothing_to_whoever_was_aborted():
    made = engine(kv_role="kv_producer")
    made.add(one := handed_over("p", 100))
    made.schedule(0.0)
    made.abort(one)
    made.complete()
    made.release_kept(one)
    assert (one.state, made.num_free_blocks) == (OVER, 16)


def test_the_gap_around_a_dropped_token_begins_with_the_token_before():
    made = engine(num_blocks=4, async_scheduling=True, kv_role="kv_producer")
    queue(made, a := local("a", 31, 4), b := local("b", 31, 4))
    last, now = {}, 0.0
    while made.schedule(now) is not None:
        output = made.complete()
        now = output.end
        last |= dict.fromkeys(output.finished, now)
    assert b.num_preemptions == 1
    rows = made.log.rows
    logged = sum(rows[place] * rows[place + 3] * rows[place + 4] for place in range(0, len(rows), 5))
    assert logged == sum(last[one] - one.first_token_s for one in (a, b))
