import gzip

import pytest

from foundation.files import new_file, replace_text


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
