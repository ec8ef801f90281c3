"""Files that are written whole or not at all: under a temporary name in the same folder, then renamed."""

import contextlib
import errno
import gzip
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast


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


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[IO[bytes]]:
    work = None
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.absolute().parent)
        work = Path(name)
        with os.fdopen(handle, "wb") as file:
            yield file
        work.chmod(0o644)
        work.replace(path)
    except OSError as error:
        if error.filename is not None and work is not None:
            raise  # about another file
        raise OSError(error.errno, f"cannot be written ({error.strerror})", str(path)) from error
    finally:
        if work is not None:
            work.unlink(missing_ok=True)
