"""A mocker's KV beyond its GPU: whatever becomes of it, the answer is the same."""

import asyncio
import contextlib
import math

import msgspec
import numpy as np
import pytest
import uvloop

from mocker import EngineConfig
from mocker.timing.config import TimingConfig
from serving.engines.mock.answers.made_up import answer_tokens
from serving.engines.mock.engine import Mocker
from serving.kv_tiers.store import StoreServer
from serving.kv_tiers.wire import ENTRY_BYTES
from serving.model.files import ModelFiles
from serving.model.tokenizer import ByteTokenizer
from serving.router.events import BlocksRemoved, BlocksStored
from serving.router.hashing import block_hashes, sequence_hashes
from serving.runtime.server import AnswerStream
from serving.transfer.config import TransferRunConfig
from serving.worker.config import WorkerConfig
from serving.worker.kv_events import BlockLedger
from tests.serving.test_mock_engine import Reader, request
from tests.support.waiting import in_time, until_async

TOKEN = b"a token that the whole cluster knows"
CHUNK = 4 * 131_072
"""Bytes of a block of 4 tokens, without a model."""

CHUNK_GIB = CHUNK / (1 << 30)

PROMPT = list(range(1000, 1041))


class World:
    """Mockers, and a store."""

    @contextlib.asynccontextmanager
    async def mocker(self, *, host=16, disk=64, store="", publishers=(), **settings):
        config = EngineConfig(
            **{
                "block_size": 4,
                "num_gpu_blocks": 30,
                "kv_offloading_size": host * CHUNK_GIB,
                "kv_disk_size": disk * CHUNK_GIB,
                "host_bandwidth_gb_s": 1e6,
                "host_latency_us": 0.0,
            }
            | settings
        )
        transfer = TransferRunConfig(kv_store=store)
        timing = TimingConfig(timing="constant", speedup_ratio=20.0)
        mocker = Mocker(WorkerConfig(model_name="m"), config, timing, transfer=transfer)
        mocker.transfer_with(lambda: TOKEN)
        try:
            await mocker.start(ModelFiles({}))
            mocker.publish_to(publishers)
            yield mocker
        finally:
            await mocker.close()

    @contextlib.asynccontextmanager
    async def store(self, num_bytes=100 << 20):
        server = StoreServer(num_bytes, lambda: TOKEN)
        port = await server.open("127.0.0.1", 0)
        try:
            yield server, f"127.0.0.1:{port}"
        finally:
            await server.close()


@pytest.fixture
def world():
    return World()


async def ask(mocker, prompt, rank=0):
    """Return how many of a prompt's tokens were cached, after its answer, which is right."""
    return (await answer(mocker, prompt, rank))["cached_tokens"]


async def answer(mocker, prompt, rank=0):
    """Return what is said at the end of an answer, which is right."""
    reader = Reader()
    call = request(prompt, 5, dp_rank=rank)
    mocker.service(msgspec.Raw(msgspec.msgpack.encode(call)), AnswerStream(reader, 1))
    await until_async(lambda: 1 in reader.ends)
    assert not reader.ends[1].error, reader.ends[1]
    assert reader.tokens(1) == answer_tokens(np.array(prompt, np.uint32), 0, 0, 5, ByteTokenizer().speakable())
    return reader.items[1][-1]


async def fill(mocker, count=3):
    """Ask other prompts, each of ten blocks, which drive out what was cached before."""
    for number in range(count):
        start = 10_000 + 100 * number
        await ask(mocker, list(range(start, start + 41)))
        await settle(mocker)  # what is being written beyond host memory stays there


def is_busy(tiers):
    """Return whether a rank, its tiers or the link to its host memory do anything."""
    engine = tiers._engine
    return bool(tiers._tasks) or engine.wake_s < math.inf or not engine.is_idle


async def settle(mocker):
    """Wait until nothing is under way beyond the GPU."""
    await until_async(lambda: not any(map(is_busy, mocker._tiers)))


def tier(mocker, name):
    """Return what a rank says of one of its tiers."""
    return next(tier for tier in mocker.load(0).kv_tiers if tier.name == name)


class Router:
    """What a router knows from a rank's reports, by medium, and what its ledger would tell another."""

    def __init__(self):
        self.blocks = {medium: set() for medium in ("GPU", "CPU", "STORAGE", "SHARED")}
        self.ledger = BlockLedger()
        self.events = []

    def publish(self, events):
        for event in events:
            self.events.append(event)
            self.ledger.apply(event)
            match event:
                case BlocksStored(hashes, _, medium):
                    self.blocks[medium].update(hashes)
                case BlocksRemoved(hashes, medium):
                    self.blocks[medium].difference_update(hashes)

    def told(self, medium):
        """Return what a router that comes late hears."""
        return {block for event in self.ledger.dump() if event.medium == medium for block in event.hashes}


def hashes(prompt=PROMPT):
    """Return the keys of a prompt's full blocks."""
    return sequence_hashes(block_hashes(np.array(prompt, np.uint32), 4))[: len(prompt) // 4]


def run(main):
    async def whole():
        async with in_time():
            await main()

    uvloop.run(whole())


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_what_left_host_memory_comes_back_from_disk(world, policy):
    async def main():
        async with world.mocker(kv_disk_write_policy=policy) as mocker:
            await ask(mocker, PROMPT)
            await fill(mocker, 4)
            await settle(mocker)
            assert await ask(mocker, PROMPT) == 40
            assert tier(mocker, "disk").read_bytes >= 8 * CHUNK

    run(main)


def test_two_workers_share_a_store(world):
    async def main():
        async with (
            world.store() as (_, address),
            world.mocker(store=address, disk=0) as one,
            world.mocker(store=address, disk=0) as other,
        ):
            assert await ask(one, PROMPT) == 0
            await settle(one)
            assert await ask(other, PROMPT) == 40
            assert tier(other, "store").read_bytes == 10 * CHUNK

    run(main)


def test_a_store_that_dies_is_a_miss(world):
    async def main():
        async with contextlib.AsyncExitStack() as stack:
            async with world.store() as (_, address):
                mocker = await stack.enter_async_context(world.mocker(store=address, disk=0))
                await ask(mocker, PROMPT)
                await settle(mocker)
            await fill(mocker, 4)
            assert await ask(mocker, PROMPT) == 0
            other = await stack.enter_async_context(world.mocker(store=address, disk=0))
            assert await ask(other, PROMPT) == 0

    run(main)


@pytest.mark.parametrize(("blocks_per_chunk", "disk"), [(1, 12), (2, 12), (5, 20)])
def test_routers_know_what_is_on_disk(world, blocks_per_chunk, disk):
    async def main():
        router = Router()
        async with world.mocker(disk=disk, publishers=[router], blocks_per_chunk=blocks_per_chunk) as mocker:
            await ask(mocker, PROMPT)
            await settle(mocker)
            assert router.blocks["STORAGE"] == set(hashes()[:disk])
            await fill(mocker)
            last = hashes(list(range(10_200, 10_241)))
            assert router.blocks["STORAGE"] >= set(last[:disk])
            assert router.blocks["STORAGE"] == router.told("STORAGE")
            assert len(router.blocks["STORAGE"]) == disk == tier(mocker, "disk").used_bytes / CHUNK

    run(main)


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_who_writes_to_the_store_reports_what_it_stored_and_what_gave_way(world, blocks_per_chunk):
    async def main():
        router, settings = Router(), {"disk": 0, "blocks_per_chunk": blocks_per_chunk}
        async with world.mocker(store="127.0.0.1:1", **settings) as mocker:
            chunk_bytes = mocker._format.chunk_bytes + ENTRY_BYTES
        async with (
            world.store(20 // blocks_per_chunk * chunk_bytes) as (server, address),
            world.mocker(store=address, publishers=[router], **settings) as mocker,
        ):
            await ask(mocker, PROMPT)
            await settle(mocker)
            assert router.blocks["SHARED"] == set(hashes())
            await fill(mocker)
            kept = {key for _, key in server.shelf.entries}
            assert kept == {key for key in router.blocks["SHARED"] if key in kept}
            assert len(router.blocks["SHARED"]) == len(kept) * blocks_per_chunk == 20
            assert router.blocks["SHARED"] == router.told("SHARED")

    run(main)


def test_what_the_store_lacks_is_reported_by_who_asks_for_it_and_what_it_has_too(world):
    async def main():
        router = Router()
        async with (
            world.store() as (server, address),
            world.mocker(store=address, disk=0) as one,
            world.mocker(store=address, disk=0, publishers=[router]) as other,
        ):
            await ask(one, PROMPT)
            await settle(one)
            router.publish([BlocksStored(hashes(), None, "SHARED")])  # as the first one does
            server.shelf.drop((one._format.identity, hashes()[3]))
            assert await ask(other, PROMPT) == 12
            assert BlocksRemoved([hashes()[3]], "SHARED") in router.events
            await settle(other)  # it has computed the rest, and writes what was missing
            assert router.blocks["SHARED"] == router.told("SHARED") == set(hashes())

    run(main)


def test_who_loses_the_store_reports_that_nothing_is_there_that_it_knew(world):
    async def main():
        router = Router()
        async with contextlib.AsyncExitStack() as stack:
            async with world.store() as (_, address):
                mocker = await stack.enter_async_context(world.mocker(store=address, disk=0, publishers=[router]))
                await ask(mocker, PROMPT)
                await settle(mocker)
                assert router.blocks["SHARED"] == set(hashes())
            await fill(mocker, 1)
            assert router.blocks["SHARED"] == set()

    run(main)


@pytest.mark.parametrize("policy", ["when_scheduled", "wait_complete", "timeout", "best_effort"])
def test_whatever_a_prompt_waits_for_it_is_answered(world, policy):
    async def main():
        settings = {"kv_prefetch_policy": policy, "kv_prefetch_timeout_s": 0.0}
        async with world.mocker(kv_prefetch_timeout_s_per_1k_tokens=0.0, **settings | {"num_gpu_blocks": 60}) as mocker:
            await ask(mocker, PROMPT)
            await fill(mocker, 6)
            prompts = [PROMPT, *(list(range(start, start + 41)) for start in range(10_000, 10_600, 100))]
            assert all(
                cached <= 40 for cached in await asyncio.gather(*(ask(mocker, prompt) for prompt in prompts * 3))
            )
            await settle(mocker)

    run(main)


def test_what_is_in_host_memory_is_what_the_engine_says(world):
    async def main():
        router = Router()
        async with world.mocker(disk=0, host=16, publishers=[router]) as mocker:
            await ask(mocker, PROMPT)
            await settle(mocker)
            assert router.blocks["CPU"] == set(hashes())
            await fill(mocker, 4)
            assert tier(mocker, "host").used_bytes == 16 * CHUNK == len(router.blocks["CPU"]) * CHUNK

    run(main)


def test_a_disk_smaller_than_a_prompt_refuses_it_as_in_virtual_time(world):
    async def main():
        async with world.mocker(disk=6) as mocker:
            await ask(mocker, PROMPT)
            await settle(mocker)
            disk = tier(mocker, "disk")
            assert (disk.used_bytes, disk.num_refused) == (0, 1)

    run(main)


def test_what_the_disk_lacks_the_store_has(world):
    async def main():
        async with world.store() as (_, address):
            async with world.mocker(store=address, disk=0) as mocker:
                await ask(mocker, PROMPT)
                await settle(mocker)
            async with world.mocker(store=address, disk=4, host=10) as mocker:
                end = await answer(mocker, PROMPT)
                assert end["tier_tokens"] == {"host": 0, "disk": 0, "store": 40}
                await fill(mocker, 1)
                assert (await answer(mocker, PROMPT))["cached_tokens"] == 40

    run(main)


def test_an_answer_says_from_which_tiers_its_prompt_came(world):
    async def main():
        async with world.mocker() as mocker:
            assert (await answer(mocker, PROMPT))["tier_tokens"] == {"host": 0, "disk": 0, "store": 0}
            await settle(mocker)
            await fill(mocker, 4)
            end = await answer(mocker, PROMPT)
            assert end["tier_tokens"] == {"host": 0, "disk": 40, "store": 0}

    run(main)


def test_a_rank_says_what_its_tiers_hold_and_did_in_bytes_of_the_whole_kv(world):
    async def main():
        async with world.store() as (_, address), world.mocker(store=address) as mocker:
            assert await ask(mocker, PROMPT) == 0
            await settle(mocker)
            await fill(mocker, 4)
            await settle(mocker)
            assert await ask(mocker, PROMPT) == 40
            await settle(mocker)
            host, disk, store = mocker.load(0).kv_tiers
            assert (host.name, host.used_bytes, host.capacity_bytes) == ("host", 16 * CHUNK, 16 * CHUNK)
            assert host.write_bytes == 50 * CHUNK
            assert (disk.name, disk.used_bytes, disk.capacity_bytes) == ("disk", 50 * CHUNK, 64 * CHUNK)
            assert (disk.num_asked, disk.num_hits) == (60, 10)  # six prompts, of which only the last is there
            assert (disk.num_reads, disk.read_bytes, disk.write_bytes) == (1, 10 * CHUNK, 50 * CHUNK)
            assert (store.name, store.num_asked, store.num_hits) == ("store", 50, 0)
            assert (store.used_bytes, store.write_bytes) == (50 * CHUNK, 50 * CHUNK)
            assert store.num_writes >= 5
            assert min(disk.read_s, disk.write_s, store.write_s, host.write_s) > 0

    run(main)


def test_a_request_that_is_given_up_leaves_nothing_under_way(world):
    async def main():
        async with world.mocker() as mocker:
            await ask(mocker, PROMPT)
            await fill(mocker, 4)
            await settle(mocker)
            for _ in range(5):
                stream = AnswerStream(Reader(), 1)
                mocker.service(msgspec.Raw(msgspec.msgpack.encode(request(PROMPT, 5))), stream)
                await asyncio.sleep(0)
                stream.cancel()
            assert await ask(mocker, PROMPT) == 40
            await settle(mocker)
            assert not mocker._tiers[0]._fetches

    run(main)


def test_a_store_without_host_memory_and_an_address_that_is_none_are_refused():
    with pytest.raises(ValueError, match="kv_store is h:1, and kv_offloading_size is 0; expected host memory"):
        Mocker(WorkerConfig(), EngineConfig(), transfer=TransferRunConfig(kv_store="h:1"))
    with pytest.raises(ValueError, match="expected the KV store's address as HOST:PORT, not 'h'"):
        Mocker(WorkerConfig(), EngineConfig(kv_offloading_size=1), transfer=TransferRunConfig(kv_store="h"))


def test_only_a_worker_that_shares_kv_needs_the_token():
    def needs(role="aggregated", **transfer):
        config = EngineConfig(kv_offloading_size=1)
        return Mocker(WorkerConfig(role=role), config, transfer=TransferRunConfig(**transfer)).needs_token

    assert [needs(), needs("prefill"), needs(kv_store="h:1")] == [False, True, True]
