"""Shared memory: sockets in folders, several ways at once, and memory that readers cannot change."""

import asyncio
import fcntl
import mmap
import os
import socket

import pytest
import uvloop

from serving.transfer.agent import Piece, TransferError
from serving.transfer.make import make_agent
from serving.transfer.memory import Memory
from tests.support.waiting import until_async
from tests.transfer.world import MIB, PATIENCE_S, TOKEN, fill, pattern


def test_a_handle_of_the_memory_neither_changes_nor_shrinks_it():
    memory = Memory(MIB)
    memory.view[:3] = b"abc"
    with pytest.raises(OSError):
        os.pwrite(memory.handle, b"x", 0)
    with pytest.raises(OSError):
        mmap.mmap(memory.handle, MIB)
    with pytest.raises(OSError):
        os.ftruncate(memory.handle, 0)
    with pytest.raises(OSError):
        fcntl.fcntl(memory.handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert os.pread(memory.handle, 4, 0) == b"abc\0"
    memory.close()


def test_memory_that_is_looked_at_stays_after_its_end():
    memory = Memory(MIB)
    part = memory.view[:3]
    part[:] = b"abc"
    memory.close()
    assert bytes(part) == b"abc"


def test_the_socket_of_a_process_that_was_killed_is_removed_by_the_next_agent(world):
    async def main():
        process, _ = await world.process("shm")
        (name,) = os.listdir(world.folder)  # noqa: PTH208
        process.kill()
        process.wait()
        async with world.agent("shm") as living:
            names = set(os.listdir(world.folder))  # noqa: PTH208
            assert len(names) == 1
            assert name not in names
            async with world.agent("shm") as reader:  # it leaves the sockets of the living
                await reader.read(living.address, [Piece(0, 0, 8)], timeout_s=PATIENCE_S)

    uvloop.run(main())


SQUATTED = [
    "open to others",
    "a link",
    "a file",
    "too long a name",
    pytest.param("another user's", marks=pytest.mark.skipif(os.getuid() != 0, reason="only root can give it away")),
]


def squatted(folder, what):
    """Make a folder for KV that cannot be used."""
    place = folder / f"dynabench-kv-{os.getuid()}"
    if what == "open to others":
        place.mkdir()
        place.chmod(0o777)
    elif what == "a link":
        place.symlink_to(folder)
    elif what == "a file":
        place.touch()
    elif what == "another user's":
        place.mkdir(mode=0o700)
        os.chown(place, 65534, 65534)
    else:
        folder /= "x" * 120
        folder.mkdir()
    return folder


@pytest.mark.parametrize("what", SQUATTED)
@pytest.mark.parametrize("variable", ["XDG_RUNTIME_DIR", "TMPDIR"])
def test_a_folder_that_others_could_change_is_refused_by_its_name_with_what_to_do(world, monkeypatch, what, variable):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    folder = squatted(world.folder, what)
    monkeypatch.setenv(variable, str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)  # it remembers

    async def main():
        with pytest.raises(TransferError) as caught:
            await make_agent("shm", MIB, on_notice=print).start()
        return caught.value

    error = uvloop.run(main())
    assert error.kind == "refused"
    assert str(folder / f"dynabench-kv-{os.getuid()}") in str(error)
    assert f"set {variable} to a " in str(error)
    assert "or choose --transfer tcp" in str(error)
    assert "discovery" not in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize("what", SQUATTED)
def test_if_shared_memory_cannot_be_used_auto_takes_tcp_and_says_so(world, monkeypatch, caplog, what):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    folder = squatted(world.folder, what)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)

    async def main():
        agents = [make_agent("auto", MIB, on_notice=print, token=lambda: TOKEN) for _ in range(2)]
        for agent in agents:
            await agent.start()
        async with world.agent("auto") as other:  # it can use shared memory, and is found by TCP
            owner, reader = agents
            assert owner.address["transport"] == "tcp"
            for one, two in ((owner, reader), (owner, other), (other, owner)):
                fill(one.memory)
                two.memory[:] = bytes(MIB)
                await two.read(one.address, [Piece(8, 0, 100)], timeout_s=PATIENCE_S)
                assert bytes(two.memory[:100]) == pattern(100, 8)
        for agent in agents:
            await agent.close()

    uvloop.run(main())
    said = [record.getMessage() for record in caplog.records if "dynabench-kv-" in record.getMessage()]
    assert len(said) == 2
    assert all(line.endswith("; KV travels over tcp instead") for line in said)


def test_an_agent_that_needs_a_way_that_cannot_be_opened_does_not_start(world, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(squatted(world.folder, "a file")))

    async def main():
        for agent in (
            make_agent("auto", MIB, on_notice=print),
            make_agent("auto", MIB, on_notice=print, token=lambda: b""),
        ):
            with pytest.raises(TransferError):
                await agent.start()

    uvloop.run(main())


def test_the_socket_is_this_users_alone(world):
    async def main():
        async with world.agent("shm") as agent:
            assert os.stat(agent.address["socket"]).st_mode & 0o077 == 0  # noqa: PTH116

    uvloop.run(main())


def test_several_ways_share_one_memory_and_the_best_that_reaches_is_taken(world):
    async def main():
        async with world.agent("auto") as owner, world.agent("auto") as reader, world.agent("tcp") as far:
            fill(owner.memory)
            assert [way["transport"] for way in owner.address["ways"]] == ["shm", "tcp"]
            (_, tcp) = owner.address["ways"]
            shm = {**owner.address["ways"][0], "host": "another start of another host"}
            elsewhere = {"transport": "auto", "ways": [shm, tcp]}
            for agent, address in ((reader, owner.address), (reader, elsewhere), (reader, tcp), (far, owner.address)):
                agent.memory[:] = bytes(MIB)
                await agent.read(address, [Piece(8, 0, 100)], timeout_s=PATIENCE_S)
                assert bytes(agent.memory[:100]) == pattern(100, 8)
            with pytest.raises(TransferError, match="on another host") as caught:
                async with world.agent("shm") as near:
                    await near.read(shm, [Piece(0, 0, 8)], timeout_s=PATIENCE_S)
            assert caught.value.kind == "refused"
            with pytest.raises(TransferError, match="is reached by shm, but this agent reads by tcp"):
                await far.read(shm, [], timeout_s=PATIENCE_S)

    uvloop.run(main())


def test_without_a_token_the_best_way_is_shared_memory_alone(world):
    async def main():
        agent = make_agent("auto", MIB, on_notice=print, folder=world.folder)
        await agent.start()
        assert agent.address["transport"] == "shm"
        await agent.close()

    uvloop.run(main())


def test_an_agent_whose_last_way_cannot_be_opened_leaves_nothing(world):
    async def main():
        agent = make_agent("auto", MIB, on_notice=print, folder=world.folder, host="203.0.113.1", token=lambda: TOKEN)
        with pytest.raises(TransferError):
            await agent.start()

    uvloop.run(main())  # uvloop keeps some files for ever
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    uvloop.run(main())
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert os.listdir(world.folder) == []  # noqa: PTH208


def test_an_idle_connection_whose_owner_goes_is_let_go_with_the_memory(world):
    def held():
        links = (os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_open(name))  # noqa: PTH115, PTH208
        return sum("dynabench-kv" in link for link in links)

    async def main():
        async with world.agent("shm") as reader:
            alone = held()
            async with world.agent("shm") as owner:
                both = held()
                await reader.read(owner.address, [Piece(0, 0, 8)], timeout_s=PATIENCE_S)
                assert held() == both + 1
            await until_async(lambda: held() == alone)

    uvloop.run(main())


def _is_open(name):
    return os.path.lexists(f"/proc/self/fd/{name}")


def test_who_connects_and_says_nothing_is_given_up(world, monkeypatch):
    monkeypatch.setattr("serving.transfer.door.PROOF_S", 0.1)

    async def main():
        async with world.agent("shm") as owner, asyncio.timeout(PATIENCE_S):
            connection = socket.socket(socket.AF_UNIX)
            connection.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(connection, owner.address["socket"])
            while await loop.sock_recv(connection, 100):
                pass
            connection.close()

    uvloop.run(main())
