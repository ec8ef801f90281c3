"""What a router core hears of a live system, on a network in memory."""

import asyncio
import logging
import random
from types import SimpleNamespace

import msgspec
import pytest

from serving.model.card import ModelCard, ModelType
from serving.router import Router, RouterConfig
from serving.router.blocks import PromptBlocks
from serving.routing.following import Following, WorkerTraits, traits_of
from serving.routing.placement import RankAddress
from serving.runtime.address import EndpointAddress
from serving.worker.kv_events import KvEvents
from serving.worker.load_reports import LoadReport
from tests.routing.network import Network

ADDRESS = EndpointAddress("test", "backend", "generate")
EVENTS = ADDRESS.subject("kv_events")
LOAD = ADDRESS.subject("load_metrics")


def follow(talk, *, traits=lambda _: WorkerTraits(1, True), mode="kv"):
    """Run a test's talk with what follows a network, and the network's other end."""

    async def main():
        here, there = (network := Network()).join(1), network.join(2)
        core = Router(mode, RouterConfig(), block_size=16, rng=random.Random(1))
        following = Following(here, ADDRESS, core, traits)
        await following.start()
        await talk(SimpleNamespace(following=following, core=core, instances=here.instances, plane=there))
        await following.close()

    asyncio.run(main())


async def settle():
    """Let the tasks that were started run to their end."""
    for _ in range(20):
        await asyncio.sleep(0)


def overlaps(world, *hashes):
    return world.core.index.overlaps(PromptBlocks.of(hashes))


def beyond(world, *hashes):
    prompt = PromptBlocks.of(hashes)
    return world.core.index.tiers.runs(prompt, overlaps(world, *hashes), list(world.following.ranks))


async def tell(world, number, *events, instance=7, epoch=5, rank=0):
    message = KvEvents(instance, rank, epoch, number, list(events))
    await world.plane.publish(EVENTS, msgspec.msgpack.encode(message))
    await settle()


def test_each_rank_has_a_slot_and_slots_are_used_again():
    async def talk(world):
        world.instances.join(7)
        world.instances.join(8)
        assert world.following.ranks == {0: (7, 0), 1: (7, 1), 2: (8, 0), 3: (8, 1)}
        world.instances.leave(7)
        world.instances.join(9)
        assert world.following.ranks == {2: (8, 0), 3: (8, 1), 0: (9, 0), 1: (9, 1)}
        assert world.following.slots == {rank: slot for slot, rank in world.following.ranks.items()}

    follow(talk, traits=lambda _: WorkerTraits(2, False))


def test_an_instance_is_routed_to_once_its_card_has_come():
    cards = {}

    async def talk(world):
        world.instances.join(7)
        assert world.following.ranks == {}
        cards["its key"] = ModelCard(
            name="m", model_type=ModelType.Backend, instance_id=7, **ADDRESS._asdict(), num_ranks=2
        )
        world.following.on_card(7)
        world.following.on_card(7)
        assert world.following.ranks == {0: (7, 0), 1: (7, 1)}

    follow(talk, traits=lambda instance_id: traits_of(cards, instance_id))


def test_a_worker_that_joins_sends_a_snapshot_and_events_go_on_from_there():
    async def talk(world):
        world.instances.snapshots[7] = [[5, 3], [None, [1, 2]], [2, [3]]]
        world.instances.join(7)
        await settle()
        assert world.instances.asked == [(7, "kv_snapshot", 0)]
        assert overlaps(world, 1, 2, 3, 4) == {0: 3}
        await tell(world, 2, [[1]])  # is in the snapshot already
        await tell(world, 3, [3, [4]])
        assert overlaps(world, 1, 2, 3, 4) == {0: 4}
        await tell(world, 4, [])
        assert overlaps(world, 1) == {}
        assert len(world.instances.asked) == 1

    follow(talk)


def test_a_gap_is_mended_by_one_snapshot_however_much_follows_it():
    async def talk(world):
        world.instances.snapshots[7] = [[5, 0]]
        world.instances.join(7)
        await settle()
        world.instances.snapshots[7] = [[5, 3], [None, [1, 2, 3]]]
        await tell(world, 0, [None, [1]])
        await asyncio.gather(tell(world, 2, [2, [3]]), tell(world, 3, [3, [4]]))
        assert overlaps(world, 1, 2, 3, 4) == {0: 4}
        assert len(world.instances.asked) == 2

    follow(talk)


def test_a_snapshot_of_a_worker_that_has_left_meanwhile_is_dropped():
    async def talk(world):
        world.instances.snapshots[7] = [[5, 1], [None, [1]]]
        world.instances.join(7)
        world.instances.leave(7)
        world.instances.join(8)  # gets the number that 7 had
        await settle()
        assert overlaps(world, 1) == {}

    follow(talk)


def test_what_workers_hold_beyond_their_gpus_comes_with_events_and_snapshots():
    async def talk(world):
        world.instances.snapshots[7] = [[5, 1], [None, [1]], [None, [1, 2], "CPU"]]
        world.instances.join(7)
        world.instances.snapshots[8] = [[5, 0]]
        world.instances.join(8)
        await settle()
        assert beyond(world, 1, 2, 3) == {0: (1, 0, 0)}
        await tell(world, 1, [[1]], [None, [3], "STORAGE"])
        assert beyond(world, 1, 2, 3) == {0: (2, 1, 0)}
        await tell(world, 0, [None, [1, 2, 3, 4], "SHARED"], instance=8)
        assert beyond(world, 1, 2, 3, 4) == {0: (2, 1, 1), 1: (0, 0, 4)}
        await tell(world, 2, [[2], "CPU"], [[4], "SHARED"])
        assert beyond(world, 1, 2, 3, 4) == {0: (1, 1, 1), 1: (0, 0, 3)}

    follow(talk)


def test_the_second_report_of_unheard_events_asks_for_a_snapshot():
    async def talk(world):
        world.instances.snapshots[7] = [[5, 0]]
        world.instances.join(7)
        await settle()
        world.instances.snapshots[7] = [[5, 1], [None, [1]]]
        for _ in range(2):
            assert overlaps(world, 1) == {}
            report = LoadReport(7, 0, 5, 1, 0, 0, 0, 100, 8)
            await world.plane.publish(LOAD, msgspec.msgpack.encode(report))
            await settle()
        assert overlaps(world, 1) == {0: 1}

    follow(talk)


def test_load_is_kept_as_long_as_its_worker_is_there():
    async def talk(world):
        world.instances.join(7)
        report = LoadReport(7, 0, 0, 0, 3, 2, 50, 100, 8)
        for told in (report, LoadReport(99, 0, 0, 0, 3, 2, 50, 100, 8)):
            await world.plane.publish(LOAD, msgspec.msgpack.encode(told))
        assert world.following.loads == {RankAddress(7, 0): report}
        world.instances.leave(7)
        assert world.following.loads == {}

    follow(talk, traits=lambda _: WorkerTraits(1, False))


def test_what_is_no_message_is_ignored_and_logged(caplog):
    caplog.set_level(logging.WARNING)

    async def talk(world):
        world.instances.snapshots[7] = [[5, 0]]
        world.instances.join(7)
        await settle()
        for subject in (EVENTS, LOAD):
            await world.plane.publish(subject, b"\xc1")
        for event in (["stored", 1], [None, [{}], "CPU"], [None, [None]], [True, [1]]):
            await tell(world, 0, event)
        await tell(world, 0, [None, [1]])
        assert overlaps(world, 1) == {0: 1}

    follow(talk)
    assert caplog.text.count("was ignored") == 6


@pytest.mark.parametrize("snapshot", [None, [], [[5]], [[5, 0], ["stored"]], [[5, 0], [None, [{}]]], ["rubbish"]])
def test_the_next_gap_asks_again_for_a_snapshot_that_did_not_come_or_is_none(snapshot, caplog):
    async def talk(world):
        if snapshot is not None:
            world.instances.snapshots[7] = snapshot
        world.instances.join(7)
        await settle()
        world.instances.snapshots[7] = [[5, 2], [None, [1, 2]]]
        await tell(world, 1, [1, [2]])
        assert overlaps(world, 1, 2) == {0: 2}

    follow(talk)
    assert "no KV snapshot of instance 7" in caplog.text


def test_a_mode_without_overlap_listens_to_no_events():
    async def talk(world):
        assert not world.plane.network.listeners[EVENTS]
        world.instances.join(7)
        await settle()
        assert world.instances.asked == []

    follow(talk, mode="round-robin")
