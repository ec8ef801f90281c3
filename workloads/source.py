"""Read workload files: lines, JSON objects and CSV rows, each with its place for messages."""

import csv
import gzip
import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from workloads.request import WorkloadError

HEAD_BYTES = 1 << 16


class Row:
    """An object of a file and where it stands; every look at it checks what is there."""

    __slots__ = ("place", "values")

    def __init__(self, values: dict[str, Any], place: str) -> None:
        self.values = values
        self.place = place

    def fail(self, problem: str) -> WorkloadError:
        """Make an error that names the place."""
        return WorkloadError(f"{self.place}: {problem}")

    def number(self, *names: str, least: float | None = None, default: float | None = None) -> float:
        """Return the number under the first of some names that is there."""
        for name in names:
            value = self.values.get(name)
            if value is None or value == "":
                continue
            try:
                number = float(value)
            except (TypeError, ValueError):
                raise self.fail(f"{name} must be a number, not {value!r}") from None
            if number != number or (least is not None and number < least):
                raise self.fail(f"{name} must be at least {least:g}, not {value}")
            return number
        if default is None:
            raise self.fail(f"{' or '.join(names)} is missing")
        return default

    def count(self, *names: str, least: int = 1, default: int | None = None) -> int:
        """Return a whole number."""
        number = self.number(*names, least=least, default=default)
        if number != int(number):
            raise self.fail(f"{names[0]} must be a whole number, not {number:g}")
        return int(number)

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string; numbers are taken as their digits."""
        value = self.values.get(name, default)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str):
            raise self.fail(f"{name} must be text, not {value!r}" if name in self.values else f"{name} is missing")
        return value

    def items(self, name: str) -> list["Row"]:
        """Return a list of objects."""
        value = self.values.get(name)
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.fail(f"{name} must be a list of objects")
        return [Row(item, f"{self.place}, {name}[{place}]") for place, item in enumerate(value)]

    def ids(self, name: str) -> tuple[int, ...]:
        """Return a list of whole numbers."""
        value = self.values.get(name)
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self.fail(f"{name} must be a list of whole numbers")
        return tuple(value)


def head(path: Path) -> bytes:
    """Return the beginning of a file, unpacked; of the first file of a folder.

    Raises:
        WorkloadError: it cannot be read.
    """
    try:
        with _open(files_of(path)[0]) as file:
            return file.read(HEAD_BYTES)
    except (OSError, EOFError) as error:
        raise unreadable(path, error) from error


def files_of(path: Path) -> list[Path]:
    """Return the file, or the JSON files of a folder in order of name.

    Raises:
        WorkloadError: the folder has none.
    """
    if not path.is_dir():
        return [path]
    found = sorted(child for child in path.iterdir() if child.suffix in (".json", ".jsonl", ".gz"))
    if not found:
        raise WorkloadError(f"{path}: the folder holds no .json or .jsonl files")
    return found


def objects(path: Path) -> Iterator[Row]:
    """Yield the objects of a JSON Lines file, a JSON array or object, or a folder of such files.

    Raises:
        WorkloadError: it cannot be read, or is not JSON.
    """
    for file in files_of(path):
        yield from _objects(file)


def csv_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a CSV file with a header.

    Raises:
        WorkloadError: it cannot be read.
    """
    try:
        with io.TextIOWrapper(_open(path), encoding="utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines)
            for row in reader:
                yield Row(
                    {(name or "").strip(): value for name, value in row.items()}, f"{path}, line {reader.line_num}"
                )
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> WorkloadError:
    """Make the error for a file that cannot be read."""
    return WorkloadError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})")


def is_json_lines(start: bytes) -> bool:
    """Tell whether a file's first line is an object by itself."""
    line = start.lstrip().split(b"\n", 1)[0].strip()
    try:
        return isinstance(msgspec.json.decode(line), dict)
    except msgspec.DecodeError:
        return False


def _objects(path: Path) -> Iterator[Row]:
    number = 0
    try:
        with _open(path) as file:
            start = file.read(HEAD_BYTES)
            file.seek(0)
            if not is_json_lines(start) and start.lstrip()[:1] in (b"[", b"{"):
                whole = msgspec.json.decode(file.read())
                for number, value in enumerate(whole if isinstance(whole, list) else [whole], 1):
                    yield _row(value, f"{path}, object {number}")
                return
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _row(msgspec.json.decode(line), f"{path}, line {number}")
    except msgspec.DecodeError as error:
        raise WorkloadError(f"{path}, line {number}: not JSON ({error})") from error
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from error


def _row(value: Any, place: str) -> Row:
    if not isinstance(value, dict):
        raise WorkloadError(f"{place}: expected an object, not {str(value)[:40]!r}")
    return Row(value, place)


def _open(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")
