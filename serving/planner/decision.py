"""What a planner decides."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """How many workers a pool should have, and why."""

    replicas: int
    """Ready and starting ones together."""
    proposed: int
    """What the policy asked for, before limits."""
    reason: str
    """One line."""


@dataclass(frozen=True, slots=True)
class Decision:
    """How many workers each pool should have from now on."""

    now: float
    targets: Mapping[str, Target]
    """By the pool's name; a pool that is left out stays as it is."""
    notes: tuple[str, ...] = ()
    """What kept the planner from deciding, or what it noticed: one line each."""
