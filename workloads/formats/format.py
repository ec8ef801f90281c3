"""What a workload format is."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from workloads.request import Request, Workload
from workloads.source import Source

Detect = Callable[[dict[str, Any] | None, bytes], bool]


@dataclass(frozen=True, kw_only=True)
class Format:
    """A way to write down a workload."""

    name: str
    description: str
    tried: str = "not tried on real data, which could not be reached: read as its makers describe it"
    """The public data with which its reader was tested."""
    is_like: Detect
    """Whether a file is in it, from its first object (none if it is not JSON) and its beginning."""
    read: Callable[[Source], Iterator[Request]]
    write: Callable[[Workload, IO[bytes]], None] | None = None
    block_size: int | None = 512
    """Tokens per id, or per block of text; None if the file says."""
    suffix: str = ".jsonl"
    """The suffix of its files."""
    keeps: frozenset[str] = frozenset()
    """The parts of a workload that it can hold, out of `times`, `sharing`, `names` of sessions, `sessions`, `graphs`, `text`,
    `ends`."""
    is_in_order: bool = False
    """Whether its lines must be ordered by time."""


def has(*names: str) -> Detect:
    """Detect files whose first object has all of these names."""
    return lambda first, _: first is not None and all(name in first for name in names)


def has_columns(*names: bytes) -> Detect:
    """Detect CSV files whose header has all of these columns."""
    return lambda first, start: first is None and all(name in start.split(b"\n", 1)[0] for name in names)


def has_list(name: str) -> Detect:
    """Detect files whose first object has a list under this name."""
    return lambda first, _: first is not None and isinstance(first.get(name), list)
