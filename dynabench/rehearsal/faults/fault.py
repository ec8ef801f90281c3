"""A fault: something that goes wrong with a deployment while it is rehearsed."""

from typing import Literal

import msgspec

Kind = Literal[
    "kill",
    "lose-machine",
    "restart",
    "pause",
    "partition",
    "half-open",
    "reset",
    "delay",
    "lose-events",
    "repeat-events",
    "discovery-away",
    "discovery-wiped",
    "broker-away",
    "broker-wiped",
    "clock-jump",
    "clock-drift",
    "overload",
    "start-fails",
    "start-hangs",
    "bit-flip",
    "slow-disk",
    "full-disk",
    "slow-store",
    "early-timeout",
    "chase",
]
Level = Literal["none", "light", "medium", "harsh"]


class Fault(msgspec.Struct, frozen=True):
    """Something that happens, and ends after a while."""

    kind: Kind
    at_s: float
    """When it begins (s after the first request)."""
    lasts_s: float
    """How long it lasts, or until a program that was killed is started again (s)."""
    target: str = ""
    """The program; of a partition and a reset, one of the two; half-open, the one that the other does not hear."""
    other: str = ""
    """The other of the two."""
    amount: float = 0.0
    """A share, a time (s), what a clock gains in each second (s), or the requests that come at once."""

    @property
    def label(self) -> str:
        """Its kind, and its amount if it has one."""
        return f"{self.kind} {self.amount:.3g}" if self.amount else self.kind

    @property
    def ends(self) -> tuple[str, ...]:
        """The programs that it meets."""
        return tuple(filter(None, (self.target, self.other)))

    def __str__(self) -> str:
        """Say what happens."""
        whom = " and ".join(self.ends)
        amount = f" {self.amount:.3g}" * bool(self.amount)
        return f"{self.at_s:.3f} s: {self.kind} {whom}{amount} for {self.lasts_s:.3f} s".replace("  ", " ")
