"""Files and folders that are written whole or not at all: under a temporary name in the same folder, then renamed.

A name may reach the disk before the content. So what a power cut must not leave empty or half-written is synced first
(`put_in_place`): results, and what later runs rely on. A cache whose readers verify it is not, and neither is what
processes of this host tell each other, because none of them survives the power cut.
"""

import contextlib
import errno
import gzip
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, cast

SYNCS = 16
"""Most files that are synced at once: a disk does several about as quickly as one."""

CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)
"""Errors where a file system does not sync folders, or a user may change a folder and not read it."""


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that gets its name only if the block ends without an error; it is compressed if its name ends in .gz.

    Raises:
        FileExistsError: a file of that name exists.
        OSError: it cannot be written.
    """
    if path.exists():
        raise FileExistsError(errno.EEXIST, "exists; choose another file or remove it", str(path))
    with _whole(path) as raw:
        if path.suffix == ".gz":
            with gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed:
                yield cast(IO[bytes], packed)
        else:
            yield raw


def replace_text(path: Path, text: str) -> None:
    """Replace a file as a whole, or leave it unchanged; what cannot be encoded becomes a question mark.

    Raises:
        OSError: it cannot be written; `filename` and `strerror` say which and why.
    """
    with _whole(path) as file:
        file.write(text.encode(errors="replace"))


def put_in_place(work: Path, path: Path) -> None:
    """Give a finished file or folder its name; after a power cut, what is there is either this as a whole, or what was before.

    Raises:
        OSError: it cannot be synced to the disk or renamed.
    """
    _sync(work)
    work.replace(path)
    _sync_names(path.parent)


def secure(path: Path) -> None:
    """Have a file, or a folder with everything in it, survive a power cut from now on.

    Raises:
        OSError: it cannot be synced to the disk.
    """
    _sync(path)
    _sync_names(path.parent)


def _sync(path: Path) -> None:
    found = [path, *path.rglob("*")] if path.is_dir() else [path]
    folders = [each for each in found if each.is_dir() and not each.is_symlink()]
    files = [each for each in found if each.is_file() and not each.is_symlink()]
    if len(files) == 1:
        _sync_content(files[0])
    else:
        with ThreadPoolExecutor(SYNCS) as threads:
            list(threads.map(_sync_content, files))
    for folder in folders:
        _sync_names(folder)


def _sync_content(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file)


def _sync_names(folder: Path) -> None:
    """Sync which files a folder has, where that is possible."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in CANNOT_SYNC:
            raise


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[IO[bytes]]:
    work = None
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.absolute().parent)
        work = Path(name)
        with os.fdopen(handle, "wb") as file:
            yield file
        work.chmod(0o644)
        put_in_place(work, path)
    except OSError as error:
        if error.filename is not None and work is not None:
            raise  # about another file
        raise OSError(error.errno, f"cannot be written ({error.strerror})", str(path)) from error
    finally:
        if work is not None:
            work.unlink(missing_ok=True)
