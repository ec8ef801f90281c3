"""What a workload format is."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from workloads.request import Request
from workloads.source import Source, column_names
from workloads.workload import Workload

if TYPE_CHECKING:
    from workloads.columns import RequestColumns

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
    read_columns: "Callable[[Source], Iterator[RequestColumns]] | None" = None
    """Reads the same faster, many at a time."""
    write: Callable[[Workload, IO[bytes]], None] | None = None
    block_size: int | None = 512
    """Tokens per id, or per block of text; None if the file says."""
    block_size_of: Callable[[Path], int] | None = None
    """Reads them from a file that says."""
    time_unit: Literal["s", "ms"] | None = None
    """The unit of its times, if another one could be mistaken for it."""
    suffix: str = ".jsonl"
    """The suffix of its files."""
    keeps: frozenset[str] = frozenset()
    """The parts of a workload that it can hold, out of `times`, `sharing`, `names` of sessions, `sessions`, `graphs`, `text`,
    `ends`, `priorities`, `adapters`, `media`, `fields` of bodies."""
    is_plain: bool = False
    """Whether a single file needs no note on how it was read, because it is a list of requests in order of time."""


def has(*names: str) -> Detect:
    """Detect files whose first object has all of these names."""
    return lambda first, _: first is not None and all(name in first for name in names)


def has_columns(*names: str) -> Detect:
    """Detect CSV files whose header has all of these columns."""
    return lambda first, start: first is None and set(names) <= set(column_names(start))


def has_list(name: str) -> Detect:
    """Detect files whose first object has a list under this name."""
    return lambda first, _: first is not None and isinstance(first.get(name), list)


def json_priority(request: Request) -> dict[str, int]:
    """Return what a JSON row says about a request's priority: nothing if it has none."""
    return {"priority": request.priority} if request.priority else {}


def json_adapter(request: Request) -> dict[str, str]:
    """Return what a JSON row says about a request's adapter: nothing if it has none."""
    return {"adapter": request.adapter} if request.adapter else {}


def csv_priorities(workload: Workload) -> tuple[str, Sequence[str]]:
    """Return the name and the cells of a last column with priorities: empty texts if no request has one."""
    if not any(request.priority for request in workload):
        return "", [""] * len(workload)
    return ",priority", [f",{request.priority}" for request in workload]
