"""A log of what an engine's core decides, step by step, to be held against that of another core.

Steps that follow each other with the same tokens for the same sequences are one row, so that a long decoding takes one.
"""

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mocker.batch import Batch
from mocker.sequence import Sequence


@dataclass(slots=True)
class Row:
    """Consecutive steps with the same tokens for the same sequences."""

    start_s: float
    """When the first one was closed."""
    tokens: "array[int]"
    """Sequence and tokens, in turn, in the scheduler's order."""
    preempted: tuple[int, ...]
    num_free: int
    """Free KV blocks when the first one was closed."""
    num_steps: int = 1


class StepLog:
    """The rows of one engine."""

    def __init__(self, now: Callable[[], float]) -> None:
        """Begin with no steps; `now` returns the time (s)."""
        self.rows: list[Row] = []
        self._now = now
        self._batch: Batch | None = None  # the last one

    def add(self, batch: Batch | None, tokens: Iterable[tuple[Sequence, int]], num_free: int) -> None:
        """Log a batch that was closed, unless it has no tokens and preempts nobody."""
        rows = self.rows
        if batch is not None and batch is self._batch:
            self.repeat(1)
            return
        if batch is None:
            return
        flat = array("q", [number for sequence, count in tokens for number in (_number(sequence), count)])
        preempted = tuple(sorted([_number(sequence) for sequence in batch.preempted]))
        if not (flat or preempted):
            return
        self._batch = batch if batch.is_undisturbed else None
        if rows and not preempted and not rows[-1].preempted and rows[-1].tokens == flat:
            self.repeat(1)
        else:
            rows.append(Row(self._now(), flat, preempted, num_free))

    def repeat(self, num_steps: int) -> None:
        """Log the last batch for this many steps more."""
        self.rows[-1].num_steps += num_steps

    @property
    def num_steps(self) -> int:
        """Count the steps."""
        return sum([row.num_steps for row in self.rows])


def _number(sequence: Sequence) -> int:
    assert isinstance(sequence.id, int)
    return sequence.id
