"""Recordings of the scheduler of a real engine: files of JSON lines, of which the first says what was recorded.

There are two formats. *Compact*: the scenario on line 1, then a line per step. *Full*: a trace of the scheduler's calls, with
the prompts in a scenario file. The lines themselves are those of a family (`vllm/recordings.py`).
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from foundation.errors import UserError
from foundation.text import one_line

Json = dict[str, Any]

Step = Annotated[int, Meta(ge=0)]
Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
NumTokens = Annotated[int, Meta(ge=0, le=1 << 24)]
"""Types of what recordings have; more tokens are in no sequence."""
MAX_BYTES = 1 << 28
"""Size limit of a recording, unpacked."""
MALFORMED = (
    OSError,
    EOFError,
    zlib.error,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    RecursionError,
    OverflowError,
    MemoryError,
)
"""The exceptions that reading or replaying an invalid recording may raise."""


class RecordingError(UserError):
    """A file that is not a recording, or one with a scheduler that the mocker does not model."""


@dataclass
class Verdict:
    """The outcome of a replay: `difference` is None if every step agreed."""

    path: Path
    engine: str
    version: str
    num_steps: int
    num_events: int
    difference: Json | None
    not_compared: tuple[str, ...] = ()
    """Fields that the recording has and that were not compared, if its family says so."""


@dataclass
class Recorded:
    """What is in a new recording."""

    num_steps: int
    num_waiting: int = 0
    """Requests that still wait at its end, because the engine never runs them."""


def is_recording(path: Path) -> bool:
    """Return whether a file is a recording, by its first line."""
    if not path.is_file():
        return False
    try:
        first = next(rows_of(path))
    except (*MALFORMED, RecordingError, StopIteration):
        return False
    return is_head(first, "scenario") or is_head(first, "op")


def rows_of(path: Path) -> Iterator[Any]:
    """Yield the objects of a file of JSON lines, packed or not.

    Raises:
        RecordingError: a line, or the whole file, unpacks to more than any recording contains.
    """
    left = MAX_BYTES
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as lines:
        while line := lines.readline(left + 1):
            left -= len(line)
            if left < 0:
                raise RecordingError(f"{path}: larger than {MAX_BYTES >> 20} MiB, the most for a recording")
            yield json.loads(line, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def is_head(row: Any, key: str) -> bool:
    """Return whether a first line is that of a recording in a format: compact (`scenario`) or full (`op`)."""
    return isinstance(row, dict) and (isinstance(row.get(key), dict) or row.get(key) == "meta")


def why_unreadable(error: BaseException) -> str:
    """Describe what is wrong with a file, given the exception from reading it."""
    return one_line(f"it has no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__)


def head_of(path: Path) -> Json:
    """Return what the first line of a recording says of it.

    Raises:
        RecordingError: it is no recording.
    """
    try:
        head = next(rows_of(path), None)
    except MALFORMED as error:
        raise RecordingError(f"{path}: cannot be read as a recording ({why_unreadable(error)})") from error
    if head is None:
        raise RecordingError(f"{path}: the file is empty")
    if is_head(head, "scenario"):
        return dict(head["scenario"])
    if is_head(head, "op"):
        return dict(head)
    raise RecordingError(f"{path}: expected a first line with `scenario` or `op: meta`")
