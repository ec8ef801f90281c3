"""Whoever is at the other end: without the token nobody gets in, and with it nobody gets more than what is offered."""

import asyncio
import os
import secrets
import socket
import tempfile

import pytest
import uvloop

from serving.runtime.proof import GREETING, NONCE_BYTES, Handshake
from serving.transfer import door as door_module
from serving.transfer import links as links_module
from serving.transfer import owner as owner_module
from serving.transfer.agent import Piece, TransferError
from serving.transfer.door import MAX_OF_ONE_CALLER
from serving.transfer.links import Deadlines, Link, Links
from serving.transfer.make import make_agent
from serving.transfer.memory import Memory
from serving.transfer.owner import Owner
from serving.transfer.sockets import SocketConnection, SocketListener
from serving.transfer.stream import Stream
from serving.transfer.way import OwnerAddress
from serving.transfer.wire import DONE, HEADER, ID_BYTES, MAX_PIECES, NOTICE, PLACE, READ, REFUSED, WELCOME
from tests.support.waiting import in_time, until_async
from tests.transfer.world import MIB, PATIENCE_S, TOKEN, fill, pattern


async def hear_all(reader):
    heard = b""
    try:
        while data := await reader.read(1 << 16):
            heard += data
    except ConnectionResetError:
        pass
    return heard


async def call(address, token=TOKEN):
    """Connect as a reader that knows the token, whatever it says then."""
    reader, writer = await asyncio.open_connection(address["host"], address["port"])
    place = f"kv:{address['host']}:{address['port']}"
    handshake = Handshake(token, place, secrets.token_bytes(NONCE_BYTES), is_caller=True)
    while not handshake.is_over:
        writer.write(handshake.feed(await reader.readexactly(44 if not handshake._nonces else 32)))
    assert await reader.readexactly(len(WELCOME) + ID_BYTES) == WELCOME + bytes.fromhex(address["id"])
    return reader, writer


def with_owner(world, talk, kind="tcp"):
    """Let `talk(address)` do what it likes with an owner; afterwards an honest reader gets what it asks for."""

    async def main():
        got = []
        async with world.agent(kind, on_notice=got.append) as owner, world.agent(kind) as reader, in_time():
            fill(owner.memory)
            await talk(owner.address)
            await reader.read(owner.address, [Piece(0, 0, MIB)], timeout_s=PATIENCE_S)
            assert reader.memory == owner.memory
        return got

    return uvloop.run(main())


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(64), os.urandom(10_000)], ids=["nothing", "http", "zeros", "noise"]
)
def test_who_cannot_prove_to_know_the_token_hears_a_greeting_and_no_more(world, said, monkeypatch):
    async def talk(address):
        with monkeypatch.context() as patch:
            patch.setattr(door_module, "PROOF_S", 0.2)
            reader, writer = await asyncio.open_connection(address["host"], address["port"])
            writer.write(said)
            heard = await hear_all(reader)
        assert heard[: len(GREETING)] == GREETING[: len(heard)]
        assert len(heard) <= len(GREETING) + NONCE_BYTES
        writer.close()

    with_owner(world, talk)


def test_strangers_that_hold_many_connections_keep_nobody_out(world, monkeypatch):
    monkeypatch.setattr(door_module, "MAX_UNPROVEN", 4)
    monkeypatch.setattr(door_module, "PROOF_S", 600)

    async def talk(address):
        held = []
        for _ in range(20):
            held.append(await asyncio.open_connection(address["host"], address["port"]))  # noqa: PERF401
        for reader, _ in held[:16]:
            await hear_all(reader)
        for reader, _ in held[16:]:
            await reader.readexactly(len(GREETING))
        strangers.extend(held)

    strangers = []
    with_owner(world, talk)
    for _, writer in strangers:
        writer.close()


def test_a_reader_with_another_token_is_refused_and_says_why(world):
    async def main():
        async with world.agent("tcp") as owner, world.agent("tcp", token=b"another token " * 2) as reader:
            with pytest.raises(
                TransferError, match="hung up on this agent's proof: does it have another token"
            ) as caught:
                await reader.read(owner.address, [Piece(0, 0, 8)], timeout_s=PATIENCE_S)
            assert caught.value.kind == "refused"

    uvloop.run(main())


@pytest.mark.parametrize("token", [None, lambda: b"", lambda: b"short"], ids=["none", "empty", "short"])
def test_without_a_token_nobody_listens(token):
    async def main():
        agent = make_agent("tcp", MIB, on_notice=print, token=token)
        with pytest.raises(
            TransferError, match=r"needs the cluster's token; it has . bytes, expected at least 16"
        ) as caught:
            await agent.start()
        assert caught.value.kind == "refused"

    uvloop.run(main())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "203.0.113.1", "no such host", "a..b"])
def test_where_others_cannot_reach_it_no_agent_listens(host):
    async def main():
        with pytest.raises(TransferError, match=r"others can reach|a port for KV cannot be opened") as caught:
            await make_agent("tcp", MIB, on_notice=print, host=host, token=lambda: TOKEN).start()
        assert caught.value.kind == "refused"

    uvloop.run(main())


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (HEADER.pack(77, 0), "kind 77"),
        (HEADER.pack(77, 1), "kind 77"),
        (HEADER.pack(READ, 0xFFFFFFFF), "4294967295 bytes"),
        (HEADER.pack(READ, (MAX_PIECES + 1) * PLACE.size), "at most 262144"),
        (HEADER.pack(READ, 7) + bytes(7), "not a list of places"),
        (HEADER.pack(READ, 16) + PLACE.pack(0, MIB + 1), "1048577 bytes at 0 go beyond"),
        (HEADER.pack(READ, 16) + PLACE.pack((1 << 64) - 1, (1 << 64) - 1), "go beyond"),
        (HEADER.pack(NOTICE, 4097), "4097 bytes"),
    ],
)
def test_a_request_that_is_none_is_refused_and_the_connection_ended(world, request_, why):
    async def talk(address):
        reader, writer = await call(address)
        writer.write(bytes(ID_BYTES) + request_)
        status, length = HEADER.unpack(await reader.readexactly(HEADER.size))
        reason = (await reader.readexactly(length)).decode()
        assert status == REFUSED
        assert why in reason
        assert await hear_all(reader) == b""
        writer.close()

    assert with_owner(world, talk) == []


def test_who_stops_in_the_middle_of_a_request_or_of_an_answer_loses_the_connection(world, monkeypatch):
    monkeypatch.setattr(owner_module, "STALL_S", 0.2)

    async def main():
        async with world.agent("tcp") as owner, in_time():
            for told in (PLACE.pack(0, 8), PLACE.pack(0, MIB) * 1000):
                reader, writer = await call(owner.address)
                writer.transport.pause_reading()
                writer.write(bytes(ID_BYTES) + HEADER.pack(READ, 16_000) + told)
                served = owner._ways[0]._owner._door._proven
                await until_async(lambda served=served: served)
                await until_async(lambda served=served: not served)
                writer.transport.resume_reading()
                assert len(await hear_all(reader)) < 1000 * MIB
                writer.close()

    uvloop.run(main())


def test_a_reader_that_makes_too_many_connections_loses_its_oldest_and_costs_others_nothing(world):
    async def talk(address):
        greedy = []
        for _ in range(MAX_OF_ONE_CALLER + 4):
            reader, writer = await call(address)
            writer.write(b"g" * ID_BYTES + HEADER.pack(NOTICE, 1) + b"x")
            assert HEADER.unpack(await reader.readexactly(HEADER.size)) == (DONE, 0)
            greedy.append((reader, writer))
        for reader, _ in greedy[:4]:
            assert await hear_all(reader) == b""
        for reader, writer in greedy[4:]:
            writer.write(HEADER.pack(READ, 16) + PLACE.pack(0, 8))
            assert await reader.readexactly(HEADER.size + 8) == HEADER.pack(DONE, 0) + pattern(8)
            writer.close()

    assert with_owner(world, talk) == [b"x"] * (MAX_OF_ONE_CALLER + 4)


def test_beyond_so_many_connections_the_oldest_goes_and_an_honest_reader_makes_another(world, monkeypatch):
    monkeypatch.setattr(door_module, "MAX_CONNECTIONS", 2)

    async def main():
        async with world.agent("tcp") as owner:
            fill(owner.memory)
            readers = [make_agent("tcp", MIB, on_notice=print, token=lambda: TOKEN) for _ in range(4)]
            for reader in readers:
                await reader.start()
            for _ in range(3):
                for reader in readers:
                    await reader.read(owner.address, [Piece(8, 0, 8)], timeout_s=PATIENCE_S)
                    assert bytes(reader.memory[:8]) == pattern(8, 8)
            for reader in readers:
                await reader.close()

    uvloop.run(main())


@pytest.mark.parametrize(
    ("how", "kind", "timeout_s"),
    [
        ("hangs up", "lost", PATIENCE_S),
        ("noise", "refused", PATIENCE_S),
        ("says nothing", "late", 0.3),
        ("no welcome", "late", 0.3),
    ],
)
def test_a_place_where_no_agent_is_costs_a_reader_no_more_than_its_time(world, how, kind, timeout_s):
    async def stranger(reader, writer):
        if how == "noise":
            writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
        elif how == "no welcome":
            writer.write(GREETING)
        if how == "hangs up":
            writer.close()
        await hear_all(reader)
        writer.close()

    async def main():
        server = await asyncio.start_server(stranger, "127.0.0.1", 0)
        async with world.agent("tcp") as reader:
            address = {**reader.address, "port": server.sockets[0].getsockname()[1]}
            with pytest.raises(TransferError) as caught:
                await reader.read(address, [Piece(0, 0, 8)], timeout_s=timeout_s)
            assert caught.value.kind == kind
        server.close()

    uvloop.run(main())


@pytest.mark.parametrize(
    "given", ["nothing", "a pipe", "a file", "memory that may shrink", "another size", "another id", "too late"]
)
def test_a_socket_that_hands_out_anything_but_the_memory_announced_is_not_read(world, given):
    async def main():
        memory = Memory(MIB)
        with tempfile.TemporaryFile() as file:
            file.truncate(MIB)
            soft = os.memfd_create("soft")
            os.ftruncate(soft, MIB)
            pipe = os.pipe()
            handles = {"nothing": [], "a pipe": [pipe[0]], "a file": [file.fileno()], "memory that may shrink": [soft]}

            async def welcome(stream, words):
                socket.send_fds(stream.connection.socket, [words], handles.get(given, [memory.handle]))
                if given == "too late":
                    stream.connection.socket.shutdown(socket.SHUT_RDWR)

            path = world.folder / "stranger.kv"
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(path))
            listener.listen()
            stranger = Owner(memory.view, print, id="ab" * 16, welcome=welcome)
            async with world.agent("shm") as reader:
                stranger.serve(SocketListener(listener))
                address = {**reader.address, "id": "ab" * 16, "socket": str(path)}
                if given == "another size":
                    address["num_bytes"] = MIB + 1
                elif given == "another id":
                    address["id"] = "cd" * 16
                with pytest.raises(TransferError) as caught:
                    await reader.read(address, [Piece(0, 0, 8)], timeout_s=PATIENCE_S)
                lost = ("nothing", "another id", "too late")
                assert caught.value.kind == ("lost" if given in lost else "refused")
            await stranger.close()
            for handle in (soft, *pipe):
                os.close(handle)
        memory.close()

    uvloop.run(main())


def test_an_answer_that_is_none_fails_the_read():
    async def main():
        ours, theirs = socket.socketpair()
        from serving.transfer.wire import expect_done

        for answer in (HEADER.pack(9, 0), HEADER.pack(REFUSED, 1 << 30), HEADER.pack(DONE, 1)):
            theirs.sendall(answer)
            with pytest.raises(TransferError, match="does not follow this protocol"):
                await expect_done(Stream(SocketConnection(ours)))
        theirs.sendall(HEADER.pack(REFUSED, 2) + b"\xffx")
        with pytest.raises(TransferError, match=r"the owner refuses: .x"):
            await expect_done(Stream(SocketConnection(ours)))
        ours.close()
        theirs.close()

    asyncio.run(main())


def test_no_time_at_all_is_late_and_a_failure_of_the_system_is_lost():
    async def main():
        deadlines = Deadlines()
        with pytest.raises(TransferError) as caught:
            async with deadlines.within(0, "it"):
                await asyncio.sleep(PATIENCE_S)
        assert (str(caught.value), caught.value.kind) == ("it: its turn did not come within 0 s", "late")
        with pytest.raises(TransferError, match="it: gone") as caught:
            async with deadlines.within(1, "it"):
                raise ConnectionResetError("gone")
        assert caught.value.kind == "lost"
        await deadlines.close()

    asyncio.run(main())


def test_a_read_has_its_time_from_its_turn_on():
    async def main():
        loop, deadlines, late_s = asyncio.get_running_loop(), Deadlines(), 0.0
        now = loop.time
        loop.time = lambda: now() + late_s
        with pytest.raises(TransferError, match="it: not done after 100 s"):
            async with deadlines.within(100, "it") as begin:
                late_s += 90
                begin()
                late_s += 90
                await asyncio.sleep(0.001)
                late_s += 90
                await asyncio.sleep(PATIENCE_S)
        assert late_s == 270
        await deadlines.close()

    asyncio.run(main())


def test_it_is_the_turn_of_a_read_when_there_is_a_connection_for_it(monkeypatch):
    monkeypatch.setattr(links_module, "MAX_LINKS", 1)

    async def main():
        ours, theirs = socket.socketpair()
        is_free, turns = asyncio.Event(), []

        async def dial(owner):
            return Link(Stream(SocketConnection(ours)))

        async def talk(link):
            await is_free.wait()

        links, owner = Links(dial), OwnerAddress("ab" * 16, 1)
        uses = [asyncio.create_task(links.use(owner, talk, lambda n=n: turns.append(n))) for n in range(2)]
        await until_async(lambda: turns)
        assert turns == [0]
        is_free.set()
        await asyncio.gather(*uses)
        assert turns == [0, 1]
        links.close()
        theirs.close()

    asyncio.run(main())
