"""How figures are written in tables."""

from reports.figures.tiers import Saving
from reports.record.pools import TierTraffic


def milliseconds(seconds: float | None) -> str:
    """Format a duration in ms, or n/a if the sample is too small."""
    if seconds is None:
        return "n/a"
    value = seconds * 1000
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def share(value: float | None) -> str:
    """Format a share as a percentage, or n/a if it is not known."""
    return "n/a" if value is None else f"{value:.1%}"


def number(value: float | None, digits: int = 0) -> str:
    """Format a number, or n/a if it is not known."""
    return "n/a" if value is None else f"{value:,.{digits}f}"


def gigabytes(traffic: TierTraffic) -> str:
    """Format the number of bytes moved."""
    return number(traffic.bytes / 1e9, 1)


def saving(found: Saving) -> str:
    """Format the GPU-seconds saved, with their interval over repeats."""
    largest = max(abs(value) for value in (found.value, *(found.interval or ())))
    digits = 0 if largest >= 100 else 1 if largest >= 1 else 2
    value, *ends = (number(round(value, digits) + 0.0, digits) for value in (found.value, *(found.interval or ())))
    return f"{value} [{', '.join(ends)}]" if ends else value
