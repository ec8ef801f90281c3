"""The gaps between tokens of a run: as the engines log them, or in bins where they would take too much memory."""

import numpy as np

from dynabench.virtual.rank import Rank
from mocker.timing.choose import SimulatedEngine
from reports.figures.gap_bins import GapBins
from reports.figures.metrics import spread
from reports.record.records import Floats

MOST_ROWS = 1 << 18
"""Rows that all engines may keep; a request of many tokens adds one or two."""


class Gaps:
    """Collects the rows of all ranks."""

    def __init__(self, ranks: list[Rank], engines: list[SimulatedEngine]) -> None:
        """Follow ranks and their engines; more of both may be added."""
        self._ranks, self._engines = ranks, engines
        self._bins: GapBins | None = None

    @property
    def is_binned(self) -> bool:
        """Whether there were too many rows to keep."""
        return self._bins is not None

    def begin(self, now: float) -> None:
        """Forget what was logged so far."""
        for rank in self._ranks:
            rank.engine.advance(now)
            rank.engine.take_gaps()
        self._bins = None

    def look(self) -> None:
        """Put rows into bins if there are too many."""
        if sum([len(rank.engine.log.starts_s) for rank in self._ranks]) > MOST_ROWS:
            self._bins = self._bins or GapBins()
            self._bin(self._bins)

    def rows(self) -> tuple[Floats, Floats | None]:
        """Return the gaps with each engine's noise, and when each row began (s) if that is known."""
        if self._bins is not None:
            self._bin(self._bins)
            return self._bins.rows(), None
        rows, starts_s = [np.empty((0, 5))], [np.empty(0)]
        for rank, engine in zip(self._ranks, self._engines, strict=True):
            log = rank.engine.log
            rows.append(spread(np.array(log.rows).reshape(-1, 5), engine.noise))
            starts_s.append(np.repeat(np.array(log.starts_s), max(len(engine.noise), 1)))
        return np.concatenate(rows), np.concatenate(starts_s)

    def _bin(self, bins: GapBins) -> None:
        for rank, engine in zip(self._ranks, self._engines, strict=True):
            bins.add(spread(np.array(rank.engine.take_gaps()).reshape(-1, 5), engine.noise))
