"""A store that all workers share: whatever becomes of it is a miss, and whoever calls it costs the others nothing."""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import struct
import subprocess
import sys

import pytest
import uvloop

from serving.kv_tiers import store_client, trouble
from serving.kv_tiers import wire as wire_module
from serving.kv_tiers.config import GIB, KvStoreServiceConfig
from serving.kv_tiers.store import size_in_words
from serving.kv_tiers.store_client import parse_address
from serving.kv_tiers.tier import ChunkFormat, TierError
from serving.kv_tiers.wire import (
    ANSWER,
    LOOK_UP,
    MAX_CHUNK_BYTES,
    MAX_KEYS,
    READ,
    REQUEST,
    WELCOME,
    WRITE,
    lot_size,
    pack_request,
    place_of,
)
from serving.runtime.proof import GREETING, NONCE_BYTES, Handshake
from serving.transfer import door as door_module
from serving.transfer.wire import DONE, ID_BYTES, REFUSED
from tests.kv_tiers.world import BIG, FORMAT, TOKEN, chunk, chunks, free_port, read, room, write
from tests.support.waiting import in_time, until, until_async


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, "serving.kv_tiers")
    return lambda: [record.getMessage() for record in caplog.records]


@contextlib.asynccontextmanager
async def user(world, port, format=FORMAT, **options):
    tier = world.client(port, format, **options)
    await tier.start()
    try:
        yield tier
    finally:
        await tier.close()


def token_of(world):
    """Return the token that a store's process has made up."""
    until((world.folder / "discovery" / "token").exists)
    return (world.folder / "discovery" / "token").read_bytes()


def test_workers_share_what_they_keep_and_send_no_chunk_twice(world):
    async def main():
        async with world.store(8) as (store, port), user(world, port) as one, user(world, port) as other:
            assert await write(one, [1, 2]) == 2
            assert await read(other, [1, 2, 3]) == 2
            assert await write(other, [1, 2, 3]) == 3
            assert other.counts.num_written == 1
            assert await read(one, [1, 2, 3]) == 3
            counts = store.shelf.counts
            assert (counts.num_chunks, counts.num_written, counts.num_read) == (3, 3, 5)

    uvloop.run(main())


def test_one_store_keeps_chunks_of_all_sizes(world):
    async def main():
        async with world.store(10, BIG) as (_, port), user(world, port) as small, user(world, port, BIG) as big:
            assert await write(small, range(50)) == 50
            assert await write(big, range(10), BIG) == 10
            assert await read(big, range(10), BIG) == 10
            assert await read(small, range(50)) == 0

    uvloop.run(main())


def test_more_chunks_than_one_request_may_have_take_several(world, monkeypatch):
    monkeypatch.setattr(wire_module, "MAX_LOT_BYTES", 3 * FORMAT.chunk_bytes)
    monkeypatch.setattr(store_client, "MAX_KEYS", 4)
    assert lot_size(FORMAT.chunk_bytes) == 3

    async def main():
        async with world.store(10) as (store, port), user(world, port) as tier:
            assert await write(tier, range(8)) == 8
            assert await tier.look_up(range(10)) == 8
            assert await read(tier, range(10)) == 8
            assert await write(tier, range(12)) == await read(tier, range(12)) == 10
            assert await write(tier, [99]) == 1
            assert await tier.look_up(range(10)) == 9  # of a prompt the end goes first
            await tier.remove(range(12))
            assert store.shelf.counts.num_chunks == 1

    uvloop.run(main())


# A store that goes, stops, and comes back


def test_a_store_that_is_not_there_yet_is_used_when_it_is(world, said):
    port = free_port()

    async def main():
        async with user(world, port, token=b"?" * 32) as tier:
            assert await tier.look_up([1]) == await read(tier, [1]) == await write(tier, [1]) == 0
            world.process(port)
            tier._token = lambda: token_of(world)
            await until_async(lambda: tier.is_up)
            assert await write(tier, [1]) == await read(tier, [1]) == 1

    uvloop.run(main())
    assert [line.partition(f"{port}")[2] for line in said()] == [
        f" cannot be reached, and its KV counts as absent: [Errno 111] Connect call failed ('127.0.0.1', {port})",
        " can be reached again",
    ]


def test_a_store_that_is_killed_in_the_middle_is_a_miss_and_is_used_again_when_it_is_restarted(
    world, said, monkeypatch
):
    monkeypatch.setattr(trouble, "QUIET_S", 0.0)
    port = free_port()

    async def main():
        process = world.process(port)
        token = await asyncio.to_thread(token_of, world)
        async with user(world, port, BIG, token=token) as tier:
            await until_async(lambda: tier.is_up)
            assert await write(tier, range(60), BIG) == 60
            into = room(60, BIG)
            reads = [asyncio.ensure_future(tier.read(range(60), into)) for _ in range(6)]
            writes = [asyncio.ensure_future(write(tier, range(100, 130), BIG)) for _ in range(2)]
            await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
            process.kill()
            for num_read in await asyncio.gather(*reads):
                assert all(into[key] == chunk(key, BIG) for key in range(num_read))
            assert all(num_written <= 30 for num_written in await asyncio.gather(*writes))
            await until_async(lambda: not tier.is_up or asyncio.ensure_future(tier.look_up([1])) is None)
            assert await tier.look_up([1]) == await read(tier, [1], BIG) == await write(tier, [1], BIG) == 0
            process.wait()
            world.process(port)
            await until_async(lambda: tier.is_up)
            assert await tier.look_up([1]) == 0
            assert await write(tier, [1], BIG) == await read(tier, [1], BIG) == 1

    uvloop.run(main())
    lines = [line for line in said() if str(port) in line]
    assert sum("counts as absent" in line for line in lines) == sum("reached again" in line for line in lines) <= 2


def test_a_store_that_does_not_answer_is_a_miss_after_a_while_and_at_once_from_then_on(world, said):
    port = free_port()

    async def main():
        process = world.process(port)
        token = await asyncio.to_thread(token_of, world)
        async with user(world, port, token=token, look_up_s=2.0, timeout_s=2.0) as tier:
            await until_async(lambda: tier.is_up)
            assert await write(tier, [1]) == 1
            process.send_signal(signal.SIGSTOP)
            assert await asyncio.gather(*(tier.look_up([1]) for _ in range(50)), *(read(tier, [1]) for _ in range(50)))
            assert not tier.is_up
            looking_up = tier.look_up([1])
            with pytest.raises(StopIteration, match="0"):  # it waits for nothing
                looking_up.send(None)
            process.send_signal(signal.SIGCONT)
            await until_async(lambda: tier.is_up)
            assert await read(tier, [1]) == 1

    uvloop.run(main())
    assert len([line for line in said() if "counts as absent: no answer within 2 s" in line]) == 1
    assert len([line for line in said() if "reached again" in line]) == 1


def test_who_has_another_token_finds_nothing_and_says_why(world, said):
    async def main():
        async with world.store(8) as (_, port), user(world, port) as tier:
            await write(tier, [1])
            async with user(world, port, token=b"another token " * 2) as stranger:
                assert await stranger.look_up([1]) == 0
                await until_async(said)

    uvloop.run(main())
    assert any("hung up on this agent's proof: does it have another token?" in line for line in said())


@pytest.mark.parametrize("text", ["", "host", "host:", ":7600", "host:0", "host:65536", "host:x", "host:-1", "host:1²"])
def test_what_is_no_address_is_refused_in_one_line(text):
    with pytest.raises(ValueError, match=r"expected the KV store's address as HOST:PORT, not '"):
        parse_address(text)


def test_addresses_are_names_numbers_and_numbers_in_brackets():
    assert [parse_address(text) for text in ("a.b:1", "127.0.0.1:7600", "[::1]:65535")] == [
        ("a.b", 1),
        ("127.0.0.1", 7600),
        ("::1", 65535),
    ]


# The program


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--port", "70000"], "port must be from 0 to 65535, not 70000"),
        (["--kv-store-size", "0"], "kv_store_size must be greater than 0 and at most 1000000000 (GiB), not 0.0"),
        (
            ["--kv-store-size", "4GB"],
            "--kv-store-size is '4GB'; expected a number greater than 0 and at most 1000000000 (GiB)",
        ),
        (["--host", "203.0.113.1"], "port 7600 on 203.0.113.1 cannot be used: Cannot assign requested address"),
    ],
)
def test_a_store_that_cannot_be_is_refused_in_one_line(world, flags, why):
    command = [sys.executable, "-m", "serving.kv_store", "--discovery-dir", world.folder / "discovery", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert why in done.stderr


def test_a_port_that_is_taken_is_refused_in_one_line(world):
    async def main():
        async with world.store(1) as (server, port):
            with pytest.raises(
                TierError, match=f"port {port} on 127.0.0.1 cannot be used: Address already in use; choose"
            ):
                await type(server)(1, lambda: TOKEN).open("127.0.0.1", port)

    uvloop.run(main())


@pytest.mark.parametrize(("size", "said"), [(0.02, "20.5 MiB"), (1, "1 GiB"), (1024.5, "1,024 GiB")])
def test_a_store_says_its_size_in_a_unit_that_fits(size, said):
    assert size_in_words(KvStoreServiceConfig(kv_store_size=size).num_bytes) == said


def test_a_store_ends_when_it_is_asked_to(world):
    port = free_port()
    process = world.process(port)
    token_of(world)

    async def main():
        async with user(world, port, token=token_of(world)) as tier:
            await until_async(lambda: tier.is_up)
            assert await write(tier, [1]) == 1
            process.terminate()
            assert await asyncio.to_thread(process.wait, 60) == 0

    uvloop.run(main())


def resident_bytes(process):
    status = open(f"/proc/{process.pid}/statm").read().split()  # noqa: PTH123, SIM115
    return int(status[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_stores_memory_stays_within_what_it_was_given(world):
    sizes = [ChunkFormat.of(num_bytes, "a model") for num_bytes in (800, 20_000, 300_000, 2_000_000)]
    port = free_port()
    process = world.process(port, num_gib=0.05)

    async def main():
        async with contextlib.AsyncExitStack() as stack:
            token = await asyncio.to_thread(token_of, world)
            tiers = [await stack.enter_async_context(user(world, port, format, token=token)) for format in sizes]
            await until_async(lambda: all(tier.is_up for tier in tiers))
            before, capacity = resident_bytes(process), 0.05 * GIB
            num_written = 0
            for _turn in range(3):
                for tier, format in zip(tiers, sizes, strict=True):
                    for _ in range(4):
                        count = min(20_000_000 // format.chunk_bytes, 2000)
                        keys = [secrets.randbits(64) for _ in range(count)]
                        assert await tier.write(keys, [chunk(key, format) for key in keys]) == count
                        num_written += count * format.chunk_bytes
            assert num_written > 5 * capacity
            assert resident_bytes(process) - before < 2 * capacity

    uvloop.run(main())


# Strangers


async def hear_all(reader):
    heard = b""
    with contextlib.suppress(ConnectionResetError):
        while data := await reader.read(1 << 16):
            heard += data
    return heard


async def call(port, token=TOKEN, id=None):
    """Connect as a worker that knows the token, whatever it says then."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    handshake = Handshake(token, place_of(port), secrets.token_bytes(NONCE_BYTES), is_caller=True)
    while not handshake.is_over:
        writer.write(handshake.feed(await reader.readexactly(44 if not handshake._nonces else 32)))
    assert (await reader.readexactly(len(WELCOME) + ID_BYTES))[: len(WELCOME)] == WELCOME
    writer.write(id or secrets.token_bytes(ID_BYTES))
    return reader, writer


def with_store(world, talk, num_chunks=8, format=FORMAT):
    """Let `talk(server, port)` do what it likes with a store; afterwards an honest worker gets what it asks for."""

    async def main():
        async with world.store(num_chunks, format) as (server, port), user(world, port, format) as tier, in_time():
            await write(tier, [1, 2], format)
            await talk(server, port)
            assert await write(tier, [1, 2, 3], format) == 3
            assert await read(tier, [1, 2, 3], format) == 3
            held = sum(len(entry.data) + 512 for entry in server.shelf.entries.values())
            assert server.shelf.num_used == held <= server.shelf.num_bytes

    uvloop.run(main())


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(64), os.urandom(10_000)], ids=["nothing", "http", "zeros", "noise"]
)
def test_who_cannot_prove_to_know_the_token_hears_a_greeting_and_no_more(world, said, monkeypatch):
    async def talk(server, port):
        with monkeypatch.context() as patch:
            patch.setattr(door_module, "PROOF_S", 0.2)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(said)
            heard = await hear_all(reader)
            assert heard[: len(GREETING)] == GREETING[: len(heard)]
            assert len(heard) <= len(GREETING) + NONCE_BYTES
            writer.close()

    with_store(world, talk)


BAD = {
    "a kind that is none": (REQUEST.pack(77, 0, 0, 0), "unknown kind of request: 77"),
    "kind 0": (REQUEST.pack(0, 1, 1, 0), "unknown kind of request: 0"),
    "too many keys": (REQUEST.pack(LOOK_UP, MAX_KEYS + 1, 0, 0), f"at most {MAX_KEYS}"),
    "as many keys as can be said": (
        REQUEST.pack(LOOK_UP, (1 << 32) - 1, 0, 0),
        f"4294967295 keys; expected at most {MAX_KEYS}",
    ),
    "chunks of no size": (REQUEST.pack(READ, 1, 0, 0), f"chunks of 0 bytes; expected 1 to {MAX_CHUNK_BYTES}"),
    "huge chunks": (REQUEST.pack(WRITE, 1, (1 << 32) - 1, 0), "chunks of 4294967295 bytes"),
    "more than a lot": (REQUEST.pack(WRITE, 33, 1 << 20, 0), "33 keys; expected at most 32"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_request_that_cannot_be_is_refused_and_the_connection_ends(world, what):
    data, why = BAD[what]

    async def talk(server, port):
        reader, writer = await call(port)
        writer.write(data)
        heard = await hear_all(reader)
        status, length = ANSWER.unpack(heard[: ANSWER.size])
        assert (status, length) == (REFUSED, len(heard) - ANSWER.size)
        assert why in heard.decode(errors="replace")
        writer.close()

    with_store(world, talk)


def test_noise_from_one_who_knows_the_token_hurts_nobody(world):
    async def talk(server, port):
        for _ in range(20):
            reader, writer = await call(port)
            noise = os.urandom(5000)
            print(noise.hex())
            writer.write(noise)
            writer.write_eof()
            await hear_all(reader)
            writer.close()

    with_store(world, talk)


def test_chunks_that_are_announced_and_do_not_come_take_no_room_for_long(world, monkeypatch):
    monkeypatch.setattr(wire_module, "STALL_S", 0.3)

    async def talk(server, port):
        callers = []
        for number in range(6):
            reader, writer = await call(port)
            writer.write(pack_request(WRITE, [number + 100], chunk_bytes=BIG.chunk_bytes, identity=1))
            assert ANSWER.unpack(await reader.readexactly(ANSWER.size)) == (DONE, 1)
            writer.write(bytes(100_000))
            callers.append((reader, writer))
        assert server.shelf.num_used <= server.shelf.num_bytes
        for reader, writer in callers:
            await hear_all(reader)
            writer.close()
        await until_async(
            lambda: server.shelf.num_used == sum(len(e.data) + 512 for e in server.shelf.entries.values())
        )

    with_store(world, talk, 4, BIG)


def test_a_reader_that_takes_nothing_loses_its_connection_and_what_it_held_can_be_evicted(world, monkeypatch):
    monkeypatch.setattr(wire_module, "STALL_S", 0.3)
    monkeypatch.setattr(wire_module, "MIN_BYTES_PER_S", 1e9)

    async def talk(server, port):
        async with user(world, port, BIG) as tier:
            assert await write(tier, range(4), BIG) == 4
            reader, writer = await call(port)
            writer.transport.pause_reading()
            request = pack_request(READ, range(4), chunk_bytes=BIG.chunk_bytes, identity=BIG.identity)
            writer.write(request)
            entries = server.shelf.entries
            await until_async(lambda: any(entry.num_readers for entry in entries.values()))
            await tier.remove(range(4))
            assert len(entries) == 4  # what is being sent stays
            await until_async(lambda: not any(entry.num_readers for entry in entries.values()))
            writer.transport.resume_reading()
            assert len(await hear_all(reader)) < 4 * BIG.chunk_bytes
            assert await write(tier, range(10, 14), BIG) == 4
            writer.close()

    with_store(world, talk, 4, BIG)


def test_many_connections_of_one_caller_cost_only_its_own(world):
    async def talk(server, port):
        callers = [await call(port, id=b"g" * ID_BYTES) for _ in range(door_module.MAX_OF_ONE_CALLER + 4)]
        for reader, writer in callers[:4]:
            assert await hear_all(reader) == b""
            writer.close()
        for reader, writer in callers[4:]:
            writer.write(pack_request(LOOK_UP, [1], chunk_bytes=1, identity=FORMAT.identity))
            assert ANSWER.unpack(await reader.readexactly(ANSWER.size)) == (DONE, 1)
            writer.close()

    with_store(world, talk)


STRANGE = {
    "nothing": b"",
    "another protocol": b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10,
    "more than was asked for": ANSWER.pack(DONE, 4_000_000_000),
    "a long refusal": ANSWER.pack(REFUSED, 4_000_000_000),
    "half an answer": ANSWER.pack(DONE, 1) + bytes(100),
    "a wrong chunk": ANSWER.pack(DONE, 1) + bytes(FORMAT.chunk_bytes),
}


@pytest.mark.parametrize("what", STRANGE)
def test_a_store_that_talks_nonsense_is_a_miss(world, monkeypatch, what, said):
    monkeypatch.setattr(store_client, "BACKOFF_S", (600.0,))

    async def main():
        async with world.store(8) as (server, port), user(world, port, timeout_s=0.3, look_up_s=0.3) as tier, in_time():
            await write(tier, [1])

            async def answer(stream, *_):
                await stream.send(STRANGE[what])

            monkeypatch.setattr(server, "_answer", answer)
            into = room(1)
            assert await tier.read([1], into) == 0
            assert tier.counts.num_faults >= 1
            assert await tier.write([2], chunks([2])) == 0

    uvloop.run(main())


def test_keys_of_a_request_are_64_bits_each():
    assert pack_request(LOOK_UP, [1, (1 << 64) - 1], chunk_bytes=5, identity=6)[REQUEST.size :] == struct.pack(
        "<QQ", 1, (1 << 64) - 1
    )
