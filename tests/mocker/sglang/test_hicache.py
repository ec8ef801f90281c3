"""HiCache: KV leaves the device for host memory and comes back, and nothing in use is lost on the way."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mocker import BlockChain, Sequence, new_engine
from mocker.contract import EngineStoppedError
from mocker.sglang.config import SglangConfig
from mocker.sglang.hicache.copies import Store
from mocker.sglang.scheduler import Scheduler
from mocker.tiers.config import HostMemory
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig
from mocker.timing.constant import Constant
from tests.mocker.sglang.test_engine import configs, drive, workloads
from tests.mocker.sglang.test_scheduler import request, tokens
from tests.support.examples import worth

ON = SglangConfig(enable_hierarchical_cache=True, disable_overlap_schedule=True, chunked_prefill_size=64)
PREFILL_S, DECODE_S = 1.0, 0.25


def step(scheduler):
    """Let one step pass; return what it computes of prompts, and what is free and cached, on the device and on the host."""
    work, pool = scheduler.schedule(), scheduler.pool
    prompts = [f"{each.id} {count}@{before}" for each, before, count in work.prefills]
    if work.kind == "idle":
        scheduler.rest()
    else:
        scheduler.process(work)
    return (
        f"{', '.join(prompts) or work.kind} | {pool.free} {pool.evictable} {pool.hosted.num_host_free * pool.page_size}"
    )


def steps(scheduler, count, *, ends=True):
    found = []
    for _ in range(count):
        found.append(step(scheduler))
        for _ in range(ends and 9):
            scheduler.pool.end_oldest(is_store=True)
            scheduler.pool.end_oldest(is_store=False)
    return found


# As the real scheduler does it: the numbers are its own


def test_a_prompt_is_copied_to_the_host_at_once_and_locked_until_that_has_ended():
    scheduler = Scheduler(replace(ON, page_size=4), 50, 101)
    scheduler.add(request("a", tokens(("a", 60)), 4, page_size=4))
    assert steps(scheduler, 5, ends=False) == [
        "a 60@0 | 140 0 344",
        "decode | 136 0 344",
        "decode | 136 0 344",
        "decode | 140 0 344",
        "idle | 140 0 344",
    ]
    scheduler.pool.end_oldest(is_store=True)
    assert steps(scheduler, 1) == ["idle | 140 60 344"]


def test_what_was_evicted_from_the_device_is_loaded_again():
    scheduler = Scheduler(replace(ON, page_size=4), 50, 101)
    scheduler.add(request("a", tokens(("a", 60)), 4, page_size=4))
    steps(scheduler, 6)
    scheduler.add(request("b", tokens(("b", 180)), 4, page_size=4))
    assert steps(scheduler, 8)[2] == "b 52@128 | 20 0 164"
    c = request("c", tokens(("a", 60), ("c", 20)), 4, page_size=4)
    scheduler.add(c)
    assert steps(scheduler, 1) == ["c 20@60 | 56 64 144"]
    assert c.num_loaded == 60


def test_fewer_than_10_tokens_are_computed_instead():
    scheduler = Scheduler(ON, 40, 81)
    scheduler.add(request("a", tokens(("a", 9)), 1))
    steps(scheduler, 3)
    scheduler.add(request("b", tokens(("b", 36)), 2))
    steps(scheduler, 5)
    again = request("again", tokens(("a", 9), ("c", 5)), 1)
    scheduler.add(again)
    assert steps(scheduler, 1)[0].startswith("again 14@0")
    assert (again.num_on_host, again.num_loaded) == (9, 0)


@pytest.mark.parametrize(
    ("policy", "copied"),
    [("write_through", ["30@0", 30]), ("write_through_selective", ["30@0", 0]), ("write_back", ["30@0", 0])],
)
def test_policies_copy_at_the_first_use_or_the_second_or_on_eviction(policy, copied):
    scheduler = Scheduler(replace(ON, hicache_write_policy=policy), 40, 81)
    scheduler.add(request("a", tokens(("a", 30)), 1))
    [first] = steps(scheduler, 1)
    assert (first.split()[1], 81 - int(first.split()[-1])) == tuple(copied)
    steps(scheduler, 2)
    scheduler.add(request("again", tokens(("a", 30)), 1))
    steps(scheduler, 3)
    assert 81 - scheduler.pool.hosted.num_host_free == {"write_back": 0}.get(policy, 30)
    scheduler.add(request("b", tokens(("b", 36)), 1))
    steps(scheduler, 1)
    assert scheduler.pool.hosted.num_host_free == {"write_back": 51}.get(policy, 51 - 36 * (policy == "write_through"))


# What always holds


@st.composite
def scripts(draw):
    """Return settings, room on device and host, and requests of a few users who come back."""
    rng = random.Random(draw(st.integers(0, 1 << 32)))
    page = rng.choice([1, 1, 4])
    config = replace(
        ON,
        page_size=page,
        hicache_write_policy=rng.choice(["write_through", "write_through_selective", "write_back"]),
        disable_overlap_schedule=rng.random() < 0.5,
        radix_eviction_policy=rng.choice(["lru", "lru", "lfu", "fifo", "slru", "priority"]),
        schedule_conservativeness=rng.choice([0.1, 1.0]),
    )
    asked, said = [], [[] for _ in range(rng.randint(2, 4))]
    for number in range(rng.randint(3, 30)):
        user = rng.randrange(len(said))
        said[user] = said[user][: rng.randint(0, 80)] + tokens((number, rng.randint(1, 40)))
        asked.append((rng.randint(0, 40 * number), request(number, said[user], rng.randint(1, 20), page)))
    return config, 160 // page, rng.choice([1, 30, 200, 1000]) // page + 1, asked, rng


def nodes(tree):
    found, stack = [], [tree.root]
    while stack:
        node = stack.pop()
        found.append(node)
        stack += node.children.values()
    return found[1:]


def check(pool):
    """Check what a tree in two places never is."""
    tree, found = pool.hosted, nodes(pool.hosted)
    assert all(node.on_device or node.on_host for node in found)
    assert all(node.parent is tree.root or node.parent.on_device or not node.on_device for node in found)
    if not tree.is_write_back:
        assert all(node.parent is tree.root or node.parent.on_host or not node.on_host for node in found)
    assert sum(node.num_pages for node in found if node.on_host) == tree.num_host_pages - tree.num_host_free
    assert 0 <= tree.num_host_free <= tree.num_host_pages
    unlocked = sum(node.num_pages for node in found if node.on_device and not node.num_locks)
    assert unlocked == tree.num_evictable
    assert pool.num_free + sum(node.num_pages for node in found if node.on_device) <= pool.num_pages
    for node in found:
        assert node.num_locks <= (node.parent.num_locks if node.parent is not tree.root else node.num_locks)
        if isinstance(node.store, Store):
            assert node.num_locks > 0
            assert node.on_device
            assert node.on_host


@given(script=scripts())
@settings(max_examples=worth(300), deadline=None)
def test_nothing_in_use_is_lost_and_all_pages_come_back(script):
    config, num_pages, num_host_pages, asked, rng = script
    scheduler = Scheduler(config, num_pages, num_host_pages)
    pool, in_flight, number = scheduler.pool, [], 0
    while asked or not scheduler.is_idle:
        for each in [one for one in asked if one[0] <= number]:
            asked.remove(each)
            scheduler.add(each[1])
        work = scheduler.schedule()
        check(pool)
        if work.kind != "idle":
            in_flight.append(work)
        if in_flight and (work.kind == "idle" or len(in_flight) > config.is_async):
            scheduler.process(in_flight.pop(0))
            check(pool)
        if work.kind == "idle" and not in_flight:
            scheduler.rest()
        for is_store in (True, False):
            if rng.random() < 0.3:
                pool.end_oldest(is_store=is_store)
        number += 1
        assert number < 20_000, "some request never ends"
    assert all(not node.num_locks and not node.num_host_locks for node in nodes(pool.hosted))
    assert pool.num_free + pool.tree.num_evictable == num_pages
    assert scheduler.flush()
    assert (pool.num_free, pool.hosted.num_host_free) == (num_pages, num_host_pages)


hosted = st.builds(
    replace,
    configs.filter(lambda config: not config.disable_radix_cache),
    enable_hierarchical_cache=st.just(True),
    hicache_write_policy=st.sampled_from(["write_through", "write_through_selective", "write_back"]),
)


@given(config=hosted, requests=workloads(), size=st.integers(0, 1 << 32))
@settings(max_examples=worth(200), deadline=None)
def test_a_leap_makes_what_its_iterations_make_one_by_one(config, requests, size):
    rng = random.Random(size)
    num_pages = rng.choice([160, 250, 400]) // config.page_size + 1
    host = HostMemory(
        num_chunks=rng.choice([20, 200, 900]) // config.page_size + 1,
        chunk_bytes=1.0,
        bandwidth=rng.choice([37.0, 911.0, 1e9]),
        num_layers=4,
    )
    try:
        expected = drive(config, num_pages, requests, max_iterations=1, host=host)
    except EngineStoppedError:
        with pytest.raises(EngineStoppedError):
            drive(config, num_pages, requests, max_iterations=1 << 30, host=host)
        return
    assert drive(config, num_pages, requests, max_iterations=1 << 30, host=host) == expected


# On the clock


def engine(num_pages, num_host_pages, bandwidth, **changes):
    """Return an engine whose pages are of 1 byte each, and whose model has 4 layers."""
    config = replace(ON, **changes)
    host = HostMemory(num_chunks=num_host_pages, chunk_bytes=1.0, bandwidth=bandwidth, num_layers=4)
    return new_engine(config, Constant(PREFILL_S, DECODE_S), num_blocks=num_pages, host=host)


def sequence(id, content):
    return Sequence(id, num_prompt=len(content), max_tokens=2, chain=BlockChain(content))


def run(made, one, now):
    """Let a sequence run alone; return how long each step took, and when all was over, copies included."""
    made.add(one)
    took = []
    while True:
        made_step = made.schedule(now)
        if made_step is not None:
            took.append(made_step.end - now)
            now = made.complete().end
        elif made.wake_s < float("inf"):
            now = made.wake_s
        else:
            return took, now


def test_a_prefill_waits_for_its_loads_layer_by_layer():
    took = {}
    for bandwidth in (1e9, 80.0, 10.0):
        made = engine(60, 200, bandwidth)
        _, now = run(made, sequence("a", tokens(("a", 40))), 0.0)
        _, now = run(made, sequence("b", tokens(("b", 50))), now)
        again = sequence("again", tokens(("a", 40), ("c", 5)))
        took[bandwidth], _ = run(made, again, now)
        assert (again.cached_tokens, again.host_tokens) == (40, 40)
        assert made.host_use().loads.num_bytes == 40
    assert took[1e9][0] == pytest.approx(1.0)
    assert took[80.0][0] == 1.0 + 0.5 / 4  # loads for half a second; the first layer waits for its own part
    assert took[10.0][0] == 4.0 + 1.0 / 4  # loads for four seconds; the last layer is computed after that


def test_with_write_back_a_step_waits_for_what_it_evicts():
    made = engine(60, 200, 80.0, hicache_write_policy="write_back")
    _, now = run(made, sequence("a", tokens(("a", 40))), 0.0)
    took, _ = run(made, sequence("b", tokens(("b", 50))), now)
    assert took == [pytest.approx(1.0 + 41 / 80), DECODE_S]  # 40 tokens of the prompt, and one of the answer
    use = made.host_use()
    assert (use.num_flushes, use.stall_s) == (2, pytest.approx(41 / 80))  # the answer is a node of its own


def test_stores_are_written_while_others_compute():
    made = engine(60, 200, 10.0)
    took, now = run(made, sequence("a", tokens(("a", 40))), 0.0)
    assert took == [PREFILL_S, DECODE_S]
    assert now == pytest.approx(
        PREFILL_S + 41 / 10
    )  # the prompt's begins when that is computed, and the answer's follows


@pytest.mark.parametrize(
    ("changes", "num_tokens"),
    [({}, 20_001), ({"hicache_ratio": 0.5}, 5_001), ({"hicache_size": 1}, int(1e9 // 131_072) + 1)],
)
def test_host_memory_is_as_large_as_sglang_makes_it(changes, num_tokens):
    config = SglangConfig(enable_hierarchical_cache=True, max_total_tokens=10_000, **changes)
    timing = TimingConfig(model="meta-llama/Llama-3.1-8B", gpu="h100", timed_as="sglang")
    host = resolve(config, timing).host
    assert (host.num_chunks, host.chunk_bytes, host.num_layers, host.bandwidth) == (num_tokens, 131_072, 32, 32e9)
