"""Discovery in a folder: whatever others put there or take away, living processes are seen."""

import asyncio
import fcntl
import json
import os
import resource
import socket
import stat
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager

import pytest
import uvloop

from serving.runtime import folder as folder_module
from serving.runtime.address import EndpointAddress
from serving.runtime.cluster_token import FolderToken
from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.folder import FolderDiscovery
from serving.runtime.ports import RuntimeUnavailableError
from serving.runtime.server import GeneratorService
from serving.runtime.world import World, within
from tests.support.power import PowerCut
from tests.support.waiting import PATIENCE_S, in_time, until_async

OTHER = 0xABC


@asynccontextmanager
async def joined(folder, id, ttl_s=1.0):
    discovery = FolderDiscovery(folder, id, lease_ttl_s=ttl_s)
    try:
        yield discovery
    finally:
        await discovery.close()


class Seen(dict):
    """What a watch has told."""

    def __call__(self, key, value):
        self.pop(key, None) if value is None else self.__setitem__(key, value)


@contextmanager
def lease(folder, keys=None, id=OTHER):
    """Hold another process's lease with these bytes as its keys."""
    handle = os.open(folder / f"{id:x}.lease", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    if keys is not None:
        (folder / f"{id:x}.json").write_bytes(keys)
    try:
        yield
    finally:
        os.close(handle)


def names(place):
    return sorted(path.name for path in place.iterdir()) if place.exists() else []


RUBBISH = {
    "no JSON": b"\xff\xfe rubbish",
    "no object": b"[1]",
    "no texts": b'{"a/b": {"c": 1}}',
    "half a character": b'{"a/b": "\\ud800"}',
    "deeply nested": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "empty": b"",
}


@pytest.mark.parametrize("keys", RUBBISH.values(), ids=RUBBISH)
def test_rubbish_in_one_file_of_keys_hides_nobody_else(tmp_path, keys):
    async def main():
        seen = Seen()
        async with joined(tmp_path / "d", 1) as one:
            with lease(tmp_path / "d", keys):
                await one.watch("", seen)
                async with joined(tmp_path / "d", 2) as two:
                    await two.put("v1/two/2", b"2")
                    await until_async(lambda: seen == {"v1/two/2": b"2"})
                await until_async(lambda: seen == {})

    uvloop.run(main())


def test_a_file_of_keys_without_end_is_ignored(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(folder_module, "MAX_KEYS_BYTES", 1000)

    async def main():
        seen = Seen()
        async with joined(tmp_path / "d", 1) as one:
            with lease(tmp_path / "d", json.dumps({"v1/x/abc": "x" * 1000}).encode()):
                await one.watch("", seen)
                assert seen == {}
        assert [record.getMessage() for record in caplog.records] == [
            f"{tmp_path / 'd' / 'abc.json'} is not a valid file of keys and is ignored: more than 1000 bytes"
        ]

    uvloop.run(main())


def plant(kind, path):
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "link":
            path.symlink_to(path.parent.parent / "elsewhere")
        case "socket":
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
        case "unreadable":
            path.touch(mode=0)


@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "socket", "unreadable"])
@pytest.mark.parametrize("suffix", ["lease", "json"])
def test_what_is_no_file_is_no_lease_and_no_keys(tmp_path, kind, suffix):
    async def main():
        seen = Seen()
        (tmp_path / "elsewhere").write_text('{"v1/planted": "x"}')
        async with joined(tmp_path / "d", 1) as one:
            with lease(tmp_path / "d", id=0xDEF):
                plant(kind, tmp_path / "d" / ("def.json" if suffix == "json" else "abc.lease"))
                await one.watch("", seen)
                async with joined(tmp_path / "d", 2) as two:
                    await two.put("v1/two/2", b"2")
                    await until_async(lambda: seen == {"v1/two/2": b"2"})
        assert (tmp_path / "elsewhere").read_text() == '{"v1/planted": "x"}'

    uvloop.run(main())


def test_a_watcher_that_fails_over_one_key_hears_of_the_next_and_so_do_others(tmp_path):
    async def main():
        heard, others = [], Seen()

        def fail(key, value):
            heard.append(key)
            raise RuntimeError("out of cheese")

        async with joined(tmp_path / "d", 1) as one, joined(tmp_path / "d", 2) as two:
            await one.watch("", fail)
            await one.watch("", others)
            await two.put("v1/a/2", b"1")
            await two.put("v1/b/2", b"2")
            await until_async(lambda: heard == ["v1/a/2", "v1/b/2"] and len(others) == 2)

    uvloop.run(main())


def test_a_process_that_claims_anothers_key_does_not_take_it_away(tmp_path):
    async def main():
        seen = Seen()
        async with joined(tmp_path / "d", 0x5) as one, joined(tmp_path / "d", 0x1) as first:
            with lease(tmp_path / "d", b'{"v1/x/5": "rubbish"}'), lease(tmp_path / "d", b'{"v1/x/5": "too"}', id=0x2):
                await one.put("v1/x/5", b"mine")
                await first.watch("", seen)
                assert seen == {"v1/x/5": b"mine"}

    uvloop.run(main())


def test_a_process_without_free_files_keeps_what_it_knew(tmp_path, caplog):
    async def main():
        seen = Seen()
        async with joined(tmp_path / "d", 1) as one, joined(tmp_path / "d", 2) as two:
            await two.put("v1/two/2", b"2")
            await one.watch("", seen)
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
            try:
                one._poll()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            assert seen == {"v1/two/2": b"2"}
            assert (
                "other processes cannot be read; what was known of them stays in use; trying again: Too many open files"
                in caplog.text
            )

    uvloop.run(main())


# Files that go


@pytest.mark.parametrize("lost", ["json", "lease", "all", "folder"])
def test_keys_that_a_cleaner_removed_are_written_again(tmp_path, lost):
    async def main():
        place, seen = tmp_path / "d", Seen()
        async with joined(place, 1) as one, joined(place, 2) as two:
            await two.put("v1/two/2", b"2")
            await one.watch("", seen)
            for path in place.iterdir():
                if lost in ("all", "folder") or path.suffix == f".{lost}":
                    path.unlink()
            if lost == "folder":
                place.rmdir()
            one._poll()
            assert seen == {} or lost == "lease"
            await until_async(
                lambda: seen == {"v1/two/2": b"2"} and {"1.lease", "2.lease", "2.json"} <= set(names(place))
            )
            async with joined(place, 3) as three:
                late = Seen()
                await three.watch("", late)
                assert late == {"v1/two/2": b"2"}
        assert names(place) == []

    uvloop.run(main())


def test_cleaners_see_that_files_are_in_use(tmp_path):
    async def main():
        async with joined(tmp_path / "d", 1) as one:
            await one.put("v1/x/1", b"1")
            paths = [tmp_path / "d" / name for name in ("1.lease", "1.json")]
            for path in paths:
                os.utime(path, (1, 1))
            await until_async(lambda: all(path.stat().st_atime > 1 for path in paths))

    uvloop.run(main())


async def double(request):
    yield request * 2


@pytest.mark.parametrize("lost", ["sock", "zmq", "all", "folder"])
def test_sockets_that_a_cleaner_removed_are_bound_again(tmp_path, lost):
    async def main():
        place, address = tmp_path / "d", EndpointAddress()
        config = RuntimeConfig(etcd_endpoints="", nats_server="", discovery_dir=str(place), lease_ttl_s=1.0)
        async with await DistributedRuntime.connect(config) as worker:
            serving = asyncio.create_task(worker.endpoint(address).serve_endpoint(double))
            await worker.events.announce("subject")
            await until_async(lambda: len(names(place)) == 4)
            old_names = names(place)
            for path in place.iterdir():
                if lost in ("all", "folder") or path.suffix == f".{lost}":
                    path.unlink()
            if lost == "folder":
                place.rmdir()
            await until_async(lambda: names(place) == old_names)
            async with await DistributedRuntime.connect(config) as caller:
                client, heard = await caller.client(address), []
                async with in_time():
                    await client.wait_for_instances()
                assert [item async for item in client.generate(21)] == [42]
                await caller.events.subscribe("subject", heard.append)
                while not heard:
                    await worker.events.publish("subject", b"news")
                    await asyncio.sleep(0.02)
            worker.stopping.set()
            await serving
        assert names(place) == []

    uvloop.run(main())


@pytest.mark.parametrize("num_turns", range(1, 13))
def test_a_process_that_is_cancelled_while_it_leaves_leaves_nothing(tmp_path, num_turns):
    async def main():
        place, address = tmp_path / "d", EndpointAddress()
        config = RuntimeConfig(etcd_endpoints="", nats_server="", discovery_dir=str(place))

        async def come_and_go():
            async with await DistributedRuntime.connect(config) as runtime:
                await runtime.serve(address, GeneratorService(double))
                await (await runtime.client(address)).wait_for_instances()
                await runtime.events.subscribe("subject", lambda _: None)
                await runtime.events.announce("subject")
                assert len(names(place)) == 4
                leaving.set()

        leaving = asyncio.Event()
        process = asyncio.create_task(come_and_go())
        async with in_time():
            await leaving.wait()
            for _ in range(num_turns):
                await asyncio.sleep(0)
            process.cancel()
            await asyncio.gather(process, return_exceptions=True)
        assert names(place) == []

    uvloop.run(main())


def test_streams_go_on_while_their_socket_is_bound_again(tmp_path):
    async def main():
        goes_on = asyncio.Event()

        async def wait(request):
            yield 1
            await goes_on.wait()
            yield 2

        place, address = tmp_path / "d", EndpointAddress()
        config = RuntimeConfig(etcd_endpoints="", nats_server="", discovery_dir=str(place), lease_ttl_s=1.0)
        async with (
            await DistributedRuntime.connect(config) as worker,
            await DistributedRuntime.connect(config) as caller,
        ):
            serving = asyncio.create_task(worker.endpoint(address).serve_endpoint(wait))
            client = await caller.client(address)
            await client.wait_for_instances()
            stream = client.generate(None)
            assert await stream.take() == [1]
            path = next(place.glob("*.sock"))
            before = path.stat().st_ino
            path.rename(path.with_suffix(".gone"))  # as good as removed, and its inode is not given to the next one
            await until_async(path.exists)
            assert path.stat().st_ino != before
            goes_on.set()
            assert [item async for item in stream] == [2]
            path.with_suffix(".gone").unlink()
            worker.stopping.set()
            await serving

    uvloop.run(main())


def test_a_socket_that_cannot_be_bound_again_holds_up_no_other_file(tmp_path, caplog):
    async def main():
        place = tmp_path / "d"
        config = RuntimeConfig(etcd_endpoints="", nats_server="", discovery_dir=str(place), lease_ttl_s=1.0)
        async with await DistributedRuntime.connect(config) as worker:
            await worker.register("v1/x", b"1")
            await worker.events.announce("subject")
            old_names = names(place)
            socket_path = next(place.glob("*.zmq"))
            socket_path.unlink()
            socket_path.mkdir()  # in the way of the new one
            for path in [*place.glob("*.json"), *place.glob("*.lease")]:
                path.unlink()
            await until_async(lambda: names(place) == old_names)
            socket_path.rmdir()
            await until_async(lambda: socket_path.exists() and not socket_path.is_dir())

    uvloop.run(main())


FULL_DISK = """
import asyncio, logging, pathlib, resource, sys
from serving.runtime.folder import FolderDiscovery

async def main():
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    place = pathlib.Path(sys.argv[1])
    discovery = FolderDiscovery(place, 1, lease_ttl_s=1.0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))  # every write fails, as on a full disk
    await discovery.put("v1/x/1", b"1")
    assert sorted(path.name for path in place.iterdir()) == ["1.lease"]
    await asyncio.sleep(0.6)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    while not (place / "1.json").exists():
        await asyncio.sleep(0.01)
    assert (place / "1.json").read_text() == '{"v1/x/1":"1"}'
    await discovery.close()

asyncio.run(main())
"""


def test_keys_that_a_full_disk_did_not_take_are_written_once_there_is_room(tmp_path):
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path / "d")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")
    what = "this process cannot register what it serves, so others do not see it yet"
    assert done.stdout.splitlines() == [
        f"{what}; trying again: File too large ({tmp_path / 'd'})",
        f"resolved: {what}",
    ]


def test_what_dead_processes_left_without_a_lease_is_removed_in_time(tmp_path):
    (tmp_path / "d").mkdir(mode=0o700)
    for name in ("abc.json", "abc.sock", "notes.txt", "xyz.json"):
        (tmp_path / "d" / name).touch()

    class Later(World):
        def wall_ns(self):
            return super().wall_ns() + 100 * 10**9

    async def main():
        async with joined(tmp_path / "d", 1):
            assert (tmp_path / "d" / "abc.json").exists()  # its process may be about to come back
        with within(Later()):
            async with joined(tmp_path / "d", 1):
                assert names(tmp_path / "d") == ["1.lease", "notes.txt", "xyz.json"]

    uvloop.run(main())


# Folders that are not ours alone


def refusal(place):
    async def main():
        with pytest.raises(RuntimeUnavailableError) as error:
            FolderDiscovery(place, 1, lease_ttl_s=1.0)
        return str(error.value)

    return uvloop.run(main())


def test_a_folder_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "target").mkdir(mode=0o700)
    (tmp_path / "d").symlink_to("target")
    assert refusal(tmp_path / "d") == (
        f"the discovery folder {tmp_path / 'd'} is a symbolic link; "
        "choose your own with --discovery-dir (mkdir -m 700 FOLDER)"
    )
    assert list((tmp_path / "target").iterdir()) == []


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o1777])
def test_a_folder_that_others_may_write_is_refused(tmp_path, mode):
    (tmp_path / "d").mkdir()
    (tmp_path / "d").chmod(mode)
    said = refusal(tmp_path / "d")
    assert f"can be written by others (mode {mode:o}; chmod 700 {tmp_path / 'd'} fixes it)" in said
    assert list((tmp_path / "d").iterdir()) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path):
    (tmp_path / "d").mkdir(mode=0o700)
    os.chown(tmp_path / "d", 65534, 65534)
    assert "belongs to user 65534; choose your own with --discovery-dir (mkdir -m 700 FOLDER)" in refusal(
        tmp_path / "d"
    )


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "d").touch()
    assert "cannot be used: File exists; choose your own" in refusal(tmp_path / "d")


def test_a_folder_that_others_may_only_read_will_do_and_its_sockets_are_ours_alone(tmp_path):
    (tmp_path / "d").mkdir(mode=0o755)

    async def main():
        config = RuntimeConfig(etcd_endpoints="", nats_server="", discovery_dir=str(tmp_path / "d"))
        before = os.umask(0)
        try:
            async with await DistributedRuntime.connect(config) as worker:
                serving = asyncio.create_task(worker.endpoint(EndpointAddress()).serve_endpoint(double))
                await worker.events.announce("subject")
                await until_async(lambda: len(names(tmp_path / "d")) == 4)
                modes = {path.suffix: stat.S_IMODE(path.stat().st_mode) & 0o077 for path in (tmp_path / "d").iterdir()}
                worker.stopping.set()
                await serving
            assert modes == dict.fromkeys([".json", ".lease", ".sock", ".zmq"], 0)
        finally:
            os.umask(before)

    uvloop.run(main())


def test_a_link_that_takes_the_folders_place_is_not_followed(tmp_path, caplog):
    async def main():
        place = tmp_path / "d"
        async with joined(place, 1) as one:
            await one.put("v1/x/1", b"1")
            (tmp_path / "theirs").mkdir(mode=0o700)
            place.rename(tmp_path / "away")
            place.symlink_to("theirs")
            await until_async(lambda: "is a symbolic link" in caplog.text)
            assert list((tmp_path / "theirs").iterdir()) == []
            place.unlink()
            await until_async(lambda: (place / "1.json").exists())

    uvloop.run(main())


def test_a_second_process_with_the_same_id_is_refused(tmp_path):
    async def main():
        async with joined(tmp_path / "d", 1) as one:
            await one.put("v1/x/1", b"1")
            with pytest.raises(
                RuntimeUnavailableError, match=r"another process in .*/d already has the id 1; start this one again"
            ):
                FolderDiscovery(tmp_path / "d", 1, lease_ttl_s=1.0)
            assert names(tmp_path / "d") == ["1.json", "1.lease"]

    uvloop.run(main())


def test_a_token_is_never_left_without_content_by_a_power_cut(tmp_path, monkeypatch):
    async def main():
        disk = PowerCut(monkeypatch)
        async with joined(tmp_path / "d", 1) as one:
            FolderToken(one)
            assert disk.has_content(tmp_path / "d" / "token")

    uvloop.run(main())


def test_a_token_that_is_removed_is_put_back_as_it_was(tmp_path, caplog):
    async def main():
        place = tmp_path / "d"
        async with joined(place, 1) as one, joined(place, 2) as two:
            token, other = FolderToken(one), FolderToken(two)
            before = token.value
            assert other.value == before
            assert stat.S_IMODE((place / "token").stat().st_mode) == 0o600
            (place / "token").unlink()
            assert other.value == token.value == before
            assert names(place) == ["1.lease", "2.lease", "token"]
            (place / "token").write_bytes(b"short")
            assert token.value == before  # not what anyone could guess
            (place / "token").unlink()
            (place / "token").mkdir()
            assert token.value == before
            assert "cannot be used; the last token read from it stays in use" in caplog.text

    uvloop.run(main())


@pytest.mark.parametrize(("content", "what"), [(b"short", "holds 5 bytes"), (b"x" * 5000, "more than 4096 bytes")])
def test_a_token_that_is_none_is_refused(tmp_path, content, what):
    async def main():
        async with joined(tmp_path / "d", 1) as one:
            (tmp_path / "d" / "token").write_bytes(content)
            with pytest.raises(RuntimeUnavailableError, match=what):
                FolderToken(one)

    uvloop.run(main())


def test_what_a_hung_process_holds_goes_to_another_and_it_does_not_get_it_back(tmp_path):
    async def main():
        async with joined(tmp_path / "d", 1, ttl_s=0.3) as one:
            with lease(tmp_path / "d"):  # nobody touches it
                (tmp_path / "d" / "claim-planner").write_text(f"7 {OTHER:x}")
                assert await one.claim("planner") is None
                async with in_time():
                    while (term := await one.claim("planner")) is None:
                        await asyncio.sleep(0.05)
                assert term > 7
                async with joined(tmp_path / "d", 2) as two:
                    assert await two.claim("planner") is None

    uvloop.run(main())
