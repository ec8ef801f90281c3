"""The facts of a run: one row per request, and the gaps between tokens."""

from dataclasses import dataclass
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
