"""What a tier moves: how far a read has come, and how long all of them took."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic


@dataclass(slots=True)
class Progress:
    """How many chunks of a read have come, also of one that is cut short."""

    num_chunks: int = 0


@dataclass(slots=True)
class Moved:
    """Reads or writes of a tier, and their total time."""

    count: int = 0
    seconds: float = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count and time the work inside."""
        start_s = monotonic()
        try:
            yield
        finally:
            self.count += 1
            self.seconds += monotonic() - start_s
