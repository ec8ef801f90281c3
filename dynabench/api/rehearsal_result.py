"""What `rehearse` returns."""

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from dynabench.api import frames
from dynabench.api.text import html_of

if TYPE_CHECKING:
    import pandas as pd

    from dynabench.rehearsal.all_seeds import Found


class RehearsalResult:
    """What came of rehearsals: how often what went wrong, and which of the things that must always hold did not."""

    def __init__(self, found: "Found") -> None:
        """Hold rehearsals."""
        self.found = found

    @property
    def verdict(self) -> str:
        """How many seeds were rehearsed, and in how many something did not hold."""
        return list(self._lines())[-1]

    @property
    def is_complete(self) -> bool:
        """Whether it was not interrupted."""
        return self.found.is_complete

    @property
    def happened(self) -> dict[str, int]:
        """How often each kind of fault happened, over all seeds."""
        return dict(sorted(self.found.happened.items()))

    @cached_property
    def violations(self) -> "pd.DataFrame":
        """One row per violation: the seed, what did not hold, how, the file that replays it, and its picture."""
        import pyarrow as pa

        rows = [
            (each.seed, one.invariant, one.what, str(each.file), str(each.picture))
            for each in self.found.failed
            for one in each.violations
        ]
        names, types = ("seed", "invariant", "text", "file", "picture"), (pa.int64(), *4 * [pa.string()])
        columns = zip(*rows, strict=True) if rows else [()] * len(names)
        made = {name: pa.array(list(its), kind) for name, its, kind in zip(names, columns, types, strict=True)}
        return frames.to_pandas(pa.table(made), "result.violations")

    def _lines(self) -> Iterator[str]:
        from dynabench.rehearsal.all_seeds import lines

        yield from lines(self.found)

    def _failures(self) -> Iterator[str]:
        for each in self.found.failed:
            yield f"seed {each.seed}: {each.violations[0]} (dynabench rehearse --replay {each.file}; {each.picture})"
        if not self.is_complete:
            yield "interrupted: these are the results so far"

    def __repr__(self) -> str:
        return "\n".join([*self._lines(), *self._failures()])

    def _repr_html_(self) -> str:
        *details, verdict = self._lines()
        return html_of("Rehearsal", verdict, [], self._failures(), details)
