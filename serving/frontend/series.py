"""Counters and histograms in plain lists: counting is an addition, and text is made when it is asked for."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from prometheus_client.core import Metric

Labels = tuple[str, ...]


class Histogram:
    """Samples by bucket; a bucket includes its bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a sample."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def add(self, counts: Sequence[int], total: float) -> None:
        """Add what was counted elsewhere."""
        self.counts = [mine + its for mine, its in zip(self.counts, counts, strict=True)]
        self.total += total

    def observe_all(self, values: npt.NDArray[np.float64], times: npt.NDArray[np.float64]) -> None:
        """Count many samples."""
        places = np.searchsorted(self.bounds, values)
        found = np.bincount(places, weights=times, minlength=len(self.counts))
        self.add(list(map(int, found)), float(values @ times))


class Series:
    """What was counted for one model or engine: by the family's name, and by the labels that the family has of its own."""

    def __init__(self, bounds: Mapping[str, Sequence[float]]) -> None:
        """Start at zero; `bounds` are those of each histogram."""
        self.counters: dict[str, dict[Labels, float]] = {}
        self.histograms = {name: Histogram(each) for name, each in bounds.items()}

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        """Add to a counter."""
        series = self.counters.setdefault(name, {})
        series[labels] = series.get(labels, 0) + by

    def total(self, name: str, *labels: str) -> float:
        """Return a counter."""
        return self.counters.get(name, {}).get(labels, 0)

    def observe(self, name: str, value: float, times: int = 1) -> None:
        """Count samples of a histogram."""
        self.histograms[name].observe(value, times)


class Collected:
    """Metrics that were made before, for a registry of Prometheus."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        """Return them."""
        return self._families
