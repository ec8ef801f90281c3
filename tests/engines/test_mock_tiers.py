"""A mocker's KV beyond its GPU, as bytes: whatever becomes of them, the answer is the same."""

import asyncio
import contextlib
import shutil
import tempfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
import uvloop

from mocker import EngineConfig
from mocker.timing.config import TimingConfig
from serving.engines.mock.answers.made_up import LETTERS, answer_tokens
from serving.engines.mock.engine import Mocker
from serving.engines.mock.kv import tiers as mock_tiers
from serving.kv_tiers.files import MAX_THREADS
from serving.kv_tiers.store import StoreServer
from serving.kv_tiers.wire import ENTRY_BYTES
from serving.model.files import ModelFiles
from serving.router.events import BlocksRemoved, BlocksStored
from serving.router.hashing import block_hashes, sequence_hashes
from serving.runtime.server import Stream
from serving.transfer.config import TransferRunConfig
from serving.worker.config import WorkerConfig
from serving.worker.engine import EngineError
from serving.worker.kv_events import BlockLedger
from tests.serving.test_mock_engine import Reader, request
from tests.support.waiting import in_time, until_async

TOKEN = b"a token that the whole cluster knows"
CHUNK_GIB = 4 * 131_072 / (1 << 30)
"""Of a block of 4 tokens, without a model."""

PROMPT = list(range(1000, 1041))


class World:
    """A folder, mockers with it, and a store."""

    def __init__(self, folder):
        self.folder = folder / "kv"

    @contextlib.asynccontextmanager
    async def mocker(self, *, host=16, disk=64, store="", folder=None, publishers=(), **settings):
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
        transfer = TransferRunConfig(kv_disk_folder=str(folder or self.folder), kv_store=store)
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

    def files(self):
        return sorted(self.folder.rglob("*.kv"))


@pytest.fixture
def world():
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        yield World(Path(folder))


async def ask(mocker, prompt, rank=0):
    """Return how many of a prompt's tokens were cached, after its answer, which is right."""
    return (await answer(mocker, prompt, rank))["cached_tokens"]


async def answer(mocker, prompt, rank=0):
    """Return what is said at the end of an answer, which is right."""
    reader = Reader()
    call = request(prompt, 5, dp_rank=rank)
    mocker.service(msgspec.Raw(msgspec.msgpack.encode(call)), Stream(reader, 1))
    await until_async(lambda: 1 in reader.ends)
    assert not reader.ends[1].error, reader.ends[1]
    assert reader.tokens(1) == answer_tokens(np.array(prompt, np.uint32), 0, 0, 5, LETTERS)
    return reader.items[1][-1]


async def fill(mocker, count=3):
    """Ask other prompts, each of ten blocks, which drive out what was cached before."""
    for number in range(count):
        start = 10_000 + 100 * number
        await ask(mocker, list(range(start, start + 41)))
        await settle(mocker)  # what is being written beyond host memory stays there


async def settle(mocker):
    """Wait until nothing is under way beyond the GPU."""
    await until_async(lambda: not any(tiers._tasks or tiers._engine.view().is_copying for tiers in mocker._tiers))


def counts(mocker, name):
    return mocker._tiers[0].counts[name]


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


def test_what_left_the_gpu_lies_in_host_memory_and_is_right_there(world):
    async def main():
        async with world.mocker(disk=0, host=100) as mocker:
            assert await ask(mocker, PROMPT) == 0
            await fill(mocker)
            await settle(mocker)
            assert counts(mocker, "host").num_chunks == 40
            assert await ask(mocker, PROMPT) == 40
            await settle(mocker)
            assert counts(mocker, "host").num_faults == 0

    run(main)


def test_host_memory_holds_what_the_engine_says_and_no_more(world):
    async def main():
        async with world.mocker(disk=0, host=16) as mocker:
            for _ in range(3):
                await ask(mocker, PROMPT)
                await fill(mocker, 4)
            await settle(mocker)
            tiers = mocker._tiers[0]
            assert counts(mocker, "host").num_chunks == mocker.ranks[0].engine.host_use().chunks.num_used == 16
            assert counts(mocker, "host").num_evicted == 0  # it never had to choose by itself
            for key in list(tiers._host.arena._kept):
                assert tiers._format.find_fault(tiers._host.arena.slot(key), key) == ""

    run(main)


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_what_left_host_memory_comes_back_from_disk(world, policy):
    async def main():
        async with world.mocker(kv_disk_write_policy=policy) as mocker:
            await ask(mocker, PROMPT)
            await fill(mocker, 4)
            await settle(mocker)
            assert await ask(mocker, PROMPT) == 40
            assert counts(mocker, "disk").num_read >= 8
            assert counts(mocker, "disk").num_faults == 0

    run(main)


def test_a_restarted_worker_finds_its_disk_warm(world):
    async def main():
        async with world.mocker() as mocker:
            assert await ask(mocker, PROMPT) == 0
            await settle(mocker)
        assert len(world.files()) == 10
        async with world.mocker() as mocker:
            assert await ask(mocker, PROMPT) == 40
            assert counts(mocker, "disk").num_read == 10

    run(main)


def test_a_disk_smaller_than_a_prompt_keeps_its_beginning(world):
    async def main():
        for cached in (0, 24):
            async with world.mocker(disk=6) as mocker:
                assert await ask(mocker, PROMPT) == cached
                await settle(mocker)

    run(main)


def test_the_beginning_of_a_prompt_that_was_read_in_lots_stays_longest(world, monkeypatch):
    monkeypatch.setattr(mock_tiers, "LOT_CHUNKS", 3)

    async def main():
        async with world.mocker(disk=12) as mocker:
            await ask(mocker, PROMPT)
            await settle(mocker)
        async with world.mocker(disk=12) as mocker:
            assert await ask(mocker, PROMPT) == 40
            await ask(mocker, list(range(1, 18)))  # four chunks, for which two give way
            await settle(mocker)
        async with world.mocker(disk=12) as mocker:
            assert await ask(mocker, PROMPT) == 32

    run(main)


def test_without_a_folder_the_disk_is_a_temporary_one(world):
    async def main():
        transfer = TransferRunConfig()
        config = EngineConfig(kv_offloading_size=1, kv_disk_size=1, num_gpu_blocks=100)
        mocker = Mocker(WorkerConfig(), config, transfer=transfer)
        await mocker.start(ModelFiles({}))
        folder = mocker._tiers[0]._tiers["disk"]._folder.path
        assert folder.exists()
        await mocker.close()
        assert not folder.exists()

    run(main)


def test_a_temporary_folder_that_cannot_be_made_is_refused_with_the_flag_that_names_another(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))

    async def main():
        mocker = Mocker(WorkerConfig(), EngineConfig(kv_offloading_size=1, kv_disk_size=1, num_gpu_blocks=100))
        try:
            await mocker.start(ModelFiles({}))
        finally:
            await mocker.close()

    expected = (
        r"a temporary folder for KV cannot be made: .*Not a directory: '.*file.*'; name one with --kv-disk-folder"
    )
    with pytest.raises(EngineError, match=expected):
        run(main)


def spoil(path):
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def spoil_host(mocker, places):
    """Change a byte of chunks of the prompt, given by their places, where they lie in host memory."""
    tiers = mocker._tiers[0]
    keys = [hashes()[place] for place in places]
    for key in keys:
        tiers._host.arena.slot(key)[-100] ^= 1
    return keys


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize(("places", "cached"), [([0], 0), ([4], 16), ([9], 36), ([2, 3], 8)])
def test_of_a_chunk_that_is_wrong_in_host_memory_and_what_follows_it_the_rest_is_computed(
    world, places, cached, policy
):
    async def main():
        async with world.mocker(disk=0, host=100, kv_load_failure_policy=policy) as mocker:
            await ask(mocker, PROMPT)
            await fill(mocker)
            await settle(mocker)
            [wrong, *_] = spoil_host(mocker, places)
            assert await ask(mocker, PROMPT) == cached
            await settle(mocker)
            assert counts(mocker, "host").num_faults == 1
            tiers = mocker._tiers[0]
            assert (
                tiers._format.find_fault(tiers._host.arena.slot(wrong), wrong) == ""
            )  # it was computed, and stored again

    run(main)


def test_a_chunk_that_is_not_in_the_arena_is_computed(world):
    async def main():
        async with world.mocker(disk=0, host=100) as mocker:
            await ask(mocker, PROMPT)
            await fill(mocker)
            await settle(mocker)
            mocker._tiers[0]._host.arena.discard(spoil_host(mocker, [5]))
            assert await ask(mocker, PROMPT) == 20

    run(main)


@pytest.mark.parametrize(
    "how", [spoil, Path.unlink, lambda path: path.write_bytes(b"")], ids=["corrupt", "gone", "torn"]
)
def test_of_a_chunk_that_is_wrong_on_disk_and_what_follows_it_the_rest_is_computed(world, how):
    async def main():
        async with world.mocker() as mocker:
            await ask(mocker, PROMPT)
            await fill(mocker, 4)
            await settle(mocker)
            keys = [int(path.parent.name + path.stem, 16) for path in world.files()]
            sequence_keys = [key for key in mocker._tiers[0]._tiers["disk"]._there if key in keys]
            assert len(sequence_keys) == len(keys)
            for path in world.files():
                how(path)
            assert await ask(mocker, PROMPT) == 0
            await settle(mocker)
            assert await ask(mocker, PROMPT) == 40

    run(main)


def test_a_disk_whose_folder_was_removed_is_warm_again_once_the_prompt_was_computed_again(world):
    async def main():
        router = Router()
        async with world.mocker(publishers=[router]) as mocker:
            await ask(mocker, PROMPT)
            await fill(mocker, 4)
            await settle(mocker)
            shutil.rmtree(world.folder)
            assert await ask(mocker, PROMPT) == 0
            await settle(mocker)
            assert router.blocks["STORAGE"] == set(hashes())
            await fill(mocker, 4)
            assert await ask(mocker, PROMPT) == 40

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
            assert counts(other, "store").num_read == 10

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


@pytest.mark.parametrize(("blocks_per_chunk", "disk"), [(1, 12), (2, 12), (1, 4), (5, 20)])
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
            assert len(router.blocks["STORAGE"]) == disk == blocks_per_chunk * counts(mocker, "disk").num_chunks

    run(main)


def test_what_is_wrong_on_disk_is_reported_as_removed(world):
    async def main():
        router = Router()
        async with world.mocker(publishers=[router]) as mocker:
            await ask(mocker, PROMPT)
            await fill(mocker, 4)
            await settle(mocker)
            [path] = [path for path in world.files() if path.parent.name + path.stem == f"{hashes()[2]:016x}"]
            spoil(path)
            disk = mocker._tiers[0]._tiers["disk"]
            assert await disk.read([hashes()[2]], [memoryview(bytearray(disk._format.chunk_bytes))]) == 0
            mocker.ranks[0]._follow_tiers()
            assert hashes()[2] not in router.blocks["STORAGE"]
            assert hashes()[1] in router.blocks["STORAGE"]

    run(main)


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_a_warm_disk_is_reported_at_the_start_or_as_soon_as_a_prompt_names_its_chunks(world, blocks_per_chunk):
    async def main():
        async with world.mocker(blocks_per_chunk=blocks_per_chunk) as mocker:
            await ask(mocker, PROMPT)
            await settle(mocker)
        router = Router()
        async with world.mocker(publishers=[router], blocks_per_chunk=blocks_per_chunk) as mocker:
            await asyncio.sleep(0)
            assert router.blocks["STORAGE"] == (set(hashes()) if blocks_per_chunk == 1 else set())
            assert await ask(mocker, PROMPT) == 40
            assert router.blocks["STORAGE"] == set(hashes())

    run(main)


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_who_writes_to_the_store_reports_what_it_stored_and_what_gave_way(world, blocks_per_chunk):
    async def main():
        router, settings = Router(), {"disk": 0, "blocks_per_chunk": blocks_per_chunk}
        async with world.mocker(**settings) as mocker:
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


def test_what_disk_lacks_the_store_has(world):
    async def main():
        async with world.store() as (_, address):
            async with world.mocker(store=address) as mocker:
                await ask(mocker, PROMPT)
                await settle(mocker)
            for path in world.files()[5:]:
                path.unlink()
            async with world.mocker(store=address) as mocker:
                assert await ask(mocker, PROMPT) == 40
                assert counts(mocker, "disk").num_read + counts(mocker, "store").num_read == 10
                assert counts(mocker, "store").num_read >= 5

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


def test_best_effort_does_not_wait_for_a_disk_that_does_not_answer(world):
    async def main():
        async with world.mocker(host=16, kv_prefetch_policy="best_effort") as mocker:
            await ask(mocker, PROMPT)
            await settle(mocker)
            await fill(mocker)
            disk = mocker._tiers[0]._tiers["disk"]
            disk._timeout_s = 3600.0
            for _ in range(MAX_THREADS):
                await disk._threads.acquire()
            assert await ask(mocker, PROMPT) < 40
            for _ in range(MAX_THREADS):
                disk._threads.release()

    run(main)


def test_a_rank_says_what_its_tiers_hold_and_did_in_bytes_of_the_whole_kv(world):
    async def main():
        async with world.store() as (_, address), world.mocker(store=address) as mocker:
            assert await ask(mocker, PROMPT) == 0
            await settle(mocker)
            await fill(mocker, 4)
            await settle(mocker)
            for path in world.files():
                spoil(path)
            assert await ask(mocker, PROMPT) == 0
            chunk = 4 * 131_072
            await settle(mocker)
            host, disk, store = mocker.load(0).kv_tiers
            assert (host.name, host.used_bytes, host.capacity_bytes) == ("host", 16 * chunk, 16 * chunk)
            assert (host.write_bytes, host.num_evicted) == (60 * chunk, 44)
            assert (disk.name, disk.capacity_bytes, disk.num_faults) == ("disk", 64 * chunk, 10)
            assert disk.num_hits == 10
            assert disk.num_asked == 60  # six prompts, of which only the last is there
            assert (disk.num_reads, disk.read_bytes) == (1, 0)
            assert disk.write_bytes == chunk * mocker._tiers[0].counts["disk"].num_written
            assert (store.name, store.num_asked, store.num_hits) == ("store", 50, 0)
            assert (store.used_bytes, store.write_bytes) == (50 * chunk, 50 * chunk)
            assert store.num_writes >= 5
            assert min(disk.read_s, disk.write_s, store.write_s, host.write_s) > 0

    run(main)


@pytest.mark.parametrize(("num_files", "expected"), [(10, [0, 40, 0]), (4, [0, 16, 24])])
def test_an_answer_says_from_which_tiers_its_prompt_came(world, num_files, expected):
    async def main():
        async with world.store() as (_, address):
            async with world.mocker(store=address) as mocker:
                await ask(mocker, PROMPT)
                await settle(mocker)
            for key in hashes()[num_files:]:
                [path] = [path for path in world.files() if path.parent.name + path.stem == f"{key:016x}"]
                path.unlink()
            async with world.mocker(store=address) as mocker:
                end = await answer(mocker, PROMPT)
                assert list(end["tier_tokens"].values()) == expected
            async with world.mocker(disk=0, host=100) as mocker:
                assert (await answer(mocker, PROMPT))["tier_tokens"] == {"host": 0, "disk": 0, "store": 0}
                await fill(mocker)
                assert (await answer(mocker, PROMPT))["tier_tokens"]["host"] > 0

    run(main)


def test_a_request_that_is_given_up_leaves_nothing_under_way(world):
    async def main():
        async with world.mocker() as mocker:
            await ask(mocker, PROMPT)
            await fill(mocker, 4)
            await settle(mocker)
            for _ in range(5):
                stream = Stream(Reader(), 1)
                mocker.service(msgspec.Raw(msgspec.msgpack.encode(request(PROMPT, 5))), stream)
                await asyncio.sleep(0)
                stream.cancel()
            assert await ask(mocker, PROMPT) == 40
            await settle(mocker)
            tiers = mocker._tiers[0]
            assert not (
                tiers._fetches or tiers._host._filling or tiers._host._leaving or tiers._host.arena._being_written
            )

    run(main)


def test_each_rank_and_each_worker_has_a_folder_of_its_own(world):
    async def main():
        async with world.mocker(dp_size=2) as one, world.mocker(dp_size=2) as other:
            for mocker in (one, other):
                for rank in (0, 1):
                    assert await ask(mocker, PROMPT, rank) == 0
            await settle(one)
            await settle(other)
            assert sorted(path.name for path in world.folder.iterdir()) == ["0", "1", "2", "3"]
            assert len(world.files()) == 40

    run(main)


def test_a_store_without_host_memory_and_an_address_that_is_none_are_refused():
    with pytest.raises(ValueError, match="kv_store is h:1, and kv_offloading_size is 0; expected host memory"):
        Mocker(WorkerConfig(), EngineConfig(), transfer=TransferRunConfig(kv_store="h:1"))
    with pytest.raises(ValueError, match="expected the KV store's address as HOST:PORT, not 'h'"):
        Mocker(WorkerConfig(), EngineConfig(kv_offloading_size=1), transfer=TransferRunConfig(kv_store="h"))


def test_a_folder_that_cannot_be_used_is_told_at_the_start(world):
    async def main():
        world.folder.write_text("")
        with pytest.raises(EngineError, match="kv/0: the folder for KV cannot be used: Not a directory"):
            async with world.mocker():
                pass

    run(main)


def test_only_a_worker_that_shares_kv_needs_the_token():
    def needs(role="aggregated", **transfer):
        config = EngineConfig(kv_offloading_size=1)
        return Mocker(WorkerConfig(role=role), config, transfer=TransferRunConfig(**transfer)).needs_token

    assert [needs(), needs("prefill"), needs(kv_store="h:1")] == [False, True, True]
