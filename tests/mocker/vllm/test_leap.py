"""A leap is many steps at once: the same schedules, times and events."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mocker import BlockChain, BlockRemoved, BlockStored, EngineConfig, Sequence
from mocker.engine import Engine
from mocker.events import GroupRemoved, GroupStored, TierRemoved
from mocker.models.kv_groups import LayerKv, layout_of
from mocker.tiers.config import HostMemory, Tier
from mocker.tiers.ranges import count
from mocker.tiers.work import Found, Hurry, Read, Write
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig
from mocker.vllm.core import VllmCore
from tests.support.examples import worth

MAX_LORAS = st.sampled_from([None, None, 1, 2])
INTERVALS = st.sampled_from([("0.32", 1), ("0.33", 1), ("0.33", 1), ("0.33", 3), ("0.33", 7)])
configs = st.builds(
    lambda rules, **settings: EngineConfig(engine_version=rules[0], prefill_schedule_interval=rules[1], **settings),
    INTERVALS,
    block_size=st.sampled_from([1, 2, 4, 16]),
    num_gpu_blocks=st.integers(24, 90),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.sampled_from([6, 7, 16, 64]),
    enable_prefix_caching=st.booleans(),
    scheduling_policy=st.sampled_from(["fcfs", "fcfs", "priority"]),
    watermark=st.sampled_from([0.0, 0.1]),
    scheduler_reserve_full_isl=st.booleans(),
    long_prefill_token_threshold=st.sampled_from([0, 0, 5]),
    async_scheduling=st.booleans(),
    max_model_len=st.sampled_from([None, None, 60]),
    kv_role=st.sampled_from([None, None, "kv_producer", "kv_consumer", "kv_both"]),
    kv_load_failure_policy=st.sampled_from(["fail", "recompute"]),
)
POLICIES = st.sampled_from(["write_through", "write_through_selective", "write_back"])
tiers = st.lists(
    st.builds(
        Tier,
        name=st.sampled_from(["disk", "store"]),
        num_chunks=st.just(0),
        bandwidth=st.sampled_from([50.0, 7.0]),
        lookup_s=st.sampled_from([0.01, 0.2]),
        write_policy=POLICIES,
    ),
    max_size=2,
    unique_by=lambda tier: tier.name,
).map(tuple)
hosts = st.none() | st.builds(
    HostMemory,
    tiers=tiers,
    prefetch_policy=st.sampled_from(["when_scheduled", "wait_complete", "best_effort"]),
    num_chunks=st.integers(2, 60),
    blocks_per_chunk=st.sampled_from([1, 1, 2, 3]),
    eviction_policy=st.sampled_from(["lru", "arc"]),
    store_threshold=st.sampled_from([0, 0, 2]),
    load_tokens_within_step=st.sampled_from([0, 0, 40]),
    offload_prompt_only=st.booleans(),
    chunk_bytes=st.just(1.0),
    bandwidth=st.sampled_from([math.inf, 300.0, 40.0, 7.0]),
    latency_s=st.sampled_from([0.0, 1e-4, 0.03]),
)
timings = st.sampled_from(
    [TimingConfig(), TimingConfig(timing="constant", constant_prefill_ms=250.0, constant_decode_ms=125.0)]
)


@st.composite
def workloads(draw, max_requests=14):
    rng = random.Random(draw(st.integers(0, 1 << 32)))
    requests, now = [], 0.0
    for number in range(draw(st.integers(1, max_requests))):
        now += rng.choice([0.0, 0.0, 0.125, rng.random(), 3 * rng.random()])
        group, depth = rng.randrange(3), rng.randrange(5)
        aborted = now + 3 * rng.random() if rng.random() < 0.15 else None
        stop = rng.randint(1, 40) if rng.random() < 0.5 else None
        transfer_s = (
            rng.choice([1e-6, 1, 4]) * rng.random() if rng.random() < 0.6 else None
        )  # never just as a step ends
        requests.append(
            (
                now,
                number,
                group,
                depth,
                rng.randint(1, 30),
                rng.choice([1, rng.randint(1, 40)]),
                rng.randrange(3),
                aborted,
                stop,
                transfer_s,
                rng.randrange(6) if rng.random() < 0.2 else None,
            )
        )
    return requests


def make(config, request, blocks_per_id):
    now, number, group, depth, extra, output, priority, _, stop, transfer_s, _ = request
    size = config.block_size
    limit = min((config.num_gpu_blocks - 2) * size, config.max_model_len or 1 << 30)
    prompt = min(depth * 4 * size + extra, limit // 2)
    shared = [("shared", group, place) for place in range(depth * 4 // blocks_per_id)]
    full = prompt // size
    is_turned = config.kv_role == "kv_both" and number % 2 == 0  # it loads, others hand over
    own = [("own", group, depth, number % 5, place) for place in range(len(shared), -(-full // blocks_per_id))]
    chain = BlockChain((shared + own)[: -(-full // blocks_per_id)], full, blocks_per_id=blocks_per_id)
    sequence = Sequence(
        number,
        num_prompt=prompt,
        max_tokens=min(output, (config.num_gpu_blocks - 2) * size // 2),
        stop_after=stop,
        is_remote_prefill=transfer_s is not None and (config.kv_role == "kv_consumer" or is_turned),
        is_remote_decode=transfer_s is not None and config.is_kv_producer and not is_turned,
        chain=chain,
        priority=priority,
        arrival=now + number / 1e9,
        adapter=("", "a", "b", "c")[number % 4],
    )
    sequence.is_token_shipped = sequence.is_remote_prefill and number % 3 == 0
    sequence.payload = request
    return sequence


def drive(
    config,
    timing,
    requests,
    *,
    max_iterations,
    ordered=True,
    looks=(),
    blocks_per_id=1,
    one_by_one=False,
    host=None,
    end_at_stores=True,
    layout=None,
    is_counted=False,
    max_loras=None,
):
    """Run a workload to its end as the drivers do and return all that can be seen of it."""
    num_blocks = config.num_gpu_blocks * (1 if layout is None else len(layout.groups))
    if max_loras is not None:
        config = replace(config, enable_lora=True, max_loras=max_loras)
    core = VllmCore(config, num_blocks, host, layout, is_counted=is_counted)
    engine = Engine(config, core, resolve(config, timing).timing, host=host, kv_events=True, ordered_events=ordered)
    engine._core.has_fast_paths = not one_by_one
    engine.ends_at_stores = end_at_stores
    happenings = sorted(
        [(request[0], 0, request) for request in requests]
        + [(request[7], 1, request) for request in requests if request[7] is not None]
        + [(look, 2, None) for look in looks],
        key=lambda happening: happening[:2],
    )
    sequences, log, events, now = {}, [], [], 0.0
    most_copies = 0
    world = Tiers(engine, host) if host else None
    free_at_look = []

    def happen(kind, request):
        if kind == 0:
            sequences[request[1]] = make(config, request, blocks_per_id)
            engine.add(sequences[request[1]])
        elif kind == 1:
            engine.abort(sequences[request[1]])
        elif kind == 3:
            sequence = sequences[request[1]]
            num_bad = request[10]
            num_valid = (
                None
                if num_bad is None
                else max((sequence.num_prompt - 1) // config.block_size - num_bad, sequence.num_cached_blocks)
            )
            log.extend(("over", over.id) for over in engine.end_load(sequence, num_valid))
        elif kind == 4:
            engine.release_kept(sequences[request[1]])
        elif kind == 5:
            world.end(request)

    def follow(time):
        for end, work in world.begin(time) if world else ():
            later(end, 5, work)

    def later(time, kind, request):
        happenings.append((time, kind, request))
        happenings.sort(key=lambda happening: happening[:2])

    while happenings or not engine.is_idle or engine.step or (world and world.under_way):
        if engine.step is None:
            while happenings and happenings[0][0] <= now:
                happen(*happenings.pop(0)[1:])
                follow(now)
            step = engine.schedule(now, max_iterations=max_iterations)
            follow(now)
            if step is not None and world and world.has_hurried:
                step.cut(now)  # as for any answer: a sequence may have become free to run
            for sequence in engine.outbox.take_loads():
                log.append((now, "loads", sequence.id, sequence.num_blocks, engine.num_free_blocks))
                later(now + sequence.payload[9], 3, sequence.payload)
            if step is None:
                if world and world.has_hurried:
                    world.has_hurried = False
                    continue
                next_s = min(happenings[0][0] if happenings else math.inf, engine.wake_s)
                if next_s == math.inf and not engine.is_idle:
                    assert engine.is_stuck, "nothing can happen any more, but requests are left"
                    log.append((now, "stuck", [s.id for s in engine._core.holding], engine.num_free_blocks))
                    break
                now = max(now, next_s) if next_s < math.inf else now
                continue
            batch = engine.step.batch
            if batch.chunks or batch.preempted:
                chunks = [(sequence.id, count) for sequence, count in batch.chunks]
                log.append(
                    (
                        now,
                        chunks,
                        [s.id for s in batch.preempted],
                        engine.num_free_blocks,
                        len(batch.decodes),
                    )
                )
        if happenings and happenings[0][0] < engine.step.end:
            time, kind, request = happenings.pop(0)
            if kind == 2:
                engine.advance(time)
                taken = engine.outbox.take_events()
                events += taken
                free_at_look.append((time, [type(event).__name__ for event in taken] and len(events)))
                continue
            happen(kind, request)
            follow(time)
            engine.step.cut(time)
            continue
        if layout is None:
            most_copies = max(most_copies, *map(len, engine._core.pool._copies.values()), 0)
        output = engine.complete()
        follow(output.end)
        if max_iterations == 1 and layout is None:
            assert_findable(engine._core.pool)
        now = output.end
        for sequence in output.finished:
            if sequence in engine._core.retention.kept:
                later(now + sequence.payload[9], 4, sequence.payload)
        events += engine.outbox.take_events()
        log.append((now, [s.id for s in output.finished], engine.num_free_blocks)) if output.finished else None
    rows = [(s.id, s.first_token_s, s.num_preemptions, s.cached_tokens, s.host_tokens) for s in sequences.values()]
    if host is not None and not engine.is_stuck:
        events += settle(engine, now)
        rows.append((engine.host_use().stall_s, engine.host_use().num_flushes))
        rows += world.rows
    gaps, data = [], engine.log.rows
    for place in range(0, len(data), 5):
        first, slope, curve, count, tokens = data[place : place + 5]
        gaps += [first + j * (slope + j * curve) for j in range(int(count)) for _ in range(int(tokens))]
    if not engine.is_stuck:
        assert engine.num_free_blocks == engine.num_blocks
        assert not (engine._core.retention.kept or engine._core.retention.fenced)
    return {"log": log, "rows": rows, "gaps": sorted(gaps)}, flat(events), (len(data), most_copies)


class Tiers:
    """Tiers of unlimited size behind host memory; what is hurried brings half of what was asked for."""

    def __init__(self, engine, host):
        self.engine, self.tiers = engine, {tier.name: tier for tier in host.tiers}
        self.held = {name: set() for name in self.tiers}
        self.under_way, self.rows, self.has_hurried = [], [], False

    def names(self, chain, ranges):
        return [self.engine._core.offload.host.name(chain, c) for start, stop in ranges for c in range(start, stop)]

    def begin(self, now):
        """Do what the engine asks, and yield what ends when; never just as a step ends."""
        while work := self.engine.outbox.take_tier_work():
            for each in work:
                if isinstance(each, Write):
                    duration = count(each.ranges) / self.tiers[each.tier].bandwidth
                elif isinstance(each, Hurry):
                    self.has_hurried |= each.fetch in self.under_way
                    self.end(each.fetch, is_hurried=True)
                    continue
                elif isinstance(each, Read):
                    duration = each.num_chunks / self.tiers[each.tier].bandwidth
                else:
                    duration = max(tier.lookup_s for tier in self.tiers.values())
                self.under_way.append(each)
                yield now + duration + 1.3e-5 * math.pi, each

    def end(self, work, is_hurried=False):
        if work not in self.under_way:
            return
        self.under_way.remove(work)
        if isinstance(work, Write):
            self.held[work.tier].update(self.names(work.chain, work.ranges))
            self.engine.end_write(work)
        elif isinstance(work, Read):
            assert self.held[work.tier].issuperset(self.names(work.sequence.chain, work.ranges))
            num_chunks = work.num_chunks // 2 if is_hurried else work.num_chunks
            self.rows.append((work.sequence.id, work.tier, work.ranges, num_chunks))
            self.engine.end_read(work, num_chunks)
        else:
            self.engine.end_look_up(work, [] if is_hurried else self.found(work))

    def found(self, look_up):
        found, chunk = [], look_up.start
        for name in self.names(look_up.sequence.chain, [(look_up.start, look_up.stop)]):
            tier = next((tier for tier, held in self.held.items() if name in held), None)
            if tier is None:
                break
            chunk += 1
            found.append(Found(tier, chunk))
        return found


def settle(engine, now):
    """Let what is copied end, and return the events of that: nothing is copied, pinned or watched any more."""
    assert engine.schedule(now) is None
    while engine.wake_s < math.inf:
        assert engine.schedule(engine.wake_s) is None
    for work in engine.outbox.take_tier_work():
        engine.end_write(work)
    offload = engine._core.offload
    assert offload.is_quiet and not offload._states and not offload._copies
    assert offload.host.num_evictable == offload.host.num_used <= offload.host.num_chunks
    return engine.outbox.take_events()


def assert_findable(pool):
    """Each cached block has one run to be found in, and every run can be walked to from its chain's start."""
    runs = dict.fromkeys(pool._index.values())
    found = [run.chain.key(block) for run in runs for block in range(run.start, run.stop)]
    assert len(found) == len(set(found))
    for run in runs:
        block = 0
        while block < run.stop:
            block = pool._index[run.chain.key(block)].stop
        assert block == run.stop
    assert sum(run.stop - run.start for run in pool._queue) == pool.num_evictable


def assert_same(one, other):
    assert (one["log"], one["rows"]) == (other["log"], other["rows"])
    # Durations are one formula evaluated at shifted places: equal but for the last bit.
    assert one["gaps"] == pytest.approx(other["gaps"], rel=1e-9)


def flat(events):
    """Name every block, one entry an event and block, with private blocks named by nothing but their offset."""
    rows = []
    for event in events:
        if isinstance(event, BlockStored):
            rows += [("stored", label(event.chain, block)) for block in range(event.start, event.stop)]
        elif isinstance(event, BlockRemoved):
            rows += [("removed", label(event.chain, block)) for block in range(event.stop - 1, event.start - 1, -1)]
        elif isinstance(event, GroupStored):
            blocks = [end // event.group.unit - 1 for end in event.ends]
            rows += [("stored", event.group.number, event.stop, [label(event.chain, block) for block in blocks])]
        elif isinstance(event, GroupRemoved):
            blocks = [end // event.group.unit - 1 for end in event.ends]
            rows += [("removed", event.group.number, label(event.chain, block)) for block in blocks]
        else:
            size = event.blocks_per_chunk
            last_blocks = [(chunk + 1) * size - 1 for chunk in range(event.start, event.stop)]
            if isinstance(event, TierRemoved) and event.is_tail_first:
                last_blocks.reverse()
            rows += [(type(event).__name__, label(event.chain, block)) for block in last_blocks]
    return rows


def label(chain, block):
    named = chain.ids[block // chain.blocks_per_id] if block < chain.num_named else "private"
    return named, block


# Two that were loaded hold all blocks; the first lacks one for its next token, and the second waits behind it.
LOCKED = [
    (0.8444218515250481, 0, 0, 2, 12, 1, 2, None, 20, None, 1),
    (0.9694218515250481, 1, 2, 4, 22, 22, 2, None, 5, None, 3),
    (0.9694218515250481, 2, 2, 3, 3, 1, 2, None, None, 3.6639779214275388, None),
    (1.0944218515250481, 3, 2, 0, 15, 1, 1, None, None, 8.0317946927987e-07, None),
    (1.2194218515250481, 4, 2, 2, 18, 14, 1, None, None, None, 3),
    (1.2194218515250481, 5, 0, 1, 30, 1, 2, 4.163321073019679, 5, 8.767703708227748e-07, None),
]


def test_sequences_that_hold_all_blocks_lock_the_engine_up_as_they_do_in_vllm():
    config = EngineConfig(
        engine_version="0.32",
        block_size=1,
        num_gpu_blocks=24,
        max_num_seqs=1,
        max_num_batched_tokens=6,
        scheduling_policy="priority",
        scheduler_reserve_full_isl=False,
        kv_role="kv_consumer",
        async_scheduling=False,
    )
    host = HostMemory(num_chunks=16, chunk_bytes=1.0, offload_prompt_only=False)
    for max_iterations in (1, 1 << 62):
        seen, *_ = drive(config, TimingConfig(), LOCKED, max_iterations=max_iterations, host=host)
        _, what, holding, num_free = seen["log"][-1]
        assert (what, len(holding), num_free) == ("stuck", 2, 0)


@settings(max_examples=worth(300))
@given(configs, timings, workloads(), st.lists(st.floats(0, 10), max_size=6), hosts, st.booleans(), MAX_LORAS)
def test_a_leap_equals_repeated_steps(config, timing, requests, looks, host, end_at_stores, max_loras):
    step_by_step, step_events, _ = drive(config, timing, requests, max_iterations=1, host=host, max_loras=max_loras)
    how = {"max_iterations": 1 << 62, "host": host, "end_at_stores": end_at_stores, "max_loras": max_loras}
    leaping, leap_events, _ = drive(config, timing, requests, **how)
    assert_same(leaping, step_by_step)
    assert leap_events == step_events
    looked_at, looked_events, _ = drive(config, timing, requests, looks=looks, **how)
    assert_same(looked_at, step_by_step)
    assert looked_events == step_events


@st.composite
def layouts(draw, block_size):
    """Groups of layers: those that keep everything, and others beside them."""
    window = st.integers(1, 4 * block_size + 3)
    layers = [LayerKv(1.0)] * draw(st.integers(0, 1))
    layers += [LayerKv(1.0, window=draw(window)) for _ in range(draw(st.integers(0, 2)))]
    layers += [LayerKv(1.0, window=draw(window), is_chunked=True)] * draw(st.integers(0, 1))
    layers += [LayerKv(0.5, window=draw(window))] * draw(st.integers(0, 1))
    layers += [LayerKv(0.0, state=0.5 * block_size)] * (draw(st.integers(0, 1)) if layers else 0)
    return layout_of(layers or [LayerKv(1.0, window=draw(window))], block_size)


@settings(max_examples=worth(300))
@given(configs, timings, workloads(), st.sampled_from([0, 0, None, 32]), st.data())
def test_groups_of_layers_go_the_same_way_in_leaps_step_by_step_and_counted(config, timing, requests, interval, data):
    config = replace(config, kv_role=None, prefix_cache_retention_interval=interval)
    layout = data.draw(layouts(config.block_size))
    rule, rule_events, _ = drive(config, timing, requests, max_iterations=1, layout=layout, one_by_one=True)
    for how in ({"max_iterations": 1}, {"max_iterations": 1 << 62}):
        seen, events, _ = drive(config, timing, requests, layout=layout, **how)
        assert_same(seen, rule)
        assert events == rule_events
    counted, counted_events, _ = drive(config, timing, requests, max_iterations=1, layout=layout, is_counted=True)
    assert counted_events == rule_events
    assert rounded(counted["log"]) == rounded(rule["log"])  # times are sums of other parts


def rounded(rows):
    return [(round(row[0], 9), *row[1:]) for row in rows]


@settings(max_examples=worth(150))
@given(configs, timings, workloads(), hosts, MAX_LORAS)
def test_what_is_scheduled_at_once_is_what_the_rule_schedules_one_by_one(config, timing, requests, host, max_loras):
    how = {"max_iterations": 1, "host": host, "max_loras": max_loras}
    plain, plain_events, _ = drive(config, timing, requests, one_by_one=True, **how)
    fast, fast_events, _ = drive(config, timing, requests, **how)
    assert fast == plain
    assert fast_events == plain_events


@settings(max_examples=worth(150))
@given(configs, timings, workloads(), hosts)
def test_unordered_events_change_nothing_else(config, timing, requests, host):
    ordered, events, _ = drive(config, timing, requests, max_iterations=1 << 62, host=host)
    unordered, unordered_events, _ = drive(config, timing, requests, max_iterations=1 << 62, ordered=False, host=host)
    assert_same(unordered, ordered)
    assert sorted(unordered_events, key=repr) == sorted(events, key=repr)


@settings(max_examples=worth(200))
@given(configs, timings, workloads(), hosts, st.sampled_from([2, 4]))
def test_ids_that_span_several_blocks_change_nothing(config, timing, requests, host, blocks_per_id):
    fine, fine_events, (_, most_copies) = drive(config, timing, requests, max_iterations=1 << 62, host=host)
    # Which of three copies of a block is the oldest is known per id, not per block: see docs/fidelity.md.
    assume(most_copies < 2)
    # The same content named block by block and in longer runs.
    coarse, coarse_events, _ = drive(
        config, timing, requests, max_iterations=1 << 62, blocks_per_id=blocks_per_id, host=host
    )
    assert_same(coarse, fine)
    assert [(kind, block) for kind, (_, block) in coarse_events] == [(kind, block) for kind, (_, block) in fine_events]


def test_a_leap_is_one_row_of_the_step_log():
    config = EngineConfig(block_size=16, num_gpu_blocks=100)
    _, _, (size, _) = drive(
        config, TimingConfig(), [(0.0, 0, 0, 1, 10, 40, 0, None, None, None, None)], max_iterations=1 << 62
    )
    assert size == 5
