"""Leases: how long KV is kept for a reader that has not been heard from yet, or not recently.

grant --> until now + duration -- renew --> until now + 2/3 duration, if that is later -- end, expire --> gone
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

RENEWAL_SHARE = 2 / 3
"""A renewal extends a lease by this share of its duration, as in vLLM."""

RENEWALS = 6
"""How many times a lease is renewed within its duration, as in vLLM."""

Holder = TypeVar("Holder", bound=Hashable)


class Leases(Generic[Holder]):
    """Who holds which lease."""

    def __init__(self, duration_s: float) -> None:
        self._duration_s = duration_s
        self._ends: dict[Holder, float] = {}

    def grant(self, holder: Holder, now: float) -> None:
        """Start a lease."""
        self._ends[holder] = now + self._duration_s

    def renew(self, holder: Holder, now: float) -> None:
        """Extend a lease that has not ended."""
        if holder in self._ends:
            self._ends[holder] = max(self._ends[holder], now + self._duration_s * RENEWAL_SHARE)

    def end(self, holder: Holder) -> None:
        """End a lease, if there is one."""
        self._ends.pop(holder, None)

    def expire(self, now: float) -> list[Holder]:
        """End the leases that have run out, and return their holders."""
        over = [holder for holder, end in self._ends.items() if end <= now]
        for holder in over:
            del self._ends[holder]
        return over

    def next_s(self) -> float | None:
        """Return when the next lease may run out."""
        return min(self._ends.values(), default=None)
