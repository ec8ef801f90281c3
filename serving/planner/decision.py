"""The decisions of a planner."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolTarget:
    """How many workers a pool should have, and why."""

    replicas: int
    """Ready and starting ones together."""
    reason: str
    """One line."""


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """How many workers each pool should have from now on."""

    targets: Mapping[str, PoolTarget]
    """By the pool's name; a pool that is left out stays as it is."""
    changes: Mapping[str, PoolTarget]
    """Those that change the size of their pool; pools that shrink come first, as others may need their GPUs."""
    notes: tuple[str, ...] = ()
    """Why the planner did not decide, and what it noticed: one line each."""
    is_advisory: bool = False
    """Whether the targets are advice only and are not carried out."""

    @property
    def orders(self) -> Mapping[str, PoolTarget]:
        """The targets to carry out, in this order."""
        return {} if self.is_advisory else self.changes
