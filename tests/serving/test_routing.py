"""The router on a real network in this process: what it hears, and what routers tell each other."""

import asyncio
from contextlib import AsyncExitStack

import msgspec
import pytest
import uvloop

from serving.router import RouterConfig
from serving.router.decision import AllBusyError, NoWorkersError
from serving.router.events import BlocksRemoved, BlocksStored
from serving.routing.following import WorkerTraits
from serving.routing.live import LiveRouting
from serving.routing.placement import WantedRank
from serving.runtime.address import EndpointAddress
from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.server import GeneratorService
from serving.worker.kv_events import KvEventPublisher, serve_snapshots
from serving.worker.load_reports import LoadReport, LoadReporter
from tests.support.waiting import in_time, until_async

ADDRESS = EndpointAddress("test", "backend", "generate")
SIZE = 16


class FakeWorker:
    """A worker that says what the test wants, over the real network."""

    def __init__(self, runtime):
        self.runtime = runtime
        self.publisher = KvEventPublisher(runtime, ADDRESS)
        self.usage = 0

    def report(self, rank):
        publisher = self.publisher
        return LoadReport(self.runtime.instance_id, rank, publisher.epoch, publisher.number, 0, 0, self.usage, 100, 8)

    async def start(self):
        async def generate(request):
            yield 1

        await serve_snapshots(self.runtime, ADDRESS, [self.publisher])
        self.reports = LoadReporter(self.runtime, ADDRESS, self.report)
        await self.reports.start()
        await self.runtime.serve(ADDRESS, GeneratorService(generate))
        return self


def network(tmp_path, talk):
    async def main():
        config = RuntimeConfig(etcd_endpoints="", nats_server="", discovery_dir=str(tmp_path / "d"))
        async with AsyncExitStack() as stack, in_time():

            async def join():
                return await stack.enter_async_context(await DistributedRuntime.connect(config))

            async def worker():
                made = await FakeWorker(await join()).start()
                stack.push_async_callback(made.publisher.close)
                stack.push_async_callback(made.reports.close)
                return made

            async def router(traits=lambda _: WorkerTraits(1, True), stage="aggregated", **options):
                made = LiveRouting(
                    await join(),
                    ADDRESS,
                    mode="kv",
                    config=RouterConfig(**options),
                    block_size=SIZE,
                    seed=0,
                    traits=traits,
                    stage=stage,
                )
                await made.start()
                return made

            await talk(worker, router)

    uvloop.run(main())


def overlaps(router, hashes):
    placement = router.pick(WantedRank(len(hashes) * SIZE, hashes))
    router.on_finish(placement)
    ranks = router.ranks()
    return {ranks[slot].instance_id: blocks for slot, _, blocks in placement.decision.candidates if blocks}


def test_a_router_that_starts_late_learns_what_is_cached_and_follows_from_there(tmp_path):
    async def talk(worker, router):
        one = await worker()
        one.publisher.publish([BlocksStored([1, 2, 3], None), BlocksStored([9], 1)])
        late = await router()
        await until_async(lambda: late.num_ranks == 1 and overlaps(late, [1, 2, 3]))
        id = one.runtime.instance_id
        assert overlaps(late, [1, 2, 3]) == {id: 3}
        one.publisher.publish([BlocksStored([4], 3), BlocksRemoved([9])])
        await until_async(lambda: overlaps(late, [1, 2, 3, 4]) == {id: 4})
        assert overlaps(late, [1, 9]) == {id: 1}

    network(tmp_path, talk)


def test_lost_events_are_mended_from_a_snapshot(tmp_path):
    async def talk(worker, router):
        one, here = await worker(), await router()
        await until_async(lambda: here.num_ranks == 1)
        one.publisher.publish([BlocksStored([1], None)])
        await until_async(lambda: overlaps(here, [1]))
        one.publisher.ledger.apply(BlocksStored([2, 3], 1))  # told to nobody
        one.publisher.number += 1
        await until_async(lambda: overlaps(here, [1, 2, 3]) == {one.runtime.instance_id: 3})

    network(tmp_path, talk)


def test_a_worker_that_reports_no_events_is_predicted_beside_one_that_does(tmp_path):
    async def talk(worker, router):
        told, silent = await worker(), await worker()
        here = await router(traits=lambda instance: WorkerTraits(1, instance == told.runtime.instance_id))
        await until_async(lambda: here.num_ranks == 2)
        told.publisher.publish([BlocksStored([1, 2], None)])
        await until_async(lambda: overlaps(here, [1, 2]).get(told.runtime.instance_id) == 2)  # asking is routing, too
        for hashes in ([7, 8], [7, 8]):
            here.on_finish(here.pick(WantedRank(2 * SIZE, hashes, silent.runtime.instance_id)))
        assert overlaps(here, [7, 8]) == {silent.runtime.instance_id: 2}

    network(tmp_path, talk)


def test_routers_know_what_the_others_sent_and_forget_it_with_them(tmp_path):
    async def talk(worker, router):
        await worker()
        await worker()
        here, there = await router(), await router()
        await until_async(lambda: here.num_ranks == there.num_ranks == 2 and here._peers.ids and there._peers.ids)

        def load(of, placement):
            books = of.core.load(of._following.slots[placement.rank])
            return books.num_requests, books.prefill_tokens, books.decode_blocks

        placements = []
        while not placements or load(there, placements[0])[0] == 0:  # a subscriber needs a moment to connect
            placements.append(here.pick(WantedRank(3 * SIZE, [1, 2, 3])))
            await asyncio.sleep(0.05)
        for placement in placements:
            here.on_finish(placement)
        await until_async(lambda: load(there, placements[-1]) == (0, 0, 0))
        placement = here.pick(WantedRank(3 * SIZE, [1, 2, 3]))
        await until_async(lambda: load(there, placement) == load(here, placement) == (1, 3 * SIZE, 3))
        here.on_first_token(placement)
        await until_async(lambda: load(there, placement) == load(here, placement) == (1, 0, 3))
        here._peers._tell = lambda message: None  # the end gets lost
        here.on_finish(placement)
        del here._peers._tell
        await until_async(lambda: load(there, placement) == (0, 0, 0))
        last = here.pick(WantedRank(3 * SIZE, [1, 2, 3]))
        await until_async(lambda: load(there, last)[0] == 1)
        await here._following._runtime.close()
        await until_async(lambda: load(there, last) == (0, 0, 0))

    network(tmp_path, talk)


def test_busy_workers_are_left_out_and_all_busy_is_an_error(tmp_path):
    async def talk(worker, router):
        one, two = await worker(), await worker()
        here = await router(busy_threshold=0.5)
        await until_async(lambda: here.num_ranks == 2)
        one.usage = 90
        await until_async(lambda: len(here.loads) == 2 and here.core._busy)
        for _ in range(5):
            assert here.pick(WantedRank(SIZE, [1])).rank.instance_id == two.runtime.instance_id
        two.usage = 90
        await until_async(lambda: len(here.core._busy) == 2)
        with pytest.raises(AllBusyError):
            here.pick(WantedRank(SIZE, [1]))
        one.usage = 10
        await until_async(lambda: len(here.core._busy) == 1)
        assert here.pick(WantedRank(SIZE, [1])).rank.instance_id == one.runtime.instance_id

    network(tmp_path, talk)


def test_load_is_served_beside_generate(tmp_path):
    async def talk(worker, router):
        one, here = await worker(), await router()
        one.usage = 25
        await until_async(lambda: here.num_ranks == 1)
        metrics = ADDRESS.beside("load_metrics")
        client = await here._following._runtime.client(metrics)
        await client.wait_for_instances()
        (told,) = [item async for item in client.generate(None)]
        assert told["kv_stats"] == {"kv_active_blocks": 25, "kv_total_blocks": 100, "gpu_cache_usage_perc": 0.25}
        assert told["worker_stats"]["request_total_slots"] == 8

    network(tmp_path, talk)


def test_garbage_on_the_event_plane_is_ignored(tmp_path):
    async def talk(worker, router):
        one, here = await worker(), await router()
        await until_async(lambda: here.num_ranks == 1)
        for topic in ("kv_events", "load_metrics", "router_sync"):
            for data in (b"", b"\xc1", msgspec.msgpack.encode([1, 2]), msgspec.msgpack.encode({"a": 1})):
                await one.runtime.events.publish(ADDRESS.subject(topic), data)
        bad = [one.runtime.instance_id, 0, 1 << 60, 0, [["x", 5]]]
        await one.runtime.events.publish(ADDRESS.subject("kv_events"), msgspec.msgpack.encode(bad))
        one.publisher.publish([BlocksStored([1], None)])
        await until_async(lambda: overlaps(here, [1]) == {one.runtime.instance_id: 1})
        with pytest.raises(NoWorkersError, match="has no instance 1"):
            here.pick(WantedRank(SIZE, [1], 1))

    network(tmp_path, talk)


def test_garbage_in_discovery_is_ignored(tmp_path):
    async def talk(worker, router):
        one, here = await worker(), await router()
        await one.runtime.register("v1/instances/test/backend/generate/zz", b"not json")
        await one.runtime.register("v1/instances/test/backend/generate/yy", b"{}")
        await until_async(lambda: here.num_ranks == 1)
        await asyncio.sleep(0.5)
        assert here.num_ranks == 1

    network(tmp_path, talk)


@pytest.mark.parametrize(("is_local", "prefill_tokens"), [(True, 40), (False, 0)])
def test_routers_of_decode_workers_tell_each_other_whether_a_prompt_is_still_to_be_computed(
    tmp_path, is_local, prefill_tokens
):
    async def talk(worker, router):
        await worker()
        here, there = await router(stage="decode"), await router(stage="decode")
        await until_async(lambda: here.num_ranks == there.num_ranks == 1)
        await until_async(lambda: here._peers.ids and there._peers.ids)
        placement = here.pick(WantedRank(40, [1, 2], is_local=is_local))

        def books():
            [(_, found)] = there.books()
            return found.num_requests, found.prefill_tokens, found.decode_blocks, found.num_decoding

        await until_async(lambda: books() == (1, prefill_tokens, 3, int(not is_local)))
        here.on_finish(placement)
        await until_async(lambda: books() == (0, 0, 0, 0))

    network(tmp_path, talk)
