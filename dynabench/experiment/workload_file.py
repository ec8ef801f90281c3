"""Read workload files; write them whole or not at all."""

import gzip
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, cast

from workloads import Workload, WorkloadError, formats, mooncake
from workloads.blocks import Encode

BUNDLED = Path(mooncake.__file__).parent / "bundled" / "chat.jsonl"


def read_workload(
    files: Sequence[Path], *, format: str | None = None, block_size: int | None = None, tokenizer: str | None = None
) -> Workload:
    """Read a workload (none: the bundled one).

    Args:
        files: files and folders that are one workload.
        format: its name (none: detected).
        block_size: tokens each id stands for (none: the format's).
        tokenizer: folder, file or Hugging Face id of a model whose tokenizer counts the tokens of texts.

    Raises:
        WorkloadError: it cannot be read, or holds no request.
    """
    workload = formats.read(files or BUNDLED, format=format, block_size=block_size, encode=_encoder(tokenizer))
    if not len(workload):
        raise WorkloadError(f"{' '.join(map(str, files))}: holds no request")
    return workload


def write_workload(workload: Workload, out: Path, format: str = formats.DEFAULT) -> None:
    """Write a workload to a new file, compressed if its name ends in .gz.

    Raises:
        WorkloadError: the file exists or cannot be written.
    """

    def fill(file: IO[bytes]) -> None:
        formats.write(workload, format, file)

    write_whole(out, fill)


def write_whole(out: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Write a new file under a temporary name beside it, compressed if its name ends in .gz, and rename it.

    Raises:
        WorkloadError: the file exists or cannot be written.
    """
    if out.exists():
        raise WorkloadError(f"{out} exists; name another file, or remove it")
    work = None
    try:
        handle, name = tempfile.mkstemp(prefix=f".{out.name}.", dir=out.absolute().parent)
        work = Path(name)
        with os.fdopen(handle, "wb") as raw:
            if out.suffix == ".gz":
                with gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed:
                    fill(cast(IO[bytes], packed))
            else:
                fill(raw)
        work.chmod(0o644)
        work.rename(out)
    except OSError as error:
        raise WorkloadError(f"{out}: cannot be written ({error.strerror})") from error
    finally:
        if work is not None:
            work.unlink(missing_ok=True)


def _encoder(tokenizer: str | None) -> Encode | None:
    if tokenizer is None:
        return None
    from serving.model.card import ModelError, ModelFiles
    from serving.model.tokenizer import load

    try:
        model = load(ModelFiles.read(tokenizer), encodes=True)
    except ModelError as error:
        raise WorkloadError(f"the tokenizer cannot be had: {error}") from error
    return lambda text: model.encode(text, special=False).tolist()
