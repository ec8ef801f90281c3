"""How much is sent: so many requests in flight, or so many per second."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SETTINGS = ("concurrency", "max_concurrency", "session_concurrency", "rate", "rate_profile")
"""Settings of a run that say how much is sent."""


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop of some streams, or requests with arrival times, of which at most so many are in flight."""

    streams: int | None = None
    """The most requests in flight; None: any number."""
    rate: float | None = None
    """Arrivals per second; None in a closed loop, and where it is not known or not constant."""
    is_trace: bool = False
    """Whether requests have arrival times of which the rate is not known."""

    @property
    def has_arrivals(self) -> bool:
        """Whether requests are due at times that do not depend on answers."""
        return self.is_trace or self.rate is not None

    def is_other_than(self, other: "Load") -> bool:
        """Return whether two loads certainly differ."""
        if (self.has_arrivals, self.streams) != (other.has_arrivals, other.streams):
            return True
        return None not in (self.rate, other.rate) and self.rate != other.rate

    def __str__(self) -> str:
        streams = "" if self.streams is None else f"{self.streams:,} stream{'s' * (self.streams != 1)}"
        if not self.has_arrivals:
            return streams
        pace = "arrival times" if self.rate is None else f"{self.rate:,.4g} request{'s' * (self.rate != 1)}/s"
        return f"{pace}, at most {streams}" if streams else pace


def sent_as(streams: object, rate: object) -> Load | None:
    """Return the load of what another tool wrote of it; None if that is not known.

    An infinite rate is none: requests are sent as soon as they may be.
    """
    given = [None if value in (0, math.inf, "inf") else value for value in (streams, rate)]
    if not any(given) or not all(value is None or _is_positive(value) for value in given):
        return None
    most, pace = given
    return Load(most and int(most), pace)  # type: ignore[call-overload, arg-type]


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def settings_of(manifest: Mapping[str, Any], arm: str) -> dict[str, Any]:
    """Return the settings of an arm of a results folder that say how much is sent."""
    kept: dict[str, Any] | None = manifest.get("sent", {}).get(arm)
    if kept is not None:  # runs of several folders
        return kept
    every = {**manifest.get("load", {}), **manifest.get("shape", {}), **manifest.get("arms", {}).get(arm, {})}
    return {name: every[name] for name in SETTINGS if every.get(name) is not None}


def load_of(manifest: Mapping[str, Any], arm: str) -> Load:
    """Return how the requests of an arm of a results folder were sent.

    A session in progress is a stream, too: its turns run one after another.
    """
    closed, most, sessions, rate, profile = map(settings_of(manifest, arm).get, SETTINGS)
    if streams := closed or sessions:
        return Load(streams)
    is_constant = rate is not None and profile in (None, "flat")
    return Load(most, rate if is_constant else None, is_trace=not is_constant)
