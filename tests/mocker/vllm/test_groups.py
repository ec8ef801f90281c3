"""Groups of layers in one pool: what each kind keeps, frees and is hit by, in blocks of 4 tokens."""

import pytest

from mocker import BlockChain, EngineConfig, Sequence
from mocker.events import BlockGroup, GroupRemoved, GroupStored, for_routers
from mocker.models.kv_groups import LayerKv, layout_of
from mocker.speculation.drafter import Drafter
from mocker.vllm.core import VllmCore
from mocker.vllm.groups.alignment import aligned_chunk
from mocker.vllm.groups.pool import Content, GroupPool

FULL, WINDOW, STATE = LayerKv(4.0), LayerKv(4.0, window=9), LayerKv(0.0, state=16.0)
CHUNK = LayerKv(4.0, window=8, is_chunked=True)


class NoneAccepted(Drafter):
    def proposed(self, sequence):
        return 1

    def accepted(self, sequence, num_drafts):
        return 0


def core_of(*layers, num_blocks=100, block_size=4, **settings):
    settings = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "async_scheduling": False} | settings
    config = EngineConfig(block_size=block_size, max_model_len=400, **settings)
    return VllmCore(config, num_blocks, None, layout_of(layers, block_size), drafter=NoneAccepted())


def prompt(name, length, output=1, *, like="", shared=0, size=4):
    """Return a prompt whose first blocks are those of another one."""
    names = [(like, place) if place < shared else (name, place) for place in range(length // size)]
    return Sequence(name, num_prompt=length, max_tokens=output, chain=BlockChain(names))


def run(core, *sequences):
    """Add sequences and run until all are over; return what each of them had cached."""
    found = {}
    for sequence in sequences:
        core.add(sequence)
    while (batch := core.schedule()) is not None:
        counts = dict(batch.chunks)
        found |= {each.id: each.num_computed - counts[each] for each in batch.admitted}
        core.update(batch)
    return found


def tables(core, sequence):
    return core.blocks.cache.tables(sequence)


def test_blocks_outside_a_window_are_freed_as_a_sequence_goes_on():
    core = core_of(FULL, WINDOW)
    core.add(one := prompt("a", 16, 20))
    core.update(core.schedule())
    assert tables(core, one) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    core.update(core.schedule())  # token 17 sees the 8 before it
    assert tables(core, one) == [[1, 2, 3, 4, 5], [0, 0, 7, 8, 9]]


def test_blocks_of_past_chunks_are_freed():
    core = core_of(FULL, CHUNK, max_num_batched_tokens=12)
    core.add(one := prompt("a", 20))
    core.update(core.schedule())
    core.schedule()
    assert [block == 0 for block in tables(core, one)[1]] == [True, True, False, False, False]


def test_only_the_running_state_has_a_block():
    core = core_of(FULL, STATE)
    core.add(one := prompt("a", 14, 9))
    assert dict(core.schedule().chunks) == {one: 12}  # up to the end of a block
    assert tables(core, one)[1] == [0, 0, 4]
    core.schedule()
    assert [bool(block) for block in tables(core, one)[1]] == [False, False, True, True]


def test_a_prompt_that_is_sent_again_is_hit_up_to_its_last_block():
    for layers in ([FULL, WINDOW], [FULL, STATE], [FULL, CHUNK], [WINDOW], [FULL, WINDOW, STATE]):
        core = core_of(*layers)
        assert run(core, prompt("a", 30)) == {"a": 0}
        assert run(core, prompt("b", 30, like="a", shared=7)) == {"b": 28}


def test_a_prompt_that_leaves_another_is_hit_where_a_third_left_it_before():
    for other in (WINDOW, STATE):
        core = core_of(FULL, other)
        run(core, prompt("a", 30))
        assert run(core, prompt("b", 30, like="a", shared=5)) == {"b": 0}
        assert run(core, prompt("c", 30, like="a", shared=5)) == {"c": 20}


@pytest.mark.parametrize(("interval", "hit"), [(0, 0), (16, 16), (None, 20)])
def test_an_interval_keeps_more_places_at_which_prompts_may_leave_another(interval, hit):
    core = core_of(FULL, WINDOW, prefix_cache_retention_interval=interval)
    run(core, prompt("a", 30))
    assert run(core, prompt("b", 30, like="a", shared=5)) == {"b": hit}


@pytest.mark.parametrize(("window", "hit"), [(10, 12), (9, 12), (5, 20)])
def test_a_window_that_lost_a_block_is_no_hit_where_it_is_needed(window, hit):
    core = core_of(FULL, LayerKv(4.0, window=window), prefix_cache_retention_interval=None)
    run(core, prompt("a", 25))
    pool = core.blocks.cache.pool
    pool.clear(pool.cached[1]["a", 3])
    assert run(core, prompt("b", 25, like="a", shared=5)) == {"b": hit}


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.32", [[("a", 12)], [], [("b", 14)], []]), ("0.33", [[("a", 12)], [("b", 14)], [], []])],
)
def test_a_state_that_is_computed_in_a_step_can_be_used_in_a_later_one(version, expected):
    core = core_of(FULL, STATE, engine_version=version)
    core.add(prompt("a", 14, 9))
    core.add(prompt("b", 14, 9, like="a", shared=3))
    started = []
    for _ in range(4):
        batch = core.schedule()
        started.append([(each.id, each.num_computed) for each in batch.admitted])
        core.update(batch)
    assert started == expected  # 0.32 also waits for the step after


def test_with_eagle_the_last_state_of_a_prompt_is_cached_although_blocks_of_several_sizes_do_not_end_there_together():
    eagle = {"num_speculative_tokens": 1, "speculative_method": "eagle", "engine_version": "0.32"}
    core = core_of(FULL, LayerKv(2.0), STATE, **eagle)  # blocks of 4, 8 and 4
    run(core, Sequence("a", num_prompt=22, max_tokens=4, chain=BlockChain(list(range(6)))))
    stored = [event for event in core.pool.events if isinstance(event, GroupStored) and event.group.kind == "mamba"]
    assert [event.ends for event in stored if event.ends] == [(16,)]  # a hit is expected at 8, where no chunk ended
    assert run(core, Sequence("b", num_prompt=26, max_tokens=1, chain=BlockChain(list(range(6))))) == {"b": 16}


def test_the_end_of_a_prompt_inside_a_block_is_cached_once_although_its_sequence_is_preempted():
    layers = FULL, LayerKv(2.0), LayerKv(4.0, window=100)  # in blocks of 4, 8 and 4: 12 tokens end inside one
    core = core_of(*layers, num_blocks=26, prefix_cache_retention_interval=None)
    older = Sequence("a", num_prompt=14, max_tokens=4, chain=BlockChain(["a", "b", "c", "d", "e"]))
    preempted = Sequence("b", num_prompt=16, max_tokens=5, chain=BlockChain(["f", "g", "h", "i", "j", "k"]))
    run(core, older, preempted)
    assert preempted.num_preemptions == 1
    stored = [event for event in core.pool.events if isinstance(event, GroupStored) and event.chain is preempted.chain]
    assert [event.stop for event in stored if event.group.number == 1] == [16, 12]


def test_with_states_alone_the_last_state_of_a_prompt_counts_as_computed_only_in_its_own_step():
    core = core_of(STATE, engine_version="0.32")
    core.add(prompt("a", 14, 9))
    core.add(prompt("b", 14, 9, like="a", shared=3))
    started = []
    for _ in range(3):
        batch = core.schedule()
        started.append([(each.id, each.num_computed) for each in batch.admitted])
        core.update(batch)
    assert started == [[("a", 12)], [("b", 14)], []]


def test_events_are_those_of_each_group_and_routers_go_by_the_one_that_keeps_everything():
    core = core_of(WINDOW, FULL)
    run(core, prompt("a", 30))
    stored = [event for event in core.pool.events if isinstance(event, GroupStored)]
    assert [(event.group.number, event.ends, for_routers(event)) for event in stored] == [
        (0, (24, 28), (0, 0)),
        (1, (4, 8, 12, 16, 20, 24, 28), (0, 7)),
    ]


def test_an_evicted_block_is_an_event_of_its_group():
    core = core_of(FULL, WINDOW, num_blocks=18)
    run(core, prompt("a", 30))
    core.pool.events.clear()
    run(core, prompt("b", 30))
    removed = [event for event in core.pool.events if isinstance(event, GroupRemoved)]
    assert [(event.group.number, for_routers(event)) for event in removed][:1] == [(0, (0, 7))]


def test_blocks_that_are_no_multiple_of_named_ones_are_shared_as_far_as_names_show():
    config = EngineConfig(block_size=16, max_model_len=400, max_num_batched_tokens=512, async_scheduling=False)
    core = VllmCore(config, 100, None, layout_of([LayerKv(4.0), LayerKv(0.0, state=96.0)], 24))
    run(core, prompt("a", 100, size=16))  # ends in the fifth block of 24, and in the seventh name
    assert run(core, prompt("b", 100, like="a", shared=6, size=16)) == {"b": 96}
    assert run(core, prompt("c", 100, like="a", shared=5, size=16)) == {"c": 0}  # some of 80 tokens: no state there
    assert run(core, prompt("d", 100, like="a", shared=5, size=16)) == {"d": 72}


def test_blocks_with_content_are_taken_last():
    group = BlockGroup(0, "full_attention", 0, 0, 4, 4, keeps_all=True, is_first=True)
    pool = GroupPool(6, [group])
    blocks = pool.take(5)
    pool.name([blocks[1]], Content(group, BlockChain(["a"]), 4, []), [4])
    pool.free([blocks[1], blocks[3], blocks[0]])
    assert (pool.num_free, pool.num_blank) == (3, 2)
    assert pool.take(3) == [blocks[3], blocks[0], blocks[1]]


@pytest.mark.parametrize(
    ("start", "count", "junction", "expected"),
    [
        (0, 100, 0, 48),  # the last block boundary of the prompt
        (48, 2, 0, 2),  # and the rest
        (0, 30, 0, 16),  # whole blocks
        (0, 100, 20, 16),  # where it leaves another prompt
        (20, 100, 0, 12),  # to the end of the block in which it is
        (17, 1, 0, 0),  # an encoder cut the chunk before, and less than that block is left to schedule
    ],
)
def test_chunks_end_where_states_can_be_shared(start, count, junction, expected):
    found = aligned_chunk(
        start,
        count,
        prompt=50,
        known=50,
        end_of_known=49,
        junction=junction,
        block_size=16,
        most=100,
        drops_last=False,
    )
    assert found == expected


def test_transfers_of_groups_are_refused_with_what_is_expected():
    with pytest.raises(ValueError, match="kv_role is set, and the model's layers keep KV in 2 groups"):
        core_of(FULL, WINDOW, kv_role="kv_producer")
