"""What each rank has counted in a live run, by the frontend's /metrics."""

import re
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Rank = tuple[str, str]
"""Instance and rank."""
Group = TypeVar("Group", bound=Hashable)
What = TypeVar("What", bound=Hashable)

_LABEL = re.compile(rb'(\w+)="([^"\n]*)"')


def labels_of(text: bytes) -> dict[str, str]:
    """Return the labels of a metric, by name."""
    return {name.decode(): value.decode() for name, value in _LABEL.findall(text)}


def rank_of(labels: dict[str, str]) -> Rank:
    """Return which rank a metric with these labels is of."""
    return labels["instance"], labels["rank"]


class RankCounts(Generic[Group, What]):
    """What ranks have counted, by group, since the first look; a rank that had not reported then is new."""

    def __init__(self) -> None:
        self._first: dict[tuple[Group, Rank, What], float] = {}
        self._last: dict[Group, dict[Rank, dict[What, float]]] = {}
        self._has_looked = False

    @property
    def has_any(self) -> bool:
        """Whether any rank counts anything."""
        return bool(self._last)

    def note(self, counts: Iterable[tuple[Group, Rank, What, float]]) -> None:
        """Note what one look finds."""
        for group, rank, what, value in counts:
            if not self._has_looked:
                self._first[group, rank, what] = value
            self._last.setdefault(group, {}).setdefault(rank, {})[what] = value
        self._has_looked = True

    def of(self, group: Group, *, gauges: Iterable[What] = ()) -> list[dict[What, float]]:
        """Return each rank's counts since the first look, and the last values of gauges."""
        return [
            {
                what: value if what in gauges else max(value - self._first.get((group, rank, what), 0.0), 0.0)
                for what, value in counts.items()
            }
            for rank, counts in self._last.get(group, {}).items()
        ]
