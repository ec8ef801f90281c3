"""A workload as a whole: its requests, in order.

Commands are described without numpy, so it is imported with the first workload that there is.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from workloads.request import LIMIT, Request, WorkloadError

if TYPE_CHECKING:
    from workloads.columns import RequestColumns


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
