import errno
import gzip
import os

import pytest

from foundation.files import new_file, put_in_place, replace_text, secure
from tests.support.power import PowerCut


def test_a_new_file_appears_only_when_it_is_whole(tmp_path):
    path = tmp_path / "out.txt"
    with new_file(path) as file:
        file.write(b"one")
        assert not path.exists()
    assert path.read_bytes() == b"one"
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_name_that_ends_in_gz_is_compressed_and_equal_contents_give_equal_bytes(tmp_path):
    for name in ("a.gz", "b.gz"):
        with new_file(tmp_path / name) as file:
            file.write(b"one")
    assert gzip.decompress((tmp_path / "a.gz").read_bytes()) == b"one"
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


def test_an_error_leaves_neither_the_file_nor_a_temporary_one(tmp_path):
    with pytest.raises(KeyError), new_file(tmp_path / "out.txt") as file:
        file.write(b"half")
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_not_written_over(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("old")
    with pytest.raises(FileExistsError, match=r"exists; choose another file or remove it: .*out.txt"), new_file(path):
        pass
    assert path.read_text() == "old"


def test_text_is_replaced_as_a_whole_also_where_no_encoding_holds_it(tmp_path):
    path = tmp_path / "out.txt"
    replace_text(path, "old")
    replace_text(path, "new \udcff")
    assert path.read_text() == "new ?"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_named_with_the_reason(tmp_path):
    path = tmp_path / "gone" / "out.txt"
    with pytest.raises(OSError, match="cannot be written") as caught, new_file(path):
        pass
    assert (caught.value.filename, caught.value.strerror) == (
        str(path),
        "cannot be written (No such file or directory)",
    )


@pytest.mark.parametrize(
    "write",
    [
        lambda path: replace_text(path, "new"),
        lambda path: put_in_place(written(path.with_name("work"), "new"), path),
    ],
    ids=["replace_text", "put_in_place"],
)
def test_after_a_power_cut_there_is_the_old_file_or_the_new_one(tmp_path, monkeypatch, write):
    path = written(tmp_path / "out.txt", "old")
    secure(path)
    disk = PowerCut(monkeypatch)
    write(path)
    assert disk.unsynced_when_renamed == []
    assert disk.is_kept(path)


def test_a_new_file_and_its_name_survive_a_power_cut(tmp_path, monkeypatch):
    disk = PowerCut(monkeypatch)
    with new_file(tmp_path / "out.gz") as file:
        file.write(b"one")
    assert disk.unsynced_when_renamed == []
    assert disk.is_kept(tmp_path / "out.gz")


def test_a_folder_gets_its_name_once_everything_in_it_survives_a_power_cut(tmp_path, monkeypatch):
    (tmp_path / "work" / "deep").mkdir(parents=True)
    for name in ("one", "deep/two"):
        written(tmp_path / "work" / name, name)
    (tmp_path / "work" / "away").symlink_to(tmp_path / "nowhere")
    disk = PowerCut(monkeypatch)
    put_in_place(tmp_path / "work", tmp_path / "out")
    assert disk.unsynced_when_renamed == []
    assert all(disk.is_kept(tmp_path / "out" / name) for name in ("one", "deep/two"))


def test_a_disk_that_fails_to_keep_a_file_leaves_the_old_one(tmp_path, monkeypatch):
    def failing(handle):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path = written(tmp_path / "out.txt", "old")
    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match=r"cannot be written \(Input/output error\)") as caught:
        replace_text(path, "new")
    assert caught.value.filename == str(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_replaced_where_folders_cannot_be_synced(tmp_path, monkeypatch):
    sync = os.fsync

    def only_files(handle):
        if os.path.isdir(f"/proc/self/fd/{handle}"):  # noqa: PTH112
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        sync(handle)

    monkeypatch.setattr(os, "fsync", only_files)
    replace_text(tmp_path / "out.txt", "new")
    assert (tmp_path / "out.txt").read_text() == "new"


def written(path, text):
    path.write_text(text)
    return path
