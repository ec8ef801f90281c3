"""Settings of `dynabench rehearse`: which seeds, how much goes wrong, and what is sent."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from dynabench.rehearsal.faults.fault import Level
from foundation.settings import Count, Whole, check_settings

RANGE = re.compile(r"(\d+)\.\.(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearseConfig:
    """What is rehearsed."""

    seeds: str = "100"
    """How many seeds, from 0 on; or a range, such as 500..600. Each is a rehearsal of its own."""

    faults: Level = "medium"
    """How much goes wrong: none, light, medium or harsh."""

    requests: Count = 60
    """Requests of each rehearsal, generated anew for each seed; or as many of the workload, from another place for each."""

    rate: Annotated[float, Meta(gt=0)] = 12.0
    """Requests per second, of generated requests."""

    own_engine: str | None = None
    """Your own engine at each worker: pystr:FILE or pytok:FILE, as after out= of dynamo-run."""

    replay: Path | None = None
    """Replay a rehearsal that failed, from the file that was written then, with all logs."""

    jobs: Whole = 0
    """Rehearsals at once (0: one for each core)."""

    out: Path = Path("rehearsal")
    """Folder for the files of rehearsals that fail; nothing is written if none does."""

    def __post_init__(self) -> None:
        """Refuse seeds that are not understood."""
        check_settings(self)
        _ = self.numbers

    @property
    def numbers(self) -> range:
        """The seeds.

        Raises:
            ValueError: they are not understood.
        """
        match = RANGE.fullmatch(self.seeds)
        first, last = (int(match[1]), int(match[2])) if match else (0, int(self.seeds) if self.seeds.isdigit() else 0)
        if not first < last:
            raise ValueError(f"seeds is {self.seeds!r}; expected a number such as 200, or a range such as 500..600")
        return range(first, last)
