"""The facts of a run: one row per request, and the gaps between tokens."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass
class ArmResult:
    """What one run of one arm gave, both clocks alike.

    `columns` has one array per column of requests.parquet; times in seconds from the start of the run. `gaps` are
    the times between tokens as rows (first, slope, curve, steps, tokens): for each of `steps` steps j, `tokens`
    sequences waited `first + slope*j + curve*j*j` seconds for their next token.
    """

    arm: str
    columns: dict[str, npt.NDArray[Any]]
    gaps: Floats
    wall_s: float
    num_workers: int
    repeat: int = 0
    is_complete: bool = True
    notes: tuple[str, ...] = ()
    """What spoils the run, such as a client that was late."""
    facts: dict[str, float] = field(default_factory=dict)
    """What else is known of it, such as how busy the client was."""
    is_live: bool = False
    """Whether each row of `gaps` is a chunk that came over HTTP."""

    @property
    def measured(self) -> "ArmResult":
        """The same without the requests of the warm-up and after the window; `gaps` hold none of them anyway."""
        kept = self.columns.get("is_measured")
        if kept is None or kept.all():
            return self
        return replace(self, columns={name: column[kept] for name, column in self.columns.items()})
