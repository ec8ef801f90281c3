"""Files: found again after a restart, and whatever is wrong in the folder is a miss."""

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import re
import resource
import shutil
import subprocess
import sys
import threading

import pytest
import uvloop

from serving.kv_tiers import files as files_module
from serving.kv_tiers.blocks import KvLayout
from serving.kv_tiers.chunk_folder import FILE_HEADER, MAGIC, REMEDY, ChunkFolder
from serving.kv_tiers.files import FileTier
from serving.kv_tiers.tier import VERSION, ChunkFormat, FolderTakenError, TierError
from tests.kv_tiers.world import FORMAT, chunk, read, room, write
from tests.support.waiting import until_async


@pytest.fixture
def kv(world):
    return world.folder / "kv"


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, "serving.kv_tiers")
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def path_of(kv, key):
    text = f"{key:016x}"
    return kv / text[:2] / f"{text[2:]}.kv"


async def fill(world, keys=(1, 2, 3), num_chunks=8):
    async with world.tier("files", num_chunks) as tier:
        assert await write(tier, keys) == len(keys)


def after(world, spoil, *, num_chunks=8):
    """Fill a folder, spoil it, and return what a restarted worker reads of chunks 1 to 3, and its counts."""

    async def main():
        await fill(world)
        spoil()
        async with world.tier("files", num_chunks) as tier:
            return await read(tier, [1, 2, 3]), tier.counts

    return uvloop.run(main())


def test_a_restarted_worker_finds_its_chunks(world):
    num_read, counts = after(world, lambda: None)
    assert (num_read, counts.num_chunks, counts.num_faults) == (3, 3, 0)


def test_what_was_used_last_before_a_restart_is_evicted_last_after_it(world, kv):
    async def main():
        await fill(world, [1, 2, 3], num_chunks=3)
        for age, key in ((30, 2), (20, 1), (10, 3)):
            facts = path_of(kv, key).stat()
            os.utime(path_of(kv, key), (facts.st_atime - age, facts.st_mtime - age))
        async with world.tier("files", 3) as tier:
            assert await read(tier, [2]) == 1
        async with world.tier("files", 3) as tier:
            assert await write(tier, [4]) == 1
            assert [await tier.look_up([key]) for key in (1, 2, 3, 4)] == [0, 1, 1, 1]

    uvloop.run(main())


def test_a_smaller_folder_keeps_what_was_used_last(world, kv):
    async def main():
        await fill(world)
        for age, key in enumerate((3, 1, 2)):
            os.utime(path_of(kv, key), (1000 - age, 1000 - age))
        async with world.tier("files", 1) as tier:
            assert await tier.look_up([3]) == 1
            assert len(list(kv.rglob("*.kv"))) == 1

    uvloop.run(main())


def test_a_killed_worker_leaves_its_chunks_and_its_folder_free(world, kv):
    program = (
        "import asyncio, sys; from tests.kv_tiers.world import *; from serving.kv_tiers.files import *\n"
        "async def main():\n"
        "    tier = FileTier(Path(sys.argv[1]), FORMAT, 100); await tier.start(); await write(tier, [1, 2, 3])\n"
        "    print('written', flush=True); await asyncio.sleep(1000)\n"
        "asyncio.run(main())"
    )
    with subprocess.Popen([sys.executable, "-c", program, kv], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "written\n"
        process.kill()
    num_read, counts = after(world, lambda: None)
    assert (num_read, counts.num_chunks) == (3, 3)


def test_two_workers_cannot_have_one_folder(world, kv):
    async def main():
        async with world.tier("files", 8) as tier:
            with pytest.raises(
                TierError, match="another worker keeps its KV in this folder; use one folder for each worker"
            ):
                await FileTier(kv, FORMAT, 100).start()
            assert await write(tier, [1]) == 1
        async with world.tier("files", 8) as tier:
            assert await read(tier, [1]) == 1

    uvloop.run(main())


SPOILT = {
    "torn": lambda path: os.truncate(path, 5000),
    "empty": lambda path: os.truncate(path, 0),
    "too long": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "another version": lambda path: change(path, FILE_HEADER.pack(MAGIC, VERSION + 1, FORMAT.identity, 2, FORMAT.chunk_bytes)),
    "another model": lambda path: change(path, FILE_HEADER.pack(MAGIC, VERSION, 77, 2, FORMAT.chunk_bytes)),
    "another key": lambda path: change(path, FILE_HEADER.pack(MAGIC, VERSION, FORMAT.identity, 3, FORMAT.chunk_bytes)),
}  # fmt: skip


def change(path, data, at=0):
    content = path.read_bytes()
    path.write_bytes(content[:at] + data + content[at + len(data) :])


@pytest.mark.parametrize("how", SPOILT)
def test_a_spoilt_file_is_a_miss_and_is_removed_at_the_start(world, kv, how):
    num_read, counts = after(world, lambda: SPOILT[how](path_of(kv, 2)))
    assert (num_read, counts.num_chunks, counts.num_faults) == (1, 2, 0)
    assert not path_of(kv, 2).exists()


@pytest.mark.parametrize("how", SPOILT)
def test_a_file_that_is_spoilt_while_the_worker_runs_is_a_miss_and_is_said_once(world, kv, said, how):
    async def main():
        async with world.tier("files", 8) as tier:
            await write(tier, [1, 2, 3])
            SPOILT[how](path_of(kv, 2))
            assert await read(tier, [1, 2, 3]) == 1
            assert not path_of(kv, 2).exists()
            assert tier.counts.num_faults == 1
            assert await write(tier, [1, 2, 3]) == await read(tier, [1, 2, 3]) == 3

    uvloop.run(main())
    assert len(said()) == 1
    assert "counts as absent: chunk 0000000000000002: it" in said()[0]


def test_a_bit_that_changed_on_the_disk_is_found_when_it_is_read(world, kv):
    num_read, counts = after(world, lambda: change(path_of(kv, 2), b"?", at=6000))
    assert (num_read, counts.num_faults, counts.num_chunks) == (1, 1, 2)


def test_a_file_that_somebody_removed_is_a_plain_miss(world, kv, said):
    async def main():
        async with world.tier("files", 8) as tier:
            await write(tier, [1, 2, 3])
            path_of(kv, 2).unlink()
            assert await read(tier, [1, 2, 3]) == 1
            assert await tier.look_up([1, 2]) == 1
            assert tier.counts.num_faults == 0
            assert await write(tier, [2]) == 1
            assert await read(tier, [1, 2, 3]) == 3

    uvloop.run(main())
    assert said() == []


def test_all_files_of_a_read_that_somebody_removed_are_missed_at_once(world, kv, said):
    async def main():
        async with world.tier("files", 8) as tier:
            await write(tier, [1, 2, 3, 4, 5])
            for key in (2, 4):
                path_of(kv, key).unlink()
            assert await read(tier, [1, 2, 3, 4, 5]) == 1
            assert [await tier.look_up([key]) for key in (1, 2, 3, 4, 5)] == [1, 0, 1, 0, 1]
            assert tier.counts.num_faults == 0

    uvloop.run(main())
    assert said() == []


def test_a_disk_that_fails_ends_a_read_and_only_the_chunk_that_failed_is_dropped(world, monkeypatch):
    class Failing(ChunkFolder):
        def read(self, key, memory):
            if key >= 2:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().read(key, memory)

    monkeypatch.setattr(files_module, "ChunkFolder", Failing)

    async def main():
        async with world.tier("files", 8) as tier:
            await write(tier, [1, 2, 3])
            assert await read(tier, [1, 2, 3]) == 1
            assert [await tier.look_up([key]) for key in (1, 2, 3)] == [1, 0, 1]

    uvloop.run(main())


VANISHED = {
    "removed": shutil.rmtree,
    "removed with its parents": lambda kv: shutil.rmtree(kv.parent),
    "moved away": lambda kv: kv.rename(kv.parent / "away"),
    "emptied": lambda kv: (shutil.rmtree(kv / "00"), (kv / "lock").unlink()),
    "replaced": lambda kv: (shutil.rmtree(kv), kv.mkdir(mode=0o700)),
}


@pytest.mark.parametrize("how", VANISHED)
@pytest.mark.parametrize("reads_first", [True, False])
def test_a_folder_that_vanished_is_made_again_at_the_next_write(world, said, caplog, how, reads_first):
    kv = world.folder / "base" / "kv"

    async def main():
        tier = FileTier(kv, FORMAT, 8)
        await tier.start()
        assert await write(tier, range(1, 7)) == 6
        tier.changes.take()
        VANISHED[how](kv)
        if reads_first and how != "moved away":  # its files can still be read
            assert await read(tier, [1, 2, 3]) == 0
            assert await tier.look_up([6]) == 0
            assert tier.counts.num_chunks == 0
        assert await write(tier, [2, 3, 7]) == await read(tier, [2, 3, 7]) == 3
        assert sorted(int(path.parent.name + path.stem, 16) for path in kv.rglob("*.kv")) == [2, 3, 7]
        assert tier.counts.num_chunks == 3
        came, left = tier.changes.take()
        assert (sorted(came), sorted(left)) == ([2, 3, 7], [1, 4, 5, 6])
        with pytest.raises(FolderTakenError):
            await FileTier(kv, FORMAT, 8).start()
        await tier.close()
        again = FileTier(kv, FORMAT, 8)
        await again.start()
        assert await read(again, [2, 3, 7]) == 3
        await again.close()

    uvloop.run(main())
    assert said() == [
        f"{kv}: the folder for KV is gone, and its chunks count as absent: somebody removed or replaced it"
    ]
    assert f"{kv}: the folder for KV has been made again" in caplog.text


def test_a_folder_that_vanished_and_cannot_be_made_again_is_said_once_and_tried_at_every_write(world, kv, said):
    async def main():
        async with world.tier("files", 8) as tier:
            await write(tier, [1])
            shutil.rmtree(kv)
            kv.write_text("in the way")
            assert await write(tier, [1, 2]) == await write(tier, [2]) == await read(tier, [1]) == 0
            assert tier.counts.num_chunks == 0
            kv.unlink()
            assert await write(tier, [1, 2]) == await read(tier, [1, 2]) == 2

    uvloop.run(main())
    assert len(said()) == 2
    assert said()[1] == f"{kv}: KV cannot be written: {kv}: the folder for KV cannot be used: File exists; {REMEDY}"


def test_another_worker_that_took_the_place_of_a_folder_keeps_it(world, kv, said):
    async def main():
        async with world.tier("files", 8) as tier:
            await write(tier, [1])
            shutil.rmtree(kv)
            other = FileTier(kv, FORMAT, 8)
            await other.start()
            assert await write(other, [5]) == 1
            assert await write(tier, [1, 2]) == 0
            assert await read(other, [5]) == 1
            assert [path.name for path in kv.rglob("*.kv")] == ["00000000000005.kv"]
            await other.close()
            assert await write(tier, [1]) == 1
            assert await read(tier, [5, 1]) == 2

    uvloop.run(main())


def test_many_calls_at_once_make_a_folder_again_once_and_lose_no_file(world, kv):
    async def main():
        async with world.tier("files", 100) as tier:
            await write(tier, range(50))
            for _ in range(5):
                shutil.rmtree(kv)
                await asyncio.gather(
                    *(write(tier, [key]) for key in range(60)), *(read(tier, [key, key + 1]) for key in range(50))
                )
                await write(tier, range(60))
                there = {key for key in range(60) if await read(tier, [key])}
                assert there == set(range(60))
                assert {int(path.parent.name + path.stem, 16) for path in kv.rglob("*.kv")} == there
                before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
            assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208

    uvloop.run(main())


@pytest.mark.parametrize("what", ["link", "pipe", "folder"])
def test_what_is_no_plain_file_is_neither_followed_nor_waited_for(world, kv, what):
    secret = world.folder / "secret"
    secret.write_bytes(FILE_HEADER.pack(MAGIC, VERSION, FORMAT.identity, 2, FORMAT.chunk_bytes) + chunk(2))
    make = {"link": lambda path: path.symlink_to(secret), "pipe": os.mkfifo, "folder": os.mkdir}[what]

    def spoil():
        path_of(kv, 2).unlink()
        make(path_of(kv, 2))

    num_read, counts = after(world, spoil)
    assert (num_read, counts.num_chunks) == (1, 2)
    assert secret.exists()


def test_a_link_in_the_place_of_a_subfolder_is_not_followed(world, kv):
    elsewhere = world.folder / "elsewhere"

    def spoil():
        (kv / "00").rename(elsewhere)
        (kv / "00").symlink_to(elsewhere)

    num_read, _ = after(world, spoil)
    assert num_read == 0
    assert len(list(elsewhere.iterdir())) == 3

    async def main():
        async with world.tier("files", 8) as tier:
            assert await write(tier, [1]) == 0
            assert tier.counts.num_faults == 1

    uvloop.run(main())
    assert len(list(elsewhere.iterdir())) == 3


def test_files_of_others_stay_and_unfinished_ones_of_ours_go(world, kv):
    others = [kv / "README", kv / "00" / "notes.kv", kv / "5e" / "0123456789abc.kv", kv / "00" / "0123456789ABCD.kv"]

    def spoil():
        (kv / "5e").mkdir()
        for path in others:
            path.write_text("mine")
        (kv / "00" / "00000000000002.new").write_bytes(b"half")

    num_read, counts = after(world, spoil)
    assert (num_read, counts.num_chunks) == (3, 3)
    assert all(path.read_text() == "mine" for path in others)
    assert list(kv.rglob("*.new")) == []


def test_nobody_else_may_read_what_is_kept(world, kv):
    before = os.umask(0)
    try:
        uvloop.run(fill(world))
    finally:
        os.umask(before)
    modes = {oct(path.stat().st_mode & 0o777) for path in [kv, *kv.rglob("*")] if path.is_dir()}
    assert modes == {"0o700"}
    assert {oct(path.stat().st_mode & 0o777) for path in kv.rglob("*") if path.is_file()} == {"0o600"}


def open_to_others(kv):
    kv.mkdir()
    kv.chmod(0o777)


def link(kv):
    (kv.parent / "other").mkdir()
    kv.symlink_to(kv.parent / "other")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (open_to_others, "other users can write to the folder for KV .to fix: chmod 700 .*kv"),
        (link, "cannot be used: it is a symbolic link; choose one of your own with --kv-disk-folder"),
        (lambda kv: kv.write_text(""), "cannot be used: File exists; choose one of your own with --kv-disk-folder"),
        (lambda kv: (kv.mkdir(), (kv / "lock").symlink_to(kv.parent / "x")), "cannot be used: Too many levels"),
        pytest.param(
            lambda kv: (kv.mkdir(mode=0o700), os.chown(kv, 65534, 65534)),
            "kv: the folder for KV belongs to user 65534; choose one of your own with --kv-disk-folder",
            marks=pytest.mark.skipif(os.getuid() != 0, reason="only root can give it away"),
        ),
    ],
    ids=["open to others", "link", "file", "lock is a link", "another user's"],
)
def test_a_folder_that_cannot_be_used_is_refused_in_one_line(kv, make, why):
    make(kv)
    with pytest.raises(TierError, match=why) as caught:
        uvloop.run(FileTier(kv, FORMAT, 100).start())
    assert "\n" not in str(caught.value)
    assert not (kv.parent / "x").exists()


@contextlib.contextmanager
def full_disk(num_bytes):
    """Let files grow to so many bytes at most; a write beyond fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("most", [0, 20, 5000])
def test_on_a_full_disk_nothing_is_written_and_it_is_said_once_and_when_it_is_over(world, kv, said, caplog, most):
    async def main():
        async with world.tier("files", 8) as tier:
            await write(tier, [1])
            with full_disk(most):
                assert await write(tier, [1, 2, 3]) == 1
                assert await write(tier, [1, 2, 3]) == 1
                assert await read(tier, [1, 2, 3]) == 1
            assert (tier.counts.num_refused, tier.counts.num_faults) == (4, 2)
            assert sorted(path.name for path in kv.rglob("*.*")) == ["00000000000001.kv"]
            assert len(said()) == 1
            assert re.search(r"kv: KV cannot be written: chunk 0+2: (File too large|No space left)", said()[0])
            assert await write(tier, [1, 2, 3]) == await read(tier, [1, 2, 3]) == 3

    uvloop.run(main())
    assert [record.getMessage() for record in caplog.records if "again" in record.getMessage()] == [
        f"{kv}: KV can be written again"
    ]


def test_a_disk_that_is_full_costs_what_gave_way_and_no_more(world):
    async def main():
        async with world.tier("files", 4) as tier:
            await write(tier, [1, 2, 3, 4])
            with full_disk(100):
                assert await write(tier, [5]) == 0
            assert await read(tier, [1, 2, 3]) == 3
            assert tier.counts.num_chunks == 3

    uvloop.run(main())


def test_there_are_never_more_files_than_there_is_room_for(world, kv, monkeypatch):
    seen = []

    class Watched(ChunkFolder):
        def write(self, key, chunk):
            super().write(key, chunk)
            seen.append(len(list(kv.rglob("*.*"))))

    monkeypatch.setattr(files_module, "ChunkFolder", Watched)

    async def main():
        async with world.tier("files", 5) as tier:
            await asyncio.gather(*(write(tier, range(start, start + 3)) for start in range(0, 60, 2)))

    uvloop.run(main())
    assert 0 < max(seen) <= 5


def test_a_disk_that_does_not_answer_is_a_miss_and_holds_up_neither_the_loop_nor_the_end(world, monkeypatch, said):
    answers = threading.Event()
    monkeypatch.setattr(files_module, "CLOSE_S", 0.1)

    class Hung(ChunkFolder):
        def read(self, key, memory):
            answers.wait()
            return super().read(key, memory)

    monkeypatch.setattr(files_module, "ChunkFolder", Hung)

    async def main():
        async with world.tier("files", 8, timeout_s=1.0) as tier:
            await write(tier, [1, 2])
            into = room(2)
            assert await asyncio.gather(*(tier.read([1, 2], into) for _ in range(20))) == [0] * 20
            assert await write(tier, [3]) == 0  # all threads hang
            assert tier.counts.num_faults == 21
            answers.set()
            await until_async(lambda: not tier._calls)
            assert not any(any(memory) for memory in into)
            assert await read(tier, [1, 2]) == 2

    uvloop.run(main())
    assert [line.partition("KV cannot be")[2] for line in said()] == [
        " read and counts as absent: no answer within 1 s",
        " written: no answer within 1 s",
    ]


def test_calls_beyond_a_bound_find_nothing_at_once(world, monkeypatch):
    monkeypatch.setattr(files_module, "MAX_CALLS", 3)

    async def main():
        async with world.tier("files", 8) as tier:
            await write(tier, [1])
            found = await asyncio.gather(*(read(tier, [1]) for _ in range(10)))
            assert sorted(found) == [0] * 7 + [1] * 3

    uvloop.run(main())


def test_a_read_that_overtakes_an_eviction_and_a_new_write_spoils_nothing(world, kv):
    async def main():
        async with world.tier("files", 2) as tier:
            await write(tier, [1])
            for key in range(2, 30):
                await asyncio.gather(read(tier, [1]), write(tier, [key, key + 100]), write(tier, [1]), read(tier, [1]))
            there = {key for key in range(140) if await tier.look_up([key])}
            assert {int(path.parent.name + path.stem, 16) for path in kv.rglob("*.kv")} == there
            assert tier.counts.num_faults == 0

    uvloop.run(main())


def test_a_chunk_without_content_is_kept_too(world):
    nothing = ChunkFormat.of(KvLayout(0), "no bytes")

    async def main():
        async with world.tier("files", 2, nothing) as tier:
            assert await write(tier, [1], nothing) == await read(tier, [1], nothing) == 1

    uvloop.run(main())


def test_the_lock_is_given_back_with_the_folder(world, kv):
    async def main():
        await fill(world)
        with (kv / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    uvloop.run(main())
