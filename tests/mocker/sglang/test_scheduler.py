"""What a reader can check by hand: the schedules of small scenarios, as a real SGLang made them."""

import pytest

from mocker import BlockChain
from mocker.models.kv_groups import LayerKv, layout_of
from mocker.sglang.config import SglangConfig
from mocker.sglang.core import SglangCore
from mocker.sglang.request import Request
from mocker.sglang.scheduler import Scheduler
from mocker.tiers.config import HostMemory, Tier


def tokens(*parts):
    """Return the names of tokens: ("a", 50) are 50 tokens that equal only others of that name."""
    return [(name, place) for name, count in parts for place in range(count)]


def request(id, content, max_new, page_size=1):
    """Return a request whose answer is always the same token."""
    ids, parent, all_tokens = [], None, content + ["answer"] * max_new
    for start in range(0, len(all_tokens) - page_size + 1, page_size):
        parent = hash((parent, *all_tokens[start : start + page_size]))
        ids.append(parent)
    return Request(id, BlockChain(ids), num_prompt=len(content), max_new=max_new, ignores_eos=True)


def run(scheduler, arrivals, num_steps):
    """Return what each step computes, as `E` or `M` with the prompts (tokens@prefix), or `D`; and what is free and cached."""
    found = []
    for step in range(num_steps):
        for each in arrivals.get(step, ()):
            scheduler.add(each)
        work = scheduler.schedule()
        prompts = [f"{each.id} {count}@{before}" for each, before, count in work.prefills]
        decodes = [str(each.id) for each in work.decodes]
        letter = {"extend": "E", "mixed": "M", "decode": "D", "idle": "-"}[work.kind]
        found.append(f"{letter} {', '.join(prompts + decodes)}".strip())
        if work.kind == "idle":
            scheduler.rest()
        else:
            scheduler.process(work)
        found[-1] += f" | {scheduler.pool.free} {scheduler.pool.evictable}"
    return found


def test_prompts_come_before_decodes_and_share_what_chunks_have_put_into_the_tree():
    scheduler = Scheduler(SglangConfig(chunked_prefill_size=64, disable_overlap_schedule=True), 2048)
    shared, rest = tokens(("s", 50)), tokens(("a", 50))
    a = request("a", shared + rest, 6)
    b = request("b", shared + tokens(("b", 20)), 4)
    c = request("c", tokens(("c", 30)), 3)
    d = request("d", shared + rest, 2)
    assert run(scheduler, {0: [a, b, c], 8: [d]}, 11) == [
        "E a 64@0 | 1984 0",
        "E a 36@64, b 20@50, c 8@0 | 1920 0",
        "E c 22@8 | 1898 0",
        "D a, b, c | 1895 0",
        "D a, b, c | 1892 32",
        "D a, b | 1890 55",
        "D a | 1889 55",
        "D a | 1888 160",
        "E d 1@99 | 1888 60",
        "D d | 1888 160",
        "- | 1888 160",
    ]


def test_new_requests_are_seen_after_a_prefill_and_then_once_in_an_interval():
    scheduler = Scheduler(SglangConfig(scheduler_recv_interval=3, disable_overlap_schedule=True), 2048)
    a, b, c = (request(name, tokens((name, 10)), 20) for name in "abc")
    assert [line.partition(" |")[0] for line in run(scheduler, {0: [a], 3: [b], 5: [c]}, 9)] == [
        "-",  # idle iterations count, too
        "-",
        "E a 10@0",
        "E b 10@0",
        "D a, b",
        "D a, b",
        "D a, b",
        "E c 10@0",
        "D a, b, c",
    ]


def test_a_prefix_is_shared_in_whole_pages():
    config = SglangConfig(page_size=16, chunked_prefill_size=64, disable_overlap_schedule=True)
    shared = tokens(("s", 50))
    a = request("a", shared + tokens(("a", 50)), 3, 16)
    b = request("b", shared + tokens(("b", 20)), 3, 16)
    steps = run(Scheduler(config, 128), {0: [a, b]}, 6)
    assert [step.split(" |")[0] for step in steps] == [
        "E a 64@0",
        "E a 36@64, b 16@48",
        "E b 6@64",
        "D a, b",
        "D a, b",
        "-",
    ]


def test_mixed_chunks_leave_room_for_the_decodes():
    config = SglangConfig(chunked_prefill_size=64, enable_mixed_chunk=True, disable_overlap_schedule=True)
    a, b = request("a", tokens(("a", 40)), 6), request("b", tokens(("b", 150)), 3)
    steps = run(Scheduler(config, 2048), {0: [a], 1: [b]}, 8)
    assert [step.split(" |")[0] for step in steps] == [
        "E a 40@0",
        "M b 63@0, a",
        "M b 63@63, a",
        "M b 24@126, a",
        "D b, a",
        "D b, a",
        "-",
        "-",
    ]


def test_the_longest_cached_prefix_goes_first():
    scheduler = Scheduler(
        SglangConfig(chunked_prefill_size=256, schedule_policy="lpm", disable_overlap_schedule=True), 2048
    )
    w = tokens(("w", 51))
    run(scheduler, {0: [request("w", w, 1)]}, 2)
    x = tokens(("x", 40))
    waiting = [
        request("x1", x, 1),
        request("x2", x + tokens(("y", 2)), 1),
        request("x3", w[:50] + tokens(("z", 2)), 1),
        request("x4", w[:20] + tokens(("u", 20)), 1),
    ]
    assert run(scheduler, {0: waiting}, 1)[0].startswith("E x3 2@50, x4 20@20, x1 40@0, x2 42@0 |")


def test_a_retracted_request_queues_at_the_end_and_keeps_its_tokens():
    config = SglangConfig(schedule_conservativeness=0.3, chunked_prefill_size=256, disable_overlap_schedule=True)
    scheduler = Scheduler(config, 256)
    arrivals = {step: [request(f"r{step}", tokens((f"r{step}", 40)), 60)] for step in range(4)}
    for each in arrivals.values():
        each[0].ignores_eos = False
    steps = run(scheduler, arrivals, 122)
    prompts = {number: step.split(" |")[0] for number, step in enumerate(steps) if step[0] == "E"}
    assert prompts == {0: "E r0 40@0", 1: "E r1 40@0", 2: "E r2 40@0", 62: "E r3 40@0, r2 46@40"}
    assert all(each[0].ending == "length" for each in arrivals.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"page_size": 16, "chunked_prefill_size": 8}, "chunked_prefill_size (8) must be at least page_size (16)"),
        (
            {"enable_hierarchical_cache": True, "disable_radix_cache": True},
            "enable_hierarchical_cache is true and disable_radix_cache is true; expected false: the radix cache is what "
            "finds KV in host memory",
        ),
        (
            {"enable_hierarchical_cache": True, "hicache_storage_backend": "file"},
            "hicache_storage_backend is file; expected none, because storage behind SGLang's host memory is not modelled yet",
        ),
        (
            {"enable_hierarchical_cache": True, "hicache_size": 30, "hicache_ratio": 1.5},
            "hicache_size is 30, and hicache_ratio is 1.5; expected only one of them: both set the size of host memory",
        ),
        (
            {"enable_priority_scheduling": True, "schedule_policy": "lpm"},
            "enable_priority_scheduling is true and schedule_policy is lpm; expected fcfs or lof",
        ),
    ],
)
def test_settings_that_no_engine_can_run_with_are_refused(settings, message):
    with pytest.raises(ValueError) as caught:
        SglangConfig(**settings)
    assert str(caught.value) == message


GROUPS = layout_of([LayerKv(4.0), LayerKv(4.0, window=32)], 16)


@pytest.mark.parametrize(
    "asked",
    [
        {"host": HostMemory(num_chunks=4, tiers=(Tier(name="disk", num_chunks=9, bandwidth=1e9),))},
        {"layout": GROUPS},
    ],
)
def test_what_is_not_modelled_is_refused(asked):
    with pytest.raises(ValueError, match="is not modelled yet"):
        SglangCore(SglangConfig(), 16, **asked)
