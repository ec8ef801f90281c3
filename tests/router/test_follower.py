"""Whatever happens to KV events on their way, the index is right again after a snapshot."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.router.blocks import PromptBlocks
from serving.router.events import BlocksCleared, BlocksRemoved, BlocksStored
from serving.router.follower import KvFollower
from serving.router.index import PrefixIndex
from serving.worker.kv_events import EVENT_HASHES, MEDIA, BlockLedger, decode_kv_event, encode_kv_event
from tests.support.examples import worth

UNIVERSE = list(range(1, 9))

TIERS = ("CPU", "STORAGE")


def blocks(index, worker, universe):
    return {block for block in universe if index.holds(block, worker)}


def reachable(ledger):
    """Return the blocks on the GPU whose whole prefix is held: what is of use, and what a router should know."""
    return {block for stored in ledger.dump() if stored.medium == "GPU" for block in stored.hashes}


def beyond(ledger):
    """Return the blocks beyond the GPU, each with its medium."""
    return {(stored.medium, block) for stored in ledger.dump() if stored.medium != "GPU" for block in stored.hashes}


def beyond_known(index, universe):
    """Return those that an index knows of worker 0."""
    tiers = index.tiers._tiers
    return {(medium, block) for medium in TIERS for block in universe if tiers[medium].has(block, 0, 0)}


@st.composite
def histories(draw):
    """Return a worker's messages, and what it holds after each: chains grow, are evicted, restarts happen."""
    ledger, epoch, number, messages = BlockLedger(), 1, 0, []
    for _ in range(draw(st.integers(1, 25))):
        kind = draw(st.sampled_from(["store", "store", "store", "remove", "offload", "forget", "clear", "restart"]))
        held = sorted(reachable(ledger))
        if kind == "store":
            parent = draw(st.sampled_from([None, *held]))
            start = (parent or 0) * 7 % 1000 * 10
            event = BlocksStored([start + place + 1 for place in range(draw(st.integers(1, 4)))], parent)
            if parent in event.hashes:
                continue
        elif kind == "remove" and held:
            event = BlocksRemoved([draw(st.sampled_from(held))])
        elif kind == "offload":
            hashes = draw(st.lists(st.sampled_from(UNIVERSE), min_size=1, max_size=4, unique=True))
            event = BlocksStored(hashes, None, draw(st.sampled_from(TIERS)))
        elif kind == "forget":
            hashes = draw(st.lists(st.sampled_from(UNIVERSE), min_size=1, max_size=4, unique=True))
            event = BlocksRemoved(hashes, draw(st.sampled_from(TIERS)))
        elif kind == "clear":
            event = BlocksCleared(draw(st.sampled_from([None, "GPU", "CPU"])))
        elif kind == "restart":
            ledger, epoch, number = BlockLedger(), epoch + 1, 0
            continue
        else:
            continue
        ledger.apply(event)
        messages.append((epoch, number, [event]))
        number += 1
    return messages, epoch, number, ledger


@settings(max_examples=worth(300))
@given(histories(), st.data())
def test_loss_repetition_and_reordering_are_mended_by_one_snapshot(history, data):
    messages, epoch, number, ledger = history
    index = PrefixIndex()
    follower = KvFollower(index)
    arriving = [
        message for message in messages for _ in range(data.draw(st.sampled_from([0, 1, 1, 1, 2]), label="copies"))
    ]
    arriving = data.draw(st.permutations(arriving), label="order") if data.draw(st.booleans()) else arriving
    early = data.draw(st.integers(0, len(arriving)), label="before the snapshot")
    for message in arriving[:early]:
        follower.on_events(0, *message)
    follower.on_snapshot(0, epoch, number, ledger.dump())
    for message in arriving[early:]:  # late ones change nothing
        assert not follower.on_events(0, *message)
    universe = {block for _, _, (event,) in messages if isinstance(event, BlocksStored) for block in event.hashes}
    assert blocks(index, 0, universe) == reachable(ledger)
    assert beyond_known(index, universe) == beyond(ledger)


@settings(max_examples=worth(200))
@given(histories())
def test_messages_in_order_need_no_snapshot_and_a_lost_one_asks_for_it(history):
    messages, _, _, ledger = history
    index = PrefixIndex()
    follower = KvFollower(index)
    asked = [follower.on_events(0, *message) for message in messages]
    if not any(asked) and messages and messages[-1][0] == history[1]:
        universe = {block for _, _, (event,) in messages if isinstance(event, BlocksStored) for block in event.hashes}
        assert beyond_known(index, universe) == beyond(ledger)
        # Less where a block was removed before those behind it and came back: they are told anew or in a snapshot.
        assert blocks(index, 0, universe) <= reachable(ledger)
        if not any(isinstance(event, BlocksRemoved) and event.medium == "GPU" for _, _, (event,) in messages):
            assert blocks(index, 0, universe) == reachable(ledger)
    lossy = KvFollower(PrefixIndex())
    if len(messages) > 2 and messages[0][0] == messages[2][0]:
        lossy.on_events(0, *messages[0])
        assert lossy.on_events(0, *messages[2])


def test_a_tail_that_was_lost_is_noticed_by_the_second_heartbeat():
    follower = KvFollower(PrefixIndex())
    follower.on_events(0, 1, 0, [BlocksStored([1], None)])
    assert not follower.on_heartbeat(0, 1, 1)
    assert not follower.on_heartbeat(0, 1, 2)
    assert follower.on_heartbeat(0, 1, 2)
    assert not follower.on_heartbeat(0, 1, 2)  # a snapshot is awaited already


def test_events_during_a_snapshots_journey_are_applied_once_behind_it():
    index = PrefixIndex()
    follower = KvFollower(index)
    assert follower.on_events(0, 5, 3, [BlocksStored([4], 3)])
    assert not follower.on_events(0, 5, 4, [BlocksStored([5], 4)])
    assert not follower.on_snapshot(0, 5, 4, [BlocksStored([1, 2, 3, 4], None)])
    assert index.overlaps(PromptBlocks.of([1, 2, 3, 4, 5])) == {0: 5}


def test_an_older_epoch_changes_nothing():
    index = PrefixIndex()
    follower = KvFollower(index)
    follower.on_events(0, 9, 0, [BlocksStored([1], None)])
    assert not follower.on_events(0, 8, 0, [BlocksCleared()])
    assert index.overlaps(PromptBlocks.of([1])) == {0: 1}


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1), st.none() | st.integers(0, 2**64 - 1), st.sampled_from(MEDIA))
def test_events_travel_whole(hashes, parent, medium):
    stored, removed = BlocksStored(hashes, parent, medium), BlocksRemoved(hashes, medium)
    for event in (stored, removed, BlocksCleared(medium), BlocksCleared()):
        assert list(map(decode_kv_event, encode_kv_event(event))) == [event]


def test_what_happened_on_a_gpu_travels_without_a_medium_and_an_unknown_one_is_refused():
    assert list(encode_kv_event(BlocksStored([1], None))) == [[None, [1]]]
    assert list(encode_kv_event(BlocksRemoved([1]))) == [[[1]]]
    for event in ([None, [1], "TAPE"], [[1], "TAPE"], ["TAPE"]):
        with pytest.raises(ValueError, match="not a KV event"):
            decode_kv_event(event)


def test_a_gpu_that_is_cleared_leaves_host_memory_and_a_worker_that_starts_again_leaves_the_shared_store():
    index = PrefixIndex()
    follower = KvFollower(index)
    stored = [BlocksStored([1, 2], None, medium) for medium in ("CPU", "SHARED")]
    follower.on_events(0, 5, 0, [BlocksStored([1, 2], None), *stored, BlocksCleared("GPU")])
    prompt = PromptBlocks.of([1, 2])
    assert index.overlaps(prompt) == {}
    assert index.tiers.runs(prompt, {}, [0, 1]) == {0: (2, 0, 0), 1: (0, 0, 2)}
    follower.on_events(0, 6, 0, [])
    assert index.tiers.runs(prompt, {}, [0, 1]) == {0: (0, 0, 2), 1: (0, 0, 2)}


def test_long_events_travel_in_parts():
    hashes = list(range(2 * EVENT_HASHES + 1))
    parts = [hashes[:EVENT_HASHES], hashes[EVENT_HASHES:-1], hashes[-1:]]
    stored = [BlocksStored(parts[0], 7), BlocksStored(parts[1], parts[0][-1]), BlocksStored(parts[2], parts[1][-1])]
    assert list(map(decode_kv_event, encode_kv_event(BlocksStored(hashes, 7)))) == stored
    assert list(map(decode_kv_event, encode_kv_event(BlocksRemoved(hashes)))) == list(map(BlocksRemoved, parts))
