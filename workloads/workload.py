"""A workload as a whole: its requests, in order.

Commands are described without numpy, so it is imported with the first workload that there is.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from foundation.errors import plain_errors
from workloads.request import LIMIT, Request, WorkloadError

if TYPE_CHECKING:
    from workloads.columns import RequestColumns
    from workloads.describe import Description


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival, in blocks of `block_size` tokens; one that waits for others comes after them."""

    name: str
    block_size: int
    requests: Sequence[Request] = field(repr=False)
    """Kept as columns, whatever sequence they come in."""
    notes: tuple[str, ...] = ()
    """Changes since it was read."""
    knows_prefixes: bool = True
    """Whether ids say what prompts share; a trace with lengths only does not, and each id is made up."""

    def __post_init__(self) -> None:
        """Put the requests into columns."""
        from workloads.columns import RequestColumns

        object.__setattr__(self, "requests", RequestColumns.of(self.requests))

    @classmethod
    def read(
        cls,
        *paths: str | Path,
        format: str | None = None,
        columns: str | None = None,
        block_size: int | None = None,
    ) -> Self:
        """Read a workload from files, plain or .gz, or folders; without any, a small bundled one.

        Args:
            paths: files and folders that form one workload.
            format: the name of the format, as `dynabench workload formats` lists them (none: detected).
            columns: the columns of a log, as in `arrival=ts,input=prompt_tokens,output=completion_tokens`.
            block_size: tokens that each hash id stands for (none: the format's).

        Raises:
            UserError: a file cannot be read, or has no requests.
        """
        from workloads import formats

        files = [Path(path) for path in paths] or [formats.BUNDLED]
        return cast("Self", formats.read(files, format=format, columns=columns, block_size=block_size))

    @classmethod
    def synth(cls, name: str = "synthetic", **settings: Any) -> Self:
        """Generate a workload; the same settings give the same one.

        Args:
            name: what results call it.
            settings: as of `dynabench workload synth`, such as `requests=1200, rate=5, isl=2048, osl=128, prefix_groups=40`
                (lengths in tokens, `rate` in sessions per second).

        Raises:
            UserError: there is no such setting, or its value is invalid.
        """
        from foundation.settings import settings_of
        from workloads.synthesize import SynthConfig, synthesize

        with plain_errors():
            config = settings_of(SynthConfig, settings)
        return cls(name, config.block_size, synthesize(config))

    @classmethod
    def from_frame(
        cls,
        frame: Any,
        *,
        arrival: str,
        input: str,
        output: str,
        name: str = "frame",
        block_size: int | None = None,
        **columns: str,
    ) -> Self:
        """Make a workload of the rows of a data frame: of pandas, polars or Arrow.

        Args:
            frame: a row per request, in any order.
            arrival: the column with arrivals: numbers or timestamps. The unit of numbers is recognised, or follows after
                a colon: `ts:ms`.
            input: the column with the length of each prompt (tokens).
            output: the column with the length of each answer (tokens).
            name: what results call it.
            block_size: tokens that each hash id stands for (none: 512).
            columns: more columns, for `session`, `hash_ids` (what prompts share; without it nothing is shared),
                `priority` and `adapter`.

        Raises:
            UserError: it is not a data frame, a column is missing, or has a value that is not understood.
        """
        from workloads import formats

        names = {"arrival": arrival, "input": input, "output": output, **columns}
        return cast("Self", formats.read_frame(frame, names, title=name, block_size=block_size))

    def write(self, path: str | Path, format: str | None = None) -> None:
        """Write it to a new file, compressed if its name ends in .gz.

        Args:
            path: the file, which must not exist.
            format: the name of a format that can be written (none: dynabench's own, which loses nothing).

        Raises:
            UserError: the format cannot be written.
            OSError: the file exists, or cannot be written.
        """
        from foundation.files import new_file
        from workloads import formats

        name = format or formats.DEFAULT
        formats.check_name(Path(path), name)
        with new_file(Path(path)) as file:
            formats.write(self, name, file)

    def describe(self) -> "Description":
        """Return its figures: requests, rate (1/s), lengths (tokens), and how much of its prompts is shared."""
        from workloads.describe import describe_workload

        return describe_workload(self)

    def __repr__(self) -> str:
        return f"<Workload {self.name}: {len(self):,} requests in {self.duration_s:,.1f} s>"

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    @property
    def columns(self) -> "RequestColumns":
        """The requests as columns."""
        return cast("RequestColumns", self.requests)

    @property
    def duration_s(self) -> float:
        """Time from the first arrival to the last."""
        return float(self.columns.arrival_s[-1] - self.columns.arrival_s[0]) if self.requests else 0.0

    @property
    def has_priorities(self) -> bool:
        """Whether some requests go before others if the engine schedules by priority."""
        return len(set(self.columns.more.get("priority", ()))) > 1

    @property
    def has_dependencies(self) -> bool:
        """Whether some requests wait for others."""
        return any(self.columns.more.get("after", ()))


def extra_fields(requests: Iterable[Request]) -> dict[str, int]:
    """Count requests by further field of their bodies, in order of name."""
    counts = Counter(name for request in requests for name in request.extra_body or () if name != LIMIT)
    return dict(sorted(counts.items()))


def select(requests: Sequence[Request], numbers: Iterable[int]) -> "RequestColumns":
    """Keep some requests; those that waited for a dropped one wait for the rest, or keep their arrival time."""
    from workloads.columns import RequestColumns

    return RequestColumns.of(requests).select(list(numbers))


def in_order(requests: Sequence[Request], name: str) -> "RequestColumns":
    """Sort by arrival and let times start at 0; requests that wait for others stay after them.

    Raises:
        WorkloadError: there is no request.
    """
    from workloads.columns import RequestColumns

    if not requests:
        raise WorkloadError(f"{name} has no requests")
    return RequestColumns.of(requests).in_order()
