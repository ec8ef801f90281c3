"""A worker's side of a store: what is written comes back, or nothing does."""

import asyncio
import gc
import random
import threading
from pathlib import Path

import pytest
import uvloop

from serving.kv_tiers.tier import ChunkFormat
from tests.kv_tiers.world import BIG, FORMAT, NUM_BYTES, chunk, chunks, read, room, write
from tests.support.waiting import until

LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


@LOOPS
@pytest.mark.parametrize("format", [FORMAT, BIG], ids=["small", "big"])
def test_what_is_read_is_what_was_written(world, run, format):
    async def main():
        async with world.tier(10, format) as tier:
            assert await tier.look_up([1, 2, 3]) == 0
            assert await write(tier, [1, 2, 3], format) == 3
            assert await tier.look_up([1, 2, 3, 4]) == 3
            assert await read(tier, [1, 2, 3, 4], format) == 3
            assert tier.counts.num_read == tier.counts.num_written == 3

    run(main())


def test_only_what_lies_at_the_beginning_is_found_and_read(world):
    async def main():
        async with world.tier(10) as tier:
            await write(tier, [1, 3])
            assert await tier.look_up([1, 2, 3]) == await read(tier, [1, 2, 3]) == 1
            assert await tier.look_up([2, 1]) == await read(tier, [2, 1]) == 0
            assert (tier.counts.num_hits, tier.counts.num_misses) == (1, 4)
            assert tier.counts.num_read == 1

    uvloop.run(main())


def test_any_64_bits_are_a_key(world):
    async def main():
        keys = [0, 1, (1 << 63) + 5, (1 << 64) - 1]
        async with world.tier(10) as tier:
            assert await write(tier, keys) == 4
            assert await read(tier, keys) == 4

    uvloop.run(main())


def test_nothing_can_be_asked_too(world):
    async def main():
        async with world.tier(10) as tier:
            assert await tier.look_up([]) == await tier.read([], []) == await tier.write([], []) == 0
            await tier.remove([])

    uvloop.run(main())


def test_the_least_recently_used_gives_way_and_a_prompts_beginning_last(world):
    async def main():
        async with world.tier(4) as tier:
            await write(tier, [1, 2])
            await write(tier, [3, 4])
            assert await read(tier, [1, 2]) == 2
            assert await write(tier, [5]) == 1
            assert await tier.look_up([3]) == 1
            assert await tier.look_up([4]) == 0
            assert await write(tier, [6, 7]) == 2
            assert [await tier.look_up([key]) for key in range(1, 8)] == [1, 0, 0, 0, 1, 1, 1]
            assert tier.counts.num_evicted == 3

    uvloop.run(main())


def test_what_is_written_again_is_used_and_not_sent(world):
    async def main():
        async with world.tier(3) as tier:
            await write(tier, [1, 2, 3])
            assert await write(tier, [1, 2]) == 2
            assert tier.counts.num_written == 3
            assert await write(tier, [4]) == 1
            assert await read(tier, [1, 2, 3]) == 2

    uvloop.run(main())


def test_of_more_chunks_than_there_is_room_for_the_first_are_kept(world):
    async def main():
        async with world.tier(3) as tier:
            await write(tier, [9, 1])
            assert await write(tier, [1, 2, 3, 4, 5]) == 3
            assert await read(tier, [1, 2, 3, 4, 5]) == 3
            assert tier.counts.num_refused == 2
            assert await write(tier, [5, 4, 3, 2, 1]) == 3
            assert await read(tier, [5, 4, 3]) == 3

    uvloop.run(main())


def test_a_tier_without_room_for_a_chunk_keeps_none(world):
    async def main():
        async with world.tier(0) as tier:
            assert await write(tier, [1, 2]) == 0
            assert await tier.look_up([1]) == await read(tier, [1]) == 0
            assert tier.counts.num_refused == 2

    uvloop.run(main())


def test_what_is_removed_is_gone_and_its_room_is_free(world):
    async def main():
        async with world.tier(3) as tier:
            await write(tier, [1, 2, 3])
            await tier.remove([2, 77])
            assert await tier.look_up([1, 2]) == await read(tier, [1, 2]) == 1
            assert await write(tier, [4]) == 1
            assert await read(tier, [1, 4, 3]) == 3
            assert tier.counts.num_evicted == 0

    uvloop.run(main())


@pytest.mark.parametrize("place", [0, 8, 16, 32, 5000, FORMAT.chunk_bytes - 1])
def test_a_chunk_of_which_a_byte_is_wrong_is_not_read_and_is_dropped(world, place):
    async def main():
        async with world.tier(10) as tier:
            wrong = chunk(2)
            wrong[place] ^= 1
            await tier.write([1, 2, 3], [chunk(1), wrong, chunk(3)])
            assert await read(tier, [1, 2, 3]) == 1
            assert await tier.look_up([2]) == 0
            assert await tier.look_up([3]) == 1
            assert tier.counts.num_faults == 1
            assert await write(tier, [2]) == 1
            assert await read(tier, [1, 2, 3]) == 3

    uvloop.run(main())


def test_all_chunks_of_a_read_that_are_wrong_are_dropped_at_once_and_the_others_stay(world):
    async def main():
        async with world.tier(10) as tier:
            kept = chunks([1, 2, 3, 4, 5])
            kept[1][100] ^= 1
            kept[3][100] ^= 1
            await tier.write([1, 2, 3, 4, 5], kept)
            into = room(5)
            assert await tier.read([1, 2, 3, 4, 5], into) == 1
            assert [await tier.look_up([key]) for key in (1, 2, 3, 4, 5)] == [1, 0, 1, 0, 1]
            assert tier.counts.num_faults == 2
            assert await write(tier, [1, 2, 3, 4, 5]) == await read(tier, [1, 2, 3, 4, 5]) == 5

    uvloop.run(main())


def test_another_chunk_under_a_key_is_not_read(world):
    async def main():
        async with world.tier(10) as tier:
            await tier.write([1], [chunk(2)])
            assert await read(tier, [1]) == 0
            assert await tier.look_up([1]) == 0

    uvloop.run(main())


def test_a_chunk_that_was_never_filled_is_not_read(world):
    async def main():
        async with world.tier(10) as tier:
            await tier.write([0], room(1))  # zeros, whose key is 0
            assert await read(tier, [0]) == 0

    uvloop.run(main())


def test_random_use_gives_right_chunks_and_never_more_than_there_is_room_for(world):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)

    async def use(tier):
        for _ in range(15):
            start = rng.randrange(60)
            keys = list(range(start, start + rng.randrange(1, 20)))
            match rng.randrange(4):
                case 0:
                    assert await tier.look_up(keys) <= 16
                case 1:
                    await tier.remove(keys[:3])
                case 2:
                    assert await write(tier, keys) <= 16
                case _:
                    assert await read(tier, keys) <= 16

    async def main():
        async with world.tier(16) as tier:
            await asyncio.gather(*(use(tier) for _ in range(8)))
            assert tier.counts.num_chunks <= 16
            assert tier.counts.num_faults == 0
            assert await write(tier, [100, 101]) == 2
            assert await read(tier, [100, 101]) == 2

    uvloop.run(main())


def test_a_read_that_was_given_up_writes_nothing_any_more(world):
    async def main():
        async with world.tier(8, BIG) as tier:
            await write(tier, range(8), BIG)
            for num_turns in (0, 1, 3, 10):
                into = room(8, BIG)
                reading = asyncio.ensure_future(tier.read(range(8), into))
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
                for memory in into:
                    memory[:] = bytes(len(memory))
                assert await read(tier, [0, 1], BIG) == 2
                assert not any(any(memory[:100]) for memory in into)

    uvloop.run(main())


def test_a_closed_tier_finds_nothing_and_keeps_nothing(world):
    async def main():
        async with world.tier(8) as tier:
            await write(tier, [1])
        assert await read(tier, [1]) == 0

    uvloop.run(main())


def test_two_formats_never_meet(world):
    """The same key and size, and another model."""
    other = ChunkFormat.of(NUM_BYTES, "another model")
    assert (other.identity != FORMAT.identity, other.chunk_bytes) == (True, FORMAT.chunk_bytes)

    async def main():
        async with world.tier(8) as tier:
            await write(tier, [1])
            stranger = world.client(tier._port, other)
            await stranger.start()
            assert await stranger.look_up([1]) == await read(stranger, [1]) == 0
            await stranger.close()

    uvloop.run(main())


def names(folder):
    return {path.name for path in Path(folder).iterdir()}


def test_tiers_leave_no_thread_handle_or_task_behind(world):
    async def live():
        async with world.tier(30) as tier:
            await asyncio.gather(*(write(tier, [key, 100]) for key in range(20)))
            await asyncio.gather(*(read(tier, [key]) for key in range(20)))
            await tier.remove(range(20))
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(live())
    gc.collect()
    handles, threads = len(names("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        asyncio.run(live())
    until(lambda: threading.active_count() <= threads)
    assert len(names("/proc/self/fd")) == handles


def test_chunks_with_a_key_twice_are_one(world):
    async def main():
        async with world.tier(2) as tier:
            assert await tier.write([1, 1, 2], chunks([1, 1, 2])) == 3
            assert await read(tier, [1, 2, 1]) == 3

    uvloop.run(main())
