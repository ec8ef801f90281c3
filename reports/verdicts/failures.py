"""Who failed clearly more requests than others: times of the rest, which are often the easy ones, are not compared."""

import math
from collections.abc import Sequence
from typing import NamedTuple

MORE = 0.01
"""A share of failed requests that is larger by more than this, and by more than chance, is too large."""


class Failures(NamedTuple):
    """How many requests failed, of how many."""

    failed: int
    requests: int

    @property
    def share(self) -> float:
        """The share that failed."""
        return self.failed / max(self.requests, 1)

    def are_more(self, other: "Failures") -> bool:
        """Return whether a larger share failed than of others, by more than chance (two standard errors)."""
        error = math.hypot(*(math.sqrt(one.failed) / max(one.requests, 1) for one in (self, other)))
        return self.share - other.share > max(MORE, 2 * error)

    def __str__(self) -> str:
        return f"{self.failed:,} of {self.requests:,}"


def are_too_many(counts: Sequence[Failures]) -> list[bool]:
    """Return of each whether it failed clearly more than the one that failed fewest."""
    fewest = min(counts, key=lambda one: one.share, default=Failures(0, 0))
    return [one.are_more(fewest) for one in counts]
