"""How many of the KV blocks of some workers were in use over time, in little memory however long the run is."""

from collections import Counter
from collections.abc import Iterable

import numpy as np


class KvUse:
    """The share in use in windows of time, which double when the run outlasts them."""

    WINDOWS = 256

    def __init__(self) -> None:
        self.window_s = 0.125
        """How long a window is."""
        self._until_s = self.window_s * self.WINDOWS
        self._areas = [0.0] * self.WINDOWS  # share times seconds, all workers together

    def add(self, start: float, end: float, share: float) -> None:
        """Note what share one worker had in use for a while (s)."""
        while end >= self._until_s:
            pairs = zip(self._areas[::2], self._areas[1::2], strict=True)
            self._areas = [first + second for first, second in pairs] + [0.0] * (self.WINDOWS // 2)
            self.window_s *= 2
            self._until_s *= 2
        width, areas = self.window_s, self._areas
        first, last = int(start / width), int(end / width)
        if first == last:
            areas[first] += share * (end - start)
            return
        areas[first] += share * ((first + 1) * width - start)
        area = share * width
        for window in range(first + 1, last):
            areas[window] += area
        areas[last] += share * (end - last * width)

    def shares(self, end: float, there: Iterable[tuple[float, float]]) -> tuple[float, tuple[float, ...]]:
        """Return the length of a window (s), and the mean share in each that was over by the end (s).

        Args:
            end: when the run ended.
            there: from when until when each worker was there.
        """
        width = self.window_s
        edges = np.arange(min(int(end / width), self.WINDOWS) + 1) * width
        presence = np.zeros(len(edges) - 1)
        for (since, until), count in Counter(there).items():
            presence += count * np.diff(np.clip(edges, since, max(since, until)))
        areas = np.array(self._areas[: len(presence)])
        shares = np.divide(areas, presence, out=np.zeros_like(areas), where=presence > 0)
        return width, tuple(round(min(share, 1.0), 4) for share in shares.tolist())
