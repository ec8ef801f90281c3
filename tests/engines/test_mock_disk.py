"""A rank's disk: what it holds, and how far a read has come, on a clock that the test moves."""

import asyncio

import pytest
import uvloop

from dynabench.virtual.clock import Clock
from mocker import BlockChain, Sequence
from mocker.tiers.config import HostMemory, Tier
from mocker.tiers.work import Read, Write
from serving.engines.mock.clock import WallClock
from serving.engines.mock.kv.disk import Disk
from serving.engines.mock.kv.moved import Progress
from tests.support.waiting import in_time

MEMORY = HostMemory(num_chunks=100, chunk_bytes=1000.0)
TIER = Tier(name="disk", num_chunks=12, bandwidth=1000.0, latency_s=0.5)
"""A chunk takes a second, after half a second."""


def prompt(name, count=10):
    return Sequence(1, num_prompt=count, max_tokens=1, chain=BlockChain([f"{name}{block}" for block in range(count)]))


def read_of(sequence, start=0, stop=10):
    return Read("disk", sequence, [(start, stop)])


async def turn():
    """Let tasks run until they wait for the clock."""
    for _ in range(5):
        await asyncio.sleep(0)


def run(main):
    async def whole():
        async with in_time():
            await main()

    asyncio.run(whole())


async def until_idle(clock):
    await turn()
    while clock.peek() < float("inf"):
        clock.step()
        await turn()


def test_a_read_takes_its_latency_and_its_bytes():
    async def main():
        clock, progress = Clock(), Progress()
        disk, sequence = Disk(TIER, MEMORY, clock), prompt("a")
        disk.storage.insert(sequence.chain, [(0, 10)])
        reading = asyncio.create_task(disk.read(read_of(sequence), progress))
        await until_idle(clock)
        await reading
        assert (progress.num_chunks, clock.now) == (10, 10.5)
        assert disk.load().read_bytes == 10_000

    run(main)


def test_two_reads_share_its_bandwidth():
    async def main():
        clock = Clock()
        disk, sequence = Disk(TIER, MEMORY, clock), prompt("a")
        disk.storage.insert(sequence.chain, [(0, 10)])
        halves = [read_of(sequence, 0, 5), read_of(sequence, 5, 10)]
        reading = [asyncio.create_task(disk.read(half, Progress())) for half in halves]
        await until_idle(clock)
        await asyncio.gather(*reading)
        assert clock.now == 10.5

    run(main)


@pytest.mark.parametrize(("cut_s", "num_chunks"), [(0.25, 0), (3.75, 3)])
def test_a_read_that_is_cut_short_has_brought_the_whole_chunks_that_came(cut_s, num_chunks):
    async def main():
        clock, progress = Clock(), Progress()
        disk, sequence = Disk(TIER, MEMORY, clock), prompt("a")
        disk.storage.insert(sequence.chain, [(0, 10)])
        reading = asyncio.create_task(disk.read(read_of(sequence), progress))
        await turn()
        clock.at(cut_s, 0, reading.cancel)
        while clock.now < cut_s:
            clock.step()
        await asyncio.gather(reading, return_exceptions=True)
        assert progress.num_chunks == num_chunks
        assert disk.storage.cache.num_evictable == 10

    run(main)


def test_a_read_that_is_cut_short_as_it_ends_has_brought_everything_and_others_go_on():
    async def main():
        clock, progress = Clock(), Progress()
        disk, sequence = Disk(TIER, MEMORY, clock), prompt("a")
        disk.storage.insert(sequence.chain, [(0, 10)])
        cut = asyncio.create_task(disk.read(read_of(sequence, 0, 2), progress))
        longer = asyncio.create_task(disk.read(read_of(sequence, 2, 10), Progress()))
        await turn()
        cut.cancel()
        clock.step()
        clock.step()
        await asyncio.gather(cut, return_exceptions=True)
        await until_idle(clock)
        await longer
        assert progress.num_chunks == 2

    run(main)


def test_what_is_read_is_not_evicted_and_of_what_was_evicted_the_rest_comes():
    async def main():
        clock, progress = Clock(), Progress()
        disk, one, other = Disk(TIER, MEMORY, clock), prompt("a"), prompt("b")
        disk.storage.insert(one.chain, [(0, 10)])
        first = asyncio.create_task(disk.read(read_of(one, 0, 6), Progress()))
        await turn()
        disk.storage.insert(other.chain, [(0, 6)])
        assert await disk.look_up(one.chain, 0, 10) == 6
        late = asyncio.create_task(disk.read(read_of(one), progress))
        await until_idle(clock)
        await asyncio.gather(first, late)
        assert progress.num_chunks == 6

    run(main)


def test_a_write_is_there_once_it_has_come_and_moves_only_what_was_missing():
    async def main():
        clock, chain = Clock(), prompt("a").chain
        disk = Disk(TIER, MEMORY, clock)
        disk.storage.insert(chain, [(0, 4)])
        writing = asyncio.create_task(disk.write(Write("disk", chain, [(0, 10)], is_pinned=True)))
        await turn()
        assert await disk.look_up(chain, 0, 10) == 4
        await until_idle(clock)
        await writing
        assert (await disk.look_up(chain, 0, 10), clock.now) == (10, 6.5)
        assert (disk.load().num_asked, disk.load().num_hits) == (20, 14)

    run(main)


def test_a_slow_disk_takes_longer_for_each_use():
    async def main():
        clock, progress = Clock(), Progress()
        disk, sequence = Disk(TIER, MEMORY, clock), prompt("a")
        disk.added_s = 2.0
        writing = asyncio.create_task(disk.write(Write("disk", sequence.chain, [(0, 3)], is_pinned=True)))
        await until_idle(clock)
        await writing
        assert clock.now == 5.5
        reading = asyncio.create_task(disk.read(read_of(sequence, stop=3), progress))
        await until_idle(clock)
        await reading
        assert (progress.num_chunks, clock.now) == (3, 11.0)

    run(main)


def test_a_full_disk_refuses_to_write_and_keeps_what_it_has():
    async def main():
        clock = Clock()
        disk, sequence = Disk(TIER, MEMORY, clock), prompt("a")
        disk.storage.insert(sequence.chain, [(0, 3)])
        disk.is_full = True
        await disk.write(Write("disk", sequence.chain, [(0, 5)], is_pinned=True))
        assert await disk.look_up(sequence.chain, 0, 5) == 3
        assert disk.load().num_refused == 1
        disk.is_full = False
        writing = asyncio.create_task(disk.write(Write("disk", sequence.chain, [(0, 5)], is_pinned=True)))
        await until_idle(clock)
        await writing
        assert await disk.look_up(sequence.chain, 0, 5) == 5

    run(main)


def test_the_wall_clock_never_calls_back_early():
    async def main():
        clock, loop = WallClock(), asyncio.get_running_loop()
        start_s = clock.now
        for delay_s in (0.0, 0.0004, 0.01, 0.0105):
            called = loop.create_future()
            clock.at(start_s + delay_s, 0, lambda called=called: called.set_result(clock.now - start_s))
            assert await called >= delay_s

    for run_loop in (asyncio.run, uvloop.run):
        run_loop(main())
