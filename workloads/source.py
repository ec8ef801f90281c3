"""Read workload files: lines, JSON objects and CSV rows, each bounded in size and with its place for messages."""

import codecs
import contextlib
import csv
import gzip
import io
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from foundation.text import one_line
from workloads.blocks import BlockNamer, Encode, estimate_tokens
from workloads.request import WorkloadError
from workloads.row import Row, short

HEAD_BYTES = 1 << 16
BLOCK_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 28
"""Several times the longest conversation published as one line."""
MAX_DOCUMENT_BYTES = 1 << 30
"""The limit for a JSON array or an indented object, which is decoded as a whole; JSON Lines may be longer."""
MAX_PACKING = 250
"""Traces compress to a tenth of their size; a file that unpacks to far more is a bomb."""
UNCHECKED_BYTES = 1 << 24
"""A packed file may always unpack to this size, however well it compresses."""
MAX_BLANK_LINES = 1_000_000
DELIMITERS = (",", ";", "\t")
SUFFIXES = (".json", ".jsonl", ".csv", ".parquet")
PARQUET = b"PAR1"
"""The first bytes of every Parquet file."""
RESULTS = "requests.parquet"
"""The requests in a results folder; its other files are not a workload."""
FAILED = "rows without prompt or response tokens left out"
"""The note on traces that include requests which their service failed to answer."""


class Source:
    """The files of one workload, how they are read, and notes on them.

    `namer` names blocks, and `encode` converts texts to tokens; `default_osl` is the length of answers for which the
    files give none.
    """

    def __init__(
        self, files: Sequence[Path], namer: BlockNamer, encode: Encode = estimate_tokens, default_osl: int = 128
    ) -> None:
        self.files = files
        self.namer = namer
        self.encode = encode
        self.default_osl = default_osl
        self.knows_prefixes = True
        self._kept: list[str] = []
        self._counted: Counter[str] = Counter()

    @property
    def notes(self) -> list[str]:
        """The notes, each once or with its count."""
        return [*self._kept, *(f"{text}: {count:,}" for text, count in self._counted.items())]

    def keep(self, notes: Iterable[str]) -> None:
        """Add the notes of a file that no earlier file had."""
        self._kept += [note for note in notes if note not in self._kept]

    def count(self, text: str) -> None:
        """Count something that was not read literally."""
        self._counted[text] += 1

    def sizes(self, row: Row, prompt: str, answer: str, *, is_failed: bool = False) -> tuple[int, int] | None:
        """Return the tokens of a prompt and its answer; None, and counted, if the request failed: one has none."""
        length, output = row.count(prompt, least=0), row.count(answer, least=0)
        if is_failed or not length or not output:
            self.count(FAILED)
            return None
        return length, output

    def output(self, row: Row, name: str) -> int:
        """Return the tokens of an answer for which other turns wait, so that it cannot be left out."""
        output = row.count(name, least=0)
        if not output:
            self.count("calls without output, counted as 1 token")
        return output or 1

    def blocks(self, row: Row, num_tokens: int) -> tuple[int, ...]:
        """Name the blocks of a prompt by its row's hash_ids; without them, what it shares is not known."""
        if row.values.get("hash_ids") in (None, []):
            self.count("rows without hash_ids, so what prompts share is not known")
            return self.lengths_only(num_tokens)
        ids = row.block_ids(num_tokens, self.namer.block_size)
        if min(ids) < 0:
            self.count("rows with negative hash_ids, which name blocks like any other number")
        return self.namer.kept(ids)

    def lengths_only(self, num_tokens: int) -> tuple[int, ...]:
        """Name the blocks of a prompt of which only the length is known, not what it shares with others."""
        self.knows_prefixes = False
        return self.namer.unshared(num_tokens)

    def rows(self) -> Iterator[Row]:
        """Yield the rows of all files; the beginning of each shows whether it is CSV, JSON Lines, a JSON array or Parquet.

        Raises:
            WorkloadError: a file cannot be read.
        """
        for file in self.files:
            start = head(file).lstrip()
            if start.startswith(PARQUET):
                yield from _parquet_rows(file)
            else:
                yield from objects_of(file) if start[:1] in (b"{", b"[") else _csv_rows(file)

    def objects(self) -> Iterator[Row]:
        """Yield the objects of all files, each JSON Lines, a JSON array, or one JSON object.

        Raises:
            WorkloadError: a file cannot be read, or is not JSON.
        """
        for file in self.files:
            yield from objects_of(file)


class FrameSource(Source):
    """A data frame instead of files."""

    def __init__(self, frame: Any, namer: BlockNamer) -> None:
        super().__init__((), namer)
        self._frame = frame

    def rows(self) -> Iterator[Row]:
        """Yield the rows.

        Raises:
            WorkloadError: it is not a data frame.
        """
        import pyarrow as pa

        if not any(
            hasattr(self._frame, name) for name in ("columns", "__arrow_c_stream__", "__arrow_c_array__", "keys")
        ):
            raise WorkloadError(f"expected a data frame of pandas, polars or Arrow, not {short(self._frame)}")
        try:
            table = pa.table(self._frame)
        except (TypeError, ValueError, pa.ArrowException) as error:
            raise WorkloadError(
                f"the frame cannot become a table of Arrow ({one_line(': '.join(map(str, error.args)))})"
            ) from error
        if twice := next((name for name, count in Counter(table.column_names).items() if count > 1), None):
            raise WorkloadError(f"the frame has two columns {twice!r}; give one another name")
        number = 0
        for batch in table.to_batches():
            for values in batch.to_pylist():
                number += 1
                yield Row(values, f"row {number} of the frame")


def files_of(paths: Sequence[Path]) -> list[Path]:
    """Return the files of a workload: those named, and for each folder those with a known suffix, ordered by name.

    For a results folder, return its requests.

    Raises:
        WorkloadError: one is not a file, or a folder has none.
    """
    found: list[Path] = []
    for path in paths:
        if (path / RESULTS).is_file():
            found.append(path / RESULTS)
        elif path.is_dir():
            inside = sorted(child for child in path.iterdir() if is_named_like_a_trace(child))
            if not inside:
                raise WorkloadError(f"{path}: the folder has no {', '.join(SUFFIXES)} files, plain or .gz")
            found += inside
        elif path.exists() and not path.is_file():
            # The format is detected before the file is read, but a pipe can be read only once.
            raise WorkloadError(f"{path} is not a regular file; write its content to a file first")
        else:
            found.append(path)
    unpacked = [path.resolve().with_suffix("") if path.suffix == ".gz" else path.resolve() for path in found]
    if len(set(unpacked)) < len(found):
        twice = next(path for path in unpacked if unpacked.count(path) > 1)
        raise WorkloadError(f"{twice} is given twice (perhaps once compressed); name each file once")
    return found


def head(path: Path) -> bytes:
    """Return the beginning of a file, unpacked.

    Raises:
        WorkloadError: it cannot be read.
    """
    with _opened(path) as file:
        return file.read(HEAD_BYTES)


def first_object(start: bytes) -> dict[str, Any] | None:
    """Return the first object of a JSON Lines file or JSON array, from its beginning; it may be cut off."""
    text = start.lstrip()
    for candidate in (text.split(b"\n", 1)[0], text):
        try:
            value = msgspec.json.decode(candidate)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        if isinstance(value, list) and value:
            value = value[0]
        return value if isinstance(value, dict) else None
    if text[:1] == b"[":
        text = text[1:].lstrip()
    if text[:1] != b"{":
        return None
    try:
        value, _ = json.JSONDecoder().raw_decode(text.decode(errors="ignore"))
    except (ValueError, RecursionError):
        return _names_of(text)
    return value if isinstance(value, dict) else None


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the non-blank lines of a file with their numbers, unpacked.

    Raises:
        WorkloadError: it cannot be read, has a line that is too long or too many blank lines, or unpacks to too much.
    """
    with _opened(path) as file:
        most, total, number, last = _most_bytes(path), 0, 0, 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number, total = number + 1, total + len(line)
            if len(line) > MAX_LINE_BYTES:
                raise WorkloadError(f"{path}, line {number}: longer than {MAX_LINE_BYTES >> 20} MiB")
            if total > most:
                raise _bomb(path)
            if line.strip():
                last = number
                yield number, line
            elif number - last > MAX_BLANK_LINES:
                raise WorkloadError(f"{path}, line {number}: more than {MAX_BLANK_LINES:,} blank lines in a row")


def blocks(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield a file in blocks of whole lines, unpacked, each with the number of its first line.

    Raises:
        WorkloadError: it cannot be read, or unpacks to too much.
    """
    with _opened(path) as file:
        most, total, number = _most_bytes(path), 0, 1
        while block := file.read(BLOCK_BYTES):
            block += file.readline(MAX_LINE_BYTES + 1)
            total += len(block)
            if total > most:
                raise _bomb(path)
            yield number, block
            number += block.count(b"\n")


def objects_of(path: Path) -> Iterator[Row]:
    """Yield the objects of one file; if its first line is a complete object, it is JSON Lines, however long.

    Raises:
        WorkloadError: it cannot be read, or is not JSON.
    """
    is_lines = False
    for number, line in lines(path):
        if not is_lines and (line.lstrip()[:1] == b"[" or not _is_object(line)):
            break
        is_lines = True
        yield _row(decoded(line, f"{path}, line {number}"), f"{path}, line {number}")
    if is_lines:
        return
    whole = decoded(_document(path), str(path))
    for number, value in enumerate(whole if isinstance(whole, list) else [whole], 1):
        yield _row(value, f"{path}, object {number}")


def decoded(text: bytes, place: str) -> Any:
    """Decode JSON.

    Raises:
        WorkloadError: it cannot be decoded.
    """
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{place}: not JSON ({error})") from error
    except RecursionError as error:
        raise WorkloadError(f"{place}: not readable as JSON (nested too deeply)") from error


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(msgspec.json.decode(line), dict)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def _document(path: Path) -> bytes:
    with _opened(path) as file:
        most = _most_bytes(path)
        text = file.read(int(min(most, MAX_DOCUMENT_BYTES)) + 1)
    if len(text) > most:
        raise _bomb(path)
    if len(text) > MAX_DOCUMENT_BYTES:
        raise WorkloadError(
            f"{path}: a JSON document of more than {MAX_DOCUMENT_BYTES >> 20} MiB; convert it to JSON Lines, one object per line"
        )
    return text


def _csv_rows(path: Path) -> Iterator[Row]:
    number = 0

    def texts() -> Iterator[str]:
        nonlocal number
        for number, line in lines(path):  # noqa: B007 (messages name it)
            yield line.decode()

    try:
        for row in csv.DictReader(texts(), delimiter=_delimiter(head(path))):
            yield Row({(name or "").strip(): value for name, value in row.items()}, f"{path}, line {number}")
    except (UnicodeDecodeError, csv.Error) as error:
        raise WorkloadError(f"{path}, line {number}: not CSV ({error})") from error


def column_names(start: bytes) -> list[str]:
    """Return the names of a CSV file's columns, from its beginning; none if it is not CSV."""
    line = start.lstrip().split(b"\n", 1)[0].decode(errors="replace").strip()
    try:
        names = next(csv.reader([line], delimiter=_delimiter(start)), [])
    except csv.Error:  # for example the bytes of another kind of file
        return []
    return [name.strip() for name in names]


def _delimiter(start: bytes) -> str:
    """Return what separates the columns of a CSV file: what its first line has most of."""
    line = start.lstrip().split(b"\n", 1)[0].decode(errors="replace")
    return max(DELIMITERS, key=line.count)


def header(path: Path) -> bytes:
    """Return the beginning of a file, unpacked; for Parquet, the column names as the header of a CSV file.

    Raises:
        WorkloadError: it cannot be read.
    """
    start = head(path)
    return ",".join(_parquet_columns(path)).encode() if start.startswith(PARQUET) else start


def _parquet_columns(path: Path) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return list(pq.read_schema(path).names)
    except (pa.ArrowException, OSError) as error:
        raise WorkloadError(f"{path}: not readable as Parquet ({error})") from error


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for values in batch.to_pylist():
                    number += 1
                    yield Row(values, f"{path}, row {number}")
    except (pa.ArrowException, OSError) as error:
        raise WorkloadError(f"{path}: not readable as Parquet ({error})") from error


def _row(value: Any, place: str) -> Row:
    if not isinstance(value, dict):
        raise WorkloadError(f"{place}: expected an object, not {short(value)}")
    return Row(value, place)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, unpacked and after any byte order mark; errors while it is open name it."""
    try:
        with _raw(path) as file:
            if file.peek(len(codecs.BOM_UTF8)).startswith(codecs.BOM_UTF8):
                file.read(len(codecs.BOM_UTF8))
            yield file
    except (OSError, EOFError, zlib.error) as error:
        raise WorkloadError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error


def _raw(path: Path) -> io.BufferedReader:
    if path.suffix != ".gz":
        return path.open("rb")
    # GzipFile reads lines in Python, one call each.
    return io.BufferedReader(cast(io.RawIOBase, gzip.open(path, "rb")), 1 << 20)


def _most_bytes(path: Path) -> float:
    """Return how large a file may be when unpacked."""
    return max(path.stat().st_size * MAX_PACKING, UNCHECKED_BYTES) if path.suffix == ".gz" else math.inf


def _bomb(path: Path) -> WorkloadError:
    return WorkloadError(
        f"{path}: unpacks to more than {MAX_PACKING} times its size; unpack it first if that is intended"
    )


def _names_of(text: bytes) -> dict[str, Any]:
    """Return the names of an object that is cut off, each list and object as an empty list."""
    depth = 0
    names: dict[str, Any] = {}
    for match in re.finditer(rb'"((?:[^"\\]|\\.)*)"\s*(:?)\s*([\[{]?)|([\[{}\]])', text):
        if match[4]:
            depth += 1 if match[4] in b"[{" else -1
        else:
            if match[2] and depth == 1:
                names[match[1].decode(errors="replace")] = [] if match[3] else None
            depth += bool(match[3])
    return names


def is_named_like_a_trace(path: Path) -> bool:
    """Return whether a file is there whose name ends as those of workloads do."""
    name = path.name.removesuffix(".gz")
    return path.is_file() and not name.startswith(".") and name.endswith(SUFFIXES)
