"""What every kind of agent does."""

import asyncio
import gc
import os
import random
import signal
import threading
from pathlib import Path

import pytest
import uvloop

from serving.transfer.agent import MAX_NOTICE_BYTES, Piece, TransferError
from tests.support.waiting import until_async
from tests.transfer.world import KINDS, MIB, PATIENCE_S, fill, pattern

pytestmark = pytest.mark.parametrize("kind", KINDS)
LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


async def read(reader, owner, pieces, timeout_s=PATIENCE_S):
    await reader.read(getattr(owner, "address", owner), pieces, timeout_s=timeout_s)


async def failure(awaitable):
    with pytest.raises(TransferError) as caught:
        await awaitable
    return caught.value.kind


@LOOPS
def test_what_is_read_is_what_the_owner_has(world, kind, run):
    async def main():
        async with world.agent(kind, 24 * MIB) as owner, world.agent(kind, 25 * MIB) as reader:
            fill(owner.memory)
            await read(reader, owner, [Piece(0, MIB, 24 * MIB)])
            assert reader.memory[MIB:] == owner.memory
            assert bytes(reader.memory[:MIB]) == bytes(MIB)

    run(main())


@LOOPS
def test_pieces_of_all_sizes_go_where_they_belong_and_nowhere_else(world, kind, run):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)

    async def main():
        async with world.agent(kind, 4 * MIB) as owner, world.agent(kind, 8 * MIB) as reader:
            fill(owner.memory)
            expected, target, pieces = bytearray(8 * MIB), 0, []
            while len(pieces) < 1500:
                num_bytes = rng.choice([0, 1, 7, 100, 4096, 10_000])
                source = rng.randrange(4 * MIB - num_bytes)  # they may overlap there
                pieces.append(Piece(source, target, num_bytes))
                expected[target : target + num_bytes] = pattern(num_bytes, source)
                target += num_bytes + rng.choice([0, 0, 1, 64])
            await read(reader, owner, rng.sample(pieces, len(pieces)))
            assert reader.memory == expected

    run(main())


def test_pieces_that_continue_each_other_are_read_together(world, kind, run):
    async def main():
        async with world.agent(kind, MIB) as owner, world.agent(kind, MIB) as reader:
            fill(owner.memory)
            await read(reader, owner, [Piece(at, at, 16) for at in range(0, MIB, 16)])
            assert reader.memory == owner.memory

    run(main())


@pytest.mark.parametrize("pieces", [[], [Piece(0, 0, 0)], [Piece(MIB, MIB, 0)]], ids=["none", "empty", "at the end"])
def test_nothing_can_be_read_too(world, kind, run, pieces):
    async def main():
        async with world.agent(kind) as owner, world.agent(kind) as reader:
            await read(reader, owner, pieces)

    run(main())


@pytest.mark.parametrize(
    "piece",
    [
        Piece(MIB, 0, 1),
        Piece(0, MIB, 1),
        Piece(MIB - 1, 0, 2),
        Piece(0, MIB - 1, 2),
        Piece(-1, 0, 1),
        Piece(0, -1, 1),
        Piece(8, 8, -1),
        Piece(0, 0, 1 << 70),
        Piece(1 << 70, 0, 1),
    ],
)
def test_a_piece_outside_of_either_memory_is_refused_and_nothing_is_read(world, kind, run, piece):
    async def main():
        async with world.agent(kind) as owner, world.agent(kind) as reader:
            fill(owner.memory)
            assert await failure(read(reader, owner, [Piece(0, 0, 8), piece])) == "refused"
            assert bytes(reader.memory) == bytes(MIB)

    run(main())


@LOOPS
def test_notices_of_all_sizes_arrive_and_larger_ones_are_refused(world, kind, run):
    async def main():
        got = []
        async with world.agent(kind, on_notice=got.append) as owner, world.agent(kind) as sender:
            sent = [b"", b"x", bytes(100), os.urandom(MAX_NOTICE_BYTES)]
            for notice in sent:
                await sender.notify(owner.address, notice, timeout_s=PATIENCE_S)
            await until_async(lambda: len(got) >= len(sent))
            assert got == sent
            too_large = sender.notify(owner.address, bytes(MAX_NOTICE_BYTES + 1), timeout_s=PATIENCE_S)
            assert await failure(too_large) == "refused"

    run(main())


@LOOPS
def test_two_agents_read_each_other_at_once(world, kind, run):
    async def main():
        async with world.agent(kind, 16 * MIB) as one, world.agent(kind, 16 * MIB) as other:
            one.memory[: 8 * MIB], other.memory[: 8 * MIB] = pattern(8 * MIB), pattern(8 * MIB, MIB)
            piece = [Piece(0, 8 * MIB, 8 * MIB)]
            await asyncio.gather(read(one, other, piece), read(other, one, piece))
            assert one.memory[8 * MIB :] == other.memory[: 8 * MIB]
            assert other.memory[8 * MIB :] == one.memory[: 8 * MIB]

    run(main())


def test_many_reads_and_notices_at_once_do_not_disturb_each_other(world, kind, run):
    async def main():
        got = []
        async with (
            world.agent(kind, 50 * 65536, on_notice=got.append) as owner,
            world.agent(kind, 50 * 65536) as reader,
        ):
            fill(owner.memory)
            places = [at * 65536 for at in range(50)]
            reads = [read(reader, owner, [Piece(at, at, 65536)]) for at in places]
            notices = [reader.notify(owner.address, b"%d" % at, timeout_s=PATIENCE_S) for at in places]
            await asyncio.gather(*reads, *notices)
            assert reader.memory == owner.memory
            await until_async(lambda: len(got) >= 50)
            assert {int(notice) for notice in got} == set(places)

    run(main())


def test_an_owner_that_was_closed_is_lost(world, kind, run):
    async def main():
        async with world.agent(kind) as reader, world.agent(kind) as fresh:
            async with world.agent(kind) as owner:
                fill(owner.memory)
                address, kept = owner.address, owner.memory[:8]
                await read(reader, owner, [Piece(0, 0, 8)])
            for other in (reader, fresh):
                assert await failure(read(other, address, [Piece(0, 16, 8)])) == "lost"
                assert await failure(other.notify(address, b"x", timeout_s=PATIENCE_S)) == "lost"
            assert kept == reader.memory[:8]  # who still looks at memory may do so

    run(main())


def test_an_owner_that_was_killed_is_lost_to_those_that_knew_it_and_to_others(world, kind, run):
    async def main():
        process, address = await world.process(kind)
        async with world.agent(kind) as reader, world.agent(kind) as fresh:
            await read(reader, address, [Piece(8, 0, 8)])
            assert bytes(reader.memory[:8]) == pattern(8, 8)
            process.kill()
            process.wait()
            for other in (reader, fresh):
                assert await failure(read(other, address, [Piece(0, 16, 8)], 20.0)) in ("lost", "late")
                assert await failure(other.notify(address, b"x", timeout_s=20.0)) in ("lost", "late")

    run(main())


def test_a_read_whose_owner_is_killed_has_all_or_fails_and_ends(world, kind, run):
    async def main():
        process, address = await world.process(kind, 64 * MIB)
        async with world.agent(kind, 64 * MIB) as reader:
            await read(reader, address, [Piece(0, 0, 8)])
            reading = asyncio.ensure_future(read(reader, address, [Piece(0, 0, 64 * MIB)]))
            await asyncio.sleep(0)
            process.kill()
            try:
                await reading
            except TransferError as error:
                assert error.kind == "lost"
            else:
                assert reader.memory == pattern(64 * MIB)

    run(main())


def test_a_read_that_was_given_up_writes_nothing_any_more(world, kind, run):
    async def main():
        process, address = await world.process(kind, 16 * MIB)
        async with world.agent(kind, 16 * MIB) as reader:
            await read(reader, address, [Piece(0, 0, 8)])
            process.send_signal(signal.SIGSTOP)
            reads = [asyncio.ensure_future(read(reader, address, [Piece(0, 0, 16 * MIB)])) for _ in range(3)]
            for _ in range(5):
                await asyncio.sleep(0)
            for reading in reads:
                reading.cancel()
            ends = await asyncio.gather(*reads, return_exceptions=True)
            assert all(isinstance(end, asyncio.CancelledError) for end in ends)
            reader.memory[:] = bytes(16 * MIB)
            process.send_signal(signal.SIGCONT)
            await read(reader, address, [Piece(8, 0, 8)])  # the owner has served what was asked before
            assert bytes(reader.memory) == pattern(8, 8) + bytes(16 * MIB - 8)

    run(main())


def test_an_owner_that_does_not_answer_costs_no_more_than_the_time_given(world, kind, run):
    async def main():
        process, address = await world.process(kind)
        async with world.agent(kind) as reader, world.agent(kind) as other:
            await read(reader, address, [Piece(0, 0, 8)])
            process.send_signal(signal.SIGSTOP)
            outcomes = await asyncio.gather(
                *(read(reader, address, [Piece(0, 0, MIB)], 0.2) for _ in range(20)), return_exceptions=True
            )
            assert all(outcome is None or outcome.kind == "late" for outcome in outcomes)
            fill(other.memory)
            await read(reader, other, [Piece(0, 0, MIB)])  # others are not held up
            assert reader.memory == other.memory
            process.send_signal(signal.SIGCONT)
            await read(reader, address, [Piece(8, 0, 8)])
            assert bytes(reader.memory[:8]) == pattern(8, 8)

    run(main())


def test_an_agent_that_is_closed_ends_what_it_does_as_lost_and_does_no_more(world, kind, run):
    async def main():
        process, address = await world.process(kind)
        async with world.agent(kind) as reader:
            await read(reader, address, [Piece(0, 0, 8)])
            process.send_signal(signal.SIGSTOP)
            notice = asyncio.ensure_future(reader.notify(address, b"x", timeout_s=PATIENCE_S))
            reads = [asyncio.ensure_future(read(reader, address, [Piece(0, 0, MIB)])) for _ in range(20)]
            await asyncio.sleep(0)
            await reader.close()
            for outcome in await asyncio.gather(notice, *reads, return_exceptions=True):
                assert outcome is None or outcome.kind == "lost"
            assert await failure(read(reader, address, [Piece(0, 0, 8)])) == "lost"

    run(main())


def test_another_start_in_the_same_process_is_another_agent(world, kind, run):
    async def main():
        async with world.agent(kind) as reader, world.agent(kind) as first, world.agent(kind) as second:
            fill(second.memory)
            mixed = {**second.address, "id": first.address["id"]}
            assert await failure(read(reader, mixed, [Piece(0, 0, 8)])) in ("lost", "refused")
            assert bytes(reader.memory[:8]) == bytes(8)
            await read(reader, second, [Piece(0, 0, 8)])

    run(main())


def test_an_address_of_another_kind_or_of_none_is_refused_and_both_kinds_are_named(world, kind, run):
    async def main():
        async with world.agent(kind) as reader:
            transport = reader.address["transport"]
            with pytest.raises(TransferError, match=f"reached by pigeon.* reads by {transport}") as caught:
                await read(reader, {"transport": "pigeon"}, [])
            assert caught.value.kind == "refused"
            good = reader.address
            for bad in (
                {},
                {"transport": transport},
                {**good, "id": "x"},
                {**good, "num_bytes": 0},
                {**good, "num_bytes": "1"},
                {"transport": "auto"},
                {"transport": "auto", "ways": [1, None]},
            ):
                assert await failure(read(reader, bad, [])) == "refused"

    run(main())


def names(folder):
    return {path.name for path in Path(folder).iterdir()}


def test_agents_leave_no_thread_file_or_task_behind(world, kind):
    async def live():
        async with world.agent(kind, 9 * MIB) as owner, world.agent(kind, 9 * MIB) as reader:
            await asyncio.gather(*(read(reader, owner, [Piece(0, 0, 9 * MIB)]) for _ in range(4)))
            await reader.notify(owner.address, b"x", timeout_s=PATIENCE_S)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(live())  # libraries keep some things for ever
    gc.collect()  # of what other tests have left
    files, threads = len(names("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        asyncio.run(live())
    assert (len(names("/proc/self/fd")), threading.active_count()) == (files, threads)
    assert names(world.folder) == set()


def test_an_agent_needs_memory(world, kind, run):
    async def main():
        for num_bytes in (0, -1):
            with pytest.raises(ValueError, match="at least 1 byte"):
                await world.new_agent(kind, num_bytes).start()
        for num_bytes in (1 << 60, 1 << 70):
            agent = world.new_agent(kind, num_bytes)
            assert await failure(agent.start()) == "refused"

    run(main())
