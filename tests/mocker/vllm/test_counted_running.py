"""Sequences that run, counted in each iteration: what speculation and pipelines need, and the same as in closed form without."""

import random
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mocker import BlockChain, EngineConfig, Sequence
from mocker.speculation.drafter import Drafter
from mocker.tiers.copies import SequenceCopy
from mocker.vllm.core import VllmCore
from tests.mocker.vllm.test_leap import configs, hosts, make, workloads
from tests.support.examples import worth


class Given(Drafter):
    """As many drafts as there may be, of which this many are accepted, again and again."""

    def __init__(self, most, accepted=()):
        self.most, self.accepts = most, deque(accepted)

    def proposed(self, sequence):
        return self.most

    def accepted(self, sequence, num_drafts):
        self.accepts.rotate(-1)
        return min(self.accepts[-1], num_drafts) if self.accepts else 0


def sequence(id, prompt, output, *, stop_after=None, ids=None):
    ids = [(id, place) for place in range(prompt // 16)] if ids is None else ids
    return Sequence(id, num_prompt=prompt, max_tokens=output, stop_after=stop_after, chain=BlockChain(ids))


def core(num_drafts=3, accepted=(), *, num_stages=1, **more):
    given = {"block_size": 16, "num_gpu_blocks": 17, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    config = EngineConfig(**(given | {"async_scheduling": False, "num_speculative_tokens": num_drafts} | more))
    return VllmCore(config, config.num_gpu_blocks, drafter=Given(num_drafts, accepted), num_stages=num_stages)


def scheduled(made):
    batch = made.schedule()
    return batch, {one.id: count for one, count in made.num_new_tokens(batch)}


def steps_of(made):
    """Return the tokens that each step computes, and those that it brings, one step after the other."""
    found = []
    while made.running or made.waiting:
        batch, tokens = scheduled(made)
        sampled, _ = made.update(batch)
        brought = {one.id: count for one, count in batch.emitted} | {one.id: 1 for one in sampled}
        found.append((tokens, brought))
    return found


# Speculation


def test_a_decode_computes_its_drafts_too_and_gets_those_that_are_accepted():
    made = core(3, [1, 3, 0])
    made.add(sequence("a", 30, 9))
    made.add(sequence("b", 40, 1))
    assert steps_of(made) == [
        ({"a": 30, "b": 34}, {"a": 1}),
        ({"a": 4, "b": 6}, {"a": 2, "b": 1}),
        ({"a": 4}, {"a": 4}),
        ({"a": 4}, {"a": 1}),
        ({"a": 4}, {"a": 1}),  # two were accepted
    ]


def test_tokens_after_the_last_or_after_a_stop_are_dropped():
    made = core(3, [3])
    made.add(sequence("length", 20, 3))
    made.add(sequence("stop", 20, 30, stop_after=4))
    assert [brought for _, brought in steps_of(made)] == [{"length": 1, "stop": 1}, {"length": 2, "stop": 3}]


def test_asynchronously_each_decode_has_all_drafts_before_it_is_known_what_was_accepted():
    made = core(3, [3], async_scheduling=True)
    made.add(sequence("a", 20, 30))
    first, tokens = scheduled(made)
    second, more = scheduled(made)
    assert (tokens, more) == ({"a": 20}, {"a": 4})
    made.update(first)
    third, more = scheduled(made)
    assert more == {"a": 4}
    made.update(second)
    assert [(one.id, count) for one, count in second.emitted] == [("a", 4)]
    assert made.running[0].num_known == 25
    made.update(third)
    assert made.running[0].num_known == 29


def test_the_budget_cuts_drafts_and_a_draft_model_takes_a_token_of_it_for_each_sequence():
    def tokens(method):
        made = core(5, max_num_batched_tokens=16, max_num_seqs=4, speculative_method=method)
        for id in "abc":
            made.add(sequence(id, 4, 9))
        made.update(made.schedule())
        return scheduled(made)[1]

    assert tokens("eagle") == {"a": 6, "b": 6, "c": 4}
    assert tokens("draft_model") == {"a": 6, "b": 6, "c": 1}


def test_drafts_do_not_go_beyond_the_longest_sequence():
    made = core(3, max_model_len=24)
    made.add(sequence("a", 20, 30))
    assert [tokens for tokens, _ in steps_of(made)] == [{"a": 20}, {"a": 3}, {"a": 2}, {"a": 1}]


@pytest.mark.parametrize(("method", "num_blocks"), [("ngram", 1), ("eagle", 2), ("draft_model", 2)])
def test_a_drafter_with_a_cache_of_its_own_needs_places_ahead(method, num_blocks):
    made = core(3, speculative_method=method)
    made.add(one := sequence("a", 14, 9))
    made.schedule()
    assert one.num_blocks == num_blocks


@pytest.mark.parametrize(
    ("version", "method", "num_cached"),
    [
        ("0.32", "ngram", 32),
        ("0.32", "draft_model", 32),
        ("0.32", "eagle3", 16),
        ("0.32", "mtp", 16),
        ("0.33", "mtp", 32),
    ],
)
def test_drafts_from_the_models_own_states_needed_the_last_cached_block_again(version, method, num_cached):
    made = core(3, speculative_method=method, engine_version=version)
    made.add(sequence("a", 40, 1, ids=["x", "y"]))
    made.update(made.schedule())
    made.add(one := sequence("b", 40, 9, ids=["x", "y"]))
    made.schedule()
    assert one.cached_tokens == num_cached


def test_drafts_of_a_preempted_sequence_are_thrown_away():
    more = {"num_gpu_blocks": 5, "max_num_batched_tokens": 20, "enable_prefix_caching": False}
    made = core(3, speculative_method="ngram", **more)
    made.add(sequence("first", 26, 9))
    made.add(sequence("second", 20, 9))
    tokens = [tokens.get("second", 0) for tokens, _ in steps_of(made)]
    assert tokens[:5] == [0, 14, 6, 4, 4]
    # Then it is preempted, with 23 tokens and 3 drafts.
    assert [count for count in tokens[5:] if count][:3] == [20, 3, 4]


def test_what_a_victim_was_given_in_the_same_step_is_taken_back():
    more = {"num_gpu_blocks": 4, "max_num_batched_tokens": 12, "enable_prefix_caching": False}
    more |= {"scheduling_policy": "priority", "scheduler_reserve_full_isl": False}
    made = core(2, speculative_method="draft_model", **more)
    low, high, tail = sequence("low", 4, 9), sequence("high", 10, 9), sequence("tail", 20, 1)
    low.priority = 1
    for steps, new in ((1, low), (3, high), (1, tail)):
        made.add(new)
        for _ in range(steps):
            made.update(made.schedule())
    batch, tokens = scheduled(made)  # high needs a second block, and low, which is before it, has had 3 tokens
    assert [one.id for one in batch.preempted] == ["low"]
    assert tokens == {"high": 3, "tail": 7}  # of 12, with one more for each of them
    assert {one.id: count for one, count in batch.drafts.items()} == {"high": 2}


class TestPadding:
    """A sequence that needs only its last prompt token is scheduled like a decode, with drafts that are all rejected."""

    def started(self, budget=64, **more):
        made = core(3, [3], speculative_method="ngram", max_num_batched_tokens=budget, **more)
        made.add(first := sequence("first", 33, 9, ids=["x", "y"]))
        while first.num_known == 33:
            made.update(made.schedule())
        made.add(sequence("same", 33, 9, ids=["x", "y"]))
        return made

    def test_it_gets_one_token(self):
        made = self.started()
        batch, tokens = scheduled(made)
        assert tokens == {"first": 4, "same": 4}
        assert {one.id: count for one, count in batch.drafts.items()} == {"first": 3, "same": 3}
        sampled, _ = made.update(batch)
        assert [one.id for one in sampled] == ["same"]
        same = made.running[1]
        assert (same.num_known, same.num_computed) == (34, 33)

    def test_it_waits_rather_than_to_be_scheduled_with_less(self):
        made = self.started(budget=7, max_num_seqs=2)
        made.add(sequence("none", 1, 1))
        assert scheduled(made)[1] == {"first": 4}
        assert [one.id for one in made.waiting] == ["same", "none"]

    @pytest.mark.parametrize(("max_model_len", "count"), [(36, 1), (37, 4)])
    def test_only_if_there_is_room_for_the_token_that_comes(self, max_model_len, count):
        assert scheduled(self.started(max_model_len=max_model_len))[1]["same"] == count

    def test_not_if_nothing_is_computed_for_anybody(self):
        made = core(3, speculative_method="ngram")
        made.add(sequence("one token", 1, 9))
        assert scheduled(made)[1] == {"one token": 1}

    def test_not_beside_a_chunk_of_a_running_prompt(self):
        made = self.started(budget=40)
        made.add(sequence("long", 90, 2))
        made.waiting.rotate(1)
        chunks = [tokens for tokens, _ in steps_of(made)[:4]]
        assert chunks == [
            {"first": 4, "long": 36},
            {"first": 4, "long": 36},
            {"long": 18, "same": 1},
            {"long": 4, "same": 4},
        ]


def test_speculation_needs_a_drafter():
    config = EngineConfig(num_speculative_tokens=2, num_gpu_blocks=20)
    with pytest.raises(ValueError, match="num_speculative_tokens is 2; expected a drafter"):
        VllmCore(config, 20)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"max_num_batched_tokens": 4, "max_num_seqs": 2}, "max_num_batched_tokens is 4, and num_speculative_tokens 3"),
        ({"long_prefill_token_threshold": 3}, "long_prefill_token_threshold is 3, and num_speculative_tokens 3"),
    ],
)
def test_there_must_be_room_for_a_sequence_with_all_its_drafts(settings, problem):
    with pytest.raises(ValueError, match=f"{problem}; expected"):
        EngineConfig(num_speculative_tokens=3, **settings)


def test_a_sequence_that_could_not_place_its_drafts_is_refused():
    made = core(3, num_gpu_blocks=3)
    with pytest.raises(ValueError, match="20 prompt and 8 output tokens need 3 KV blocks; the cache has 2"):
        made.add(sequence("a", 20, 8))
    made.add(sequence("b", 20, 7))


def test_n_grams_need_synchronous_scheduling():
    assert not EngineConfig(num_speculative_tokens=2, speculative_method="ngram").is_async
    with pytest.raises(ValueError, match="async_scheduling is true, and speculative_method is ngram"):
        EngineConfig(num_speculative_tokens=2, speculative_method="ngram", async_scheduling=True)


# Pipelines


def test_a_sequence_is_in_no_second_batch_before_its_token_is_known_but_its_prompt_may_be():
    made = core(0, num_stages=2)
    made.add(sequence("long", 100, 3))
    first, tokens = scheduled(made)
    second, more = scheduled(made)
    third, none = scheduled(made)
    assert (tokens, more, none) == ({"long": 64}, {"long": 36}, {})
    for batch in (first, second, third):
        made.update(batch)
    assert scheduled(made)[1] == {"long": 1}


def test_asynchronously_the_tokens_of_a_sequence_are_as_many_batches_apart_as_there_are_stages():
    made = core(0, num_stages=3, async_scheduling=True)
    made.add(sequence("a", 10, 9))
    batches = [scheduled(made) for _ in range(4)]
    assert [tokens for _, tokens in batches] == [{"a": 10}, {}, {}, {"a": 1}]


def test_blocks_of_a_consumer_wait_for_all_batches_that_may_write_them():
    made = core(0, num_stages=3, kv_role="kv_consumer")
    made.add(one := sequence("a", 150, 3))
    batches = [made.schedule() for _ in range(3)]
    made.abort(one)
    free = [made.pool.num_free]
    for batch in batches:
        made.update(batch)
        free.append(made.pool.num_free)
    assert free == [6, 6, 6, 16]


# In closed form and counted


def facts_of(made, batch):
    """Return what a batch and its core say; a batch of decodes is the same one in consecutive iterations."""
    found = {
        "running": [one.id for one in made.running],
        "waiting": [one.id for one in made.queued()],
        "holding": [(one.id, one.state) for one in made.holding],
        "kept": [one.id for one in made.retention.kept],
        "fenced": [one.id for _, one in made.retention.fenced],
        "free": made.pool.num_free,
        "reserved": made.num_reserved_blocks(),
        "view": made.view(),
    }
    if batch is None:
        return found
    age = made.iteration - 1 - batch.iteration
    names = ("decodes", "sampled", "admitted", "resumed", "preempted", "starved", "delayed")
    found |= {name: [one.id for one in getattr(batch, name)] for name in names}
    return found | {
        "tokens": [(one.id, count) for one, count in made.num_new_tokens(batch)],
        "chunks": [(one.id, count, one.num_computed) for one, count in batch.chunks],
        "kv": batch.num_kv_tokens + age * len(batch.decodes),
    }


def events_of(made):
    """Return the blocks of each event since the last time."""
    made.publish()
    return [
        (type(one).__name__, list(one.keys() if hasattr(one, "keys") else one.names()))
        for one in made.outbox.take_events()
    ]


class Pair:
    """Two cores, one of which counts, asked the same."""

    def __init__(self, config, host, max_loras):
        if max_loras is not None:
            config = replace(config, enable_lora=True, max_loras=max_loras)
        cores = [VllmCore(config, config.num_gpu_blocks, host, is_counted=is_counted) for is_counted in (False, True)]
        self.has_adapters = max_loras is not None
        self.cores, self.flights = cores, deque()
        self.sequences = ({}, {})
        self.names = {}  # of a block in the one -> in the other

    def add(self, config, request):
        for made, known in zip(self.cores, self.sequences, strict=True):
            known[request[1]] = one = make(config, request, 1)
            one.is_token_shipped = False  # vLLM computes it here
            one.adapter = ("", "a", "b", "c")[request[1] % 4] if self.has_adapters else ""
            made.add(one)

    def abort(self, number):
        for made, known in zip(self.cores, self.sequences, strict=True):
            made.abort(known[number])

    def schedule(self):
        batches = [made.schedule() for made in self.cores]
        self.flights.append(batches)
        self._compare(batches)

    def update(self):
        batches, found = self.flights.popleft(), []
        for made, batch in zip(self.cores, batches, strict=True):
            tokens = {} if batch is None else {one.id: 1 for one in batch.decodes if made.is_delivered(one)}
            sampled, finished = ([], []) if batch is None else made.update(batch)
            tokens |= {one.id: 1 for one in sampled}
            found.append((tokens, sorted(one.id for one in finished)))
        assert found[0] == found[1]
        counted = batches[1]
        if counted is not None:
            assert {one.id: count for one, count in counted.emitted}.items() <= found[1][0].items()
        self._compare([None, None])

    def move(self, rng):
        """End some of the transfers and copies that were begun."""
        loads, copies = [], []
        for made in self.cores:
            loads.append([one.id for one in made.outbox.take_loads()])
            work = made.take_copies()
            copies.append([copy.number for copy in (*work.loads, *work.stores) if isinstance(copy, SequenceCopy)])
        assert (loads[0], copies[0]) == (loads[1], copies[1])
        return loads[0], copies[0]

    def end(self, loads, copies, kept, num_valid):
        for made, known in zip(self.cores, self.sequences, strict=True):
            for number in loads:
                if made.end_load(known[number], num_valid):
                    known[number].is_failed = True
            for number in copies:
                copy = made.offload._copies[number]
                made.end_copy(copy)
            for number in kept:
                made.retention.release(known[number])

    def _compare(self, batches):
        mine, other = (facts_of(made, batch) for made, batch in zip(self.cores, batches, strict=True))
        assert mine == other
        mine, other = map(events_of, self.cores)
        assert [(kind, len(keys)) for kind, keys in mine] == [(kind, len(keys)) for kind, keys in other]
        for (_, keys), (_, others) in zip(mine, other, strict=True):
            for key, its in zip(keys, others, strict=True):
                assert self.names.setdefault(key, its) == its

    @property
    def is_idle(self):
        made = self.cores[0]
        return not (self.flights or made.running or made.num_waiting)


@settings(max_examples=worth(200))
@given(configs, hosts, st.sampled_from([None, 1, 2]), workloads(), st.integers(0, 1 << 32))
def test_counted_or_in_closed_form_the_same_happens(config, host, max_loras, requests, seed):
    rng = random.Random(seed)
    host = host if config.enable_prefix_caching and not (host and host.tiers) else None
    pair, depth = Pair(config, host, max_loras), 1 + int(config.is_async)
    arrivals = deque(requests)
    aborts = {number: when for when, number, *_, aborted, _, _, _ in requests if aborted is not None}
    loads, copies, turn = [], [], 0
    while arrivals or not pair.is_idle:
        turn += 1
        if turn > 2000 or pair.cores[0].is_stuck:
            return  # vLLM would be stuck, too
        while arrivals and arrivals[0][0] <= turn / 4:
            pair.add(config, arrivals.popleft())
        for number in [number for number in aborts if number in pair.sequences[0] and rng.random() < 0.1]:
            del aborts[number]
            pair.abort(number)
        pair.schedule()
        begun, copied = pair.move(rng)
        loads, copies = loads + begun, copies + copied
        if len(pair.flights) == depth:
            pair.update()
            come = [number for number in loads if rng.random() < 0.4]
            done = [number for number in copies if rng.random() < 0.4]
            kept = [one.id for one in pair.cores[0].retention.kept if one.id not in loads and rng.random() < 0.4]
            loads = [number for number in loads if number not in come]
            copies = [number for number in copies if number not in done]
            pair.end(come, done, kept, rng.choice([None, None, 0, 1]))
