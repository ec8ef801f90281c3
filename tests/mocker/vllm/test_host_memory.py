"""Copies between the GPU and host memory take their time, and steps wait for those that must be over."""

import math

import pytest

from mocker import BlockChain, EngineConfig, Sequence, new_engine
from mocker.events import TierRemoved, TierStored
from mocker.tiers.config import HostMemory, Tier
from mocker.tiers.work import Found, Hurry, LookUp, Read, Write
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig
from mocker.vllm.block_pool import BlockPool
from mocker.vllm.block_runs import BlockWatch

PREFILL_S, DECODE_S = 1.0, 0.25
TIMING = TimingConfig(timing="constant", constant_prefill_ms=1000 * PREFILL_S, constant_decode_ms=1000 * DECODE_S)


def engine(
    *, num_blocks=8, num_chunks=16, bandwidth=math.inf, budget=64, tiers=(), policy="when_scheduled", **settings
):
    """Return an engine of blocks of 16 tokens whose chunks are of 1 byte each."""
    config = EngineConfig(
        block_size=16, num_gpu_blocks=num_blocks + 1, max_num_batched_tokens=budget, max_num_seqs=4, **settings
    )
    host = HostMemory(num_chunks=num_chunks, chunk_bytes=1.0, bandwidth=bandwidth, tiers=tiers, prefetch_policy=policy)
    return new_engine(config, resolve(config, TIMING).timing, num_blocks=config.num_gpu_blocks, host=host)


def prompt(name, num_prompt=80, max_tokens=2):
    return Sequence(name, num_prompt=num_prompt, max_tokens=max_tokens, chain=BlockChain([(name, i) for i in range(5)]))


def run(made, sequence, now):
    """Let a sequence run alone, and return what each step computed, and when it ended."""
    made.add(sequence)
    steps = []
    while not made.is_idle:
        step = made.schedule(now)
        if step is None:
            now = made.wake_s
            continue
        steps.append(({s.id: count for s, count in step.batch.chunks}, step.end - now))
        now = made.complete().end
    assert made.schedule(now) is None
    return steps, now


def again(name):
    sequence = prompt(name)
    sequence.id = f"{name} again"
    return sequence


def test_a_prompt_whose_blocks_were_evicted_comes_back_from_host_memory():
    made = engine(async_scheduling=False)
    now = run(made, prompt("a"), 0.0)[1]
    now = run(made, prompt("b"), now)[1]  # 2 blocks of a remain on the GPU
    sequence = again("a")
    steps, _ = run(made, sequence, now)
    assert [chunks for chunks, _ in steps] == [{"a again": 1}, {}]  # the last token of the prompt, then a decode
    assert (sequence.cached_tokens, sequence.host_tokens) == (80, 48)
    assert made.host_use().loads.num_bytes == 3
    assert made.host_use().stores.num_bytes == 10  # and nothing twice


def test_a_load_lasts_as_long_as_its_bytes_take():
    made = engine(async_scheduling=False, bandwidth=2.0)
    now = run(made, prompt("a"), 0.0)[1]
    now = run(made, prompt("b"), now)[1]
    made.add(again("a"))
    later = now + 100
    assert made.schedule(later) is None
    assert made.wake_s == later + 3 / 2
    step = made.schedule(made.wake_s)
    assert step.end - step.start == DECODE_S  # one token of a prompt that is there is a decode to the GPU


def test_a_step_waits_for_a_store_whose_blocks_it_takes():
    made = engine(num_blocks=5, async_scheduling=False, bandwidth=0.5, budget=128)
    made.add(prompt("a", max_tokens=1))
    made.schedule(0.0)
    made.complete()
    made.add(prompt("b", max_tokens=1))
    step = made.schedule(PREFILL_S)  # it takes the blocks of a, whose store of 10 s begins now
    assert step.end - step.start == 5 / 0.5 + PREFILL_S
    assert (made.host_use().num_flushes, made.host_use().stall_s) == (1, 10.0)


def test_stores_begin_with_the_next_step():
    made = engine(async_scheduling=False, bandwidth=10.0, budget=128)
    made.add(prompt("a", max_tokens=9))
    made.schedule(0.0)
    assert made.wake_s == math.inf
    made.complete()
    made.schedule(PREFILL_S)
    assert made.wake_s == PREFILL_S + 5 / 10


@pytest.mark.parametrize("is_async", [False, True])
def test_a_leap_ends_where_a_copy_does(is_async):
    made = engine(async_scheduling=is_async, bandwidth=5 / 0.6, budget=128)
    made.add(prompt("a", max_tokens=40))
    made.schedule(0.0)
    made.complete()
    ends = []
    while made.host_use().stores.num_bytes == 0 or made.wake_s < math.inf:
        ends.append(made.schedule(made.known_until_s, max_iterations=30).end)
        made.complete()
    assert ends[-1] == PREFILL_S + 3 * DECODE_S  # the store of 0.6 s is over at the third boundary


@pytest.mark.parametrize("is_async", [False, True])
def test_a_leap_goes_on_after_a_store_whose_event_can_wait(is_async):
    made = engine(async_scheduling=is_async, bandwidth=5 / 0.6, budget=128)
    made.ends_at_stores = False
    made.add(prompt("a", max_tokens=40))
    made.schedule(0.0)
    start = made.complete().end
    while (step := made.schedule(start, max_iterations=30)).num_iterations == 1:
        start = made.complete().end
    over = start + 3 * DECODE_S if made.host_use().stores.next_end_s > start + 2 * DECODE_S else start + 2 * DECODE_S
    assert step.end > over
    made.advance(over - DECODE_S / 2)
    assert not [event for event in made.outbox.take_events() if isinstance(event, TierStored)]
    made.advance(over)
    assert [event.stop for event in made.outbox.take_events() if isinstance(event, TierStored)] == [5]


def test_events_say_what_is_in_host_memory():
    made = engine(num_chunks=7, async_scheduling=False)
    now = run(made, prompt("a"), 0.0)[1]
    made.outbox.take_events()
    run(made, prompt("b"), now)
    tiers = [event for event in made.outbox.take_events() if isinstance(event, TierStored | TierRemoved)]
    stored = [name for event in tiers if isinstance(event, TierStored) for name in event.names()]
    removed = [name for event in tiers if isinstance(event, TierRemoved) for name in event.names()]
    assert stored == [("b", place) for place in range(5)]
    assert removed == [("a", 4), ("a", 3), ("a", 2)]
    assert {event.medium for event in tiers} == {"CPU"}


def test_without_prefix_caching_a_prompt_is_found_in_host_memory_only_and_without_events():
    made = engine(async_scheduling=False, enable_prefix_caching=False, num_blocks=20)
    now = run(made, prompt("a"), 0.0)[1]
    steps, _ = run(made, again("a"), now)
    assert [chunks for chunks, _ in steps] == [{"a again": 1}, {}]  # all of it was loaded
    assert made.outbox.take_events() == []


def test_a_copy_is_flushed_if_a_block_that_its_sequence_left_is_taken_without_prefix_caching():
    pool = BlockPool(8, enable_prefix_caching=False)
    one, other = prompt("a", 48), prompt("b", 32)
    for sequence, count in ((one, 3), (other, 2)):
        pool.allocate(count)
        sequence.num_blocks = count
    watch = BlockWatch(one)
    pool.watch(one, watch)
    pool.release(one, 3)
    pool.release(other, 2)
    pool.allocate(3)  # both blocks of the one that left last, and the last of the other's
    assert (pool.touched, watch.taken) == ([watch], [(2, 3)])
    pool.allocate(3)
    assert watch.taken == [(2, 3), (0, 2)]


def test_chunks_follow_from_the_kv_of_the_model():
    timing = TimingConfig(model="meta-llama/Llama-3.1-70B", gpu="h100", tensor_parallel_size=4)
    host = resolve(EngineConfig(block_size=16, kv_offloading_size=10, blocks_per_chunk=2), timing).host
    assert host.chunk_bytes == 2 * 16 * 327_680
    assert host.num_chunks == 10 * 2**30 // (2 * 16 * 327_680)
    assert host.bandwidth == 4 * 32e9  # each GPU copies its part


def test_host_memory_smaller_than_a_chunk_is_refused():
    with pytest.raises(
        ValueError,
        match=r"kv_offloading_size is 0.001 GiB; expected at least 0.001953, one chunk \(blocks_per_chunk is 1\)",
    ):
        resolve(EngineConfig(block_size=16, kv_offloading_size=0.001), TIMING)


def test_what_is_being_written_to_a_tier_can_be_loaded_meanwhile():
    made = engine(async_scheduling=False, tiers=(Tier(name="disk", num_chunks=100, bandwidth=1.0),))
    now, cached, writes = 0.0, [], []
    for sequence in (prompt("a"), prompt("b"), again("a")):
        made.add(sequence)
        while not made.is_idle:
            step = made.schedule(now)
            now = made.wake_s if step is None else made.complete().end
            for work in made.outbox.take_tier_work():
                if isinstance(work, LookUp):
                    made.end_look_up(work, [])
                else:
                    writes.append(work)
        cached.append(sequence.cached_tokens)
        made.schedule(now)
    assert cached == [0, 0, 80]
    assert {type(work) for work in writes} == {Write}  # and none of them has ended


def test_with_best_effort_a_look_up_made_at_a_prompts_turn_is_in_a_hurry_at_once():
    """An engine that is idle otherwise is not asked again before the look-up ends."""
    made = engine(tiers=(Tier(name="disk", num_chunks=100, bandwidth=1.0),), policy="best_effort")
    assert made._core.offload.ask(prompt("a"), 0) is None
    look_up, hurry = made.outbox.take_tier_work()
    assert hurry == Hurry(look_up)


def test_a_prompt_whose_kv_did_not_come_is_looked_up_in_the_tiers():
    disk = Tier(name="disk", num_chunks=100, bandwidth=1.0)
    made = engine(async_scheduling=False, tiers=(disk,), kv_role="kv_consumer", kv_load_failure_policy="recompute")
    sequence = Sequence(
        "a", num_prompt=80, max_tokens=2, chain=BlockChain([("a", i) for i in range(5)]), is_remote_prefill=True
    )
    made.add(sequence)
    assert made.schedule(0.0) is None
    assert made.outbox.take_loads() == [sequence]
    made.end_load(sequence, 0)
    assert made.schedule(0.0) is None
    [look_up] = made.outbox.take_tier_work()
    made.end_look_up(look_up, [])
    assert made.schedule(0.0).batch.chunks == [(sequence, 64)]


def test_what_leaves_host_memory_while_the_rest_is_fetched_is_fetched_too():
    """Its 8 chunks hold b and the first 3 of a, which c takes while the other 2 are read: a is fetched from its beginning."""
    disk = Tier(name="disk", num_chunks=100, bandwidth=1.0)
    made, now, reads, late = engine(num_blocks=6, num_chunks=8, async_scheduling=False, tiers=(disk,)), 0.0, [], []

    def go_on():
        nonlocal now
        while True:
            for work in made.outbox.take_tier_work():
                match work:
                    case LookUp():
                        made.end_look_up(work, [Found("disk", 5)] if work.sequence is sequence else [])
                    case Read():
                        reads.append(work.ranges)
                        late.append(work)
                    case Write():
                        made.end_write(work)
            step = made.schedule(now)
            if step is not None:
                now = made.complete().end
            elif made.wake_s < math.inf:
                now = made.wake_s
            elif not made.outbox.tier_work:
                return

    sequence = None
    for name in "ab":
        made.add(prompt(name))
        go_on()
    sequence = again("a")
    made.add(sequence)
    go_on()
    made.add(prompt("c"))
    go_on()
    while late:
        read = late.pop()
        made.end_read(read, read.num_chunks)
        go_on()
    assert reads == [[(3, 5)], [(0, 3)]]
    assert (sequence.cached_tokens, sequence.disk_tokens, sequence.host_tokens) == (80, 80, 0)


def test_a_chunk_that_left_host_memory_is_computed_again():
    """The second recording of the study: 7 chunks of host memory, and prompts a, b, c and b again."""
    made, now = engine(num_chunks=7, async_scheduling=False), 0.0
    for name in "abc":
        now = run(made, prompt(name), now)[1]
    stored = made.host_use().stores.num_bytes
    steps, _ = run(made, again("b"), now)
    # 2 blocks are on the GPU, and only those in host memory.
    assert [chunks for chunks, _ in steps] == [{"b again": 48}, {}]
    assert made.host_use().loads.num_bytes == 0
    assert made.host_use().stores.num_bytes == stored + 3


def with_slow_disk(policy="when_scheduled"):
    return engine(tiers=(Tier(name="disk", num_chunks=100, bandwidth=1.0),), policy=policy, async_scheduling=False)


@pytest.mark.parametrize("policy", ["when_scheduled", "wait_complete"])
def test_prompts_behind_a_disk_that_does_not_answer_are_not_asked_again(policy):
    made, num_asked = with_slow_disk(policy), 0
    for number in range(2000):
        made.add(prompt(number))
        num_asked += len(made._core.waiting)
        assert made.schedule(float(number)) is None
    assert num_asked == 2000
    assert made.num_waiting == 2000


def test_prompts_run_in_the_order_in_which_they_came_whichever_is_answered_first():
    made = with_slow_disk()
    sequences = [prompt(name) for name in "abcd"]
    for sequence in sequences:
        made.add(sequence)
    assert made.schedule(0.0) is None
    b, a = sorted(made.outbox.take_tier_work()[:2], key=lambda look_up: look_up.sequence.id, reverse=True)
    made.end_look_up(b, [])
    made.end_look_up(a, [])
    assert [one.id for one in made._core.queued()] == ["a", "b", "c", "d"]
    assert [one.id for one, _ in made.schedule(1.0).batch.chunks] == ["a"]  # a whole budget
    made.complete()
    assert [one.id for one in made._core.waiting] == ["b"]


def test_whoever_is_aborted_while_a_disk_is_asked_leaves_nothing():
    made = with_slow_disk()
    sequence = prompt("a")
    made.add(sequence)
    assert made.schedule(0.0) is None
    [look_up] = made.outbox.take_tier_work()
    made.abort(sequence)
    made.end_look_up(look_up, [])
    assert made.is_idle
    assert made.schedule(1.0) is None
