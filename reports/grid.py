"""A table whose lines have labels: for a terminal of any width, for Markdown, and for a page."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.cells import cell_len
from rich.table import Table

from foundation.text import printable
from reports.foreign import markdown_cell

FRAME = 3
"""What a column takes beside its text: a line, and a blank on each side of it."""
UNBROKEN = 13
"""A word or a cell up to this width stays on one line: a number, or one with its share."""
LABEL = 16
"""The width down to which labels shrink so that all columns fit side by side."""


@dataclass(frozen=True)
class Grid:
    """A small table."""

    title: str
    columns: list[str]
    rows: list[tuple[str, list[str]]]
    """A label, and a cell for each column."""
    note: str = ""

    def tables(self, width: int) -> Iterator[Table]:
        """Return it for a terminal: as many columns side by side as fit, the others in further tables.

        What is too long is folded, never cut, so that names which begin alike are told apart.
        """
        texts = [[head, *(cells[place] for _, cells in self.rows)] for place, head in enumerate(self.columns)]
        columns = [(_least(column), _widest(column)) for column in texts]
        first = self._label_width(width, sum(least + FRAME for least, _ in columns))
        title: str | None = self.title
        for places, widths in _groups(columns, width - first - FRAME + 1):
            table = Table(title=title, title_justify="left", pad_edge=False)
            table.add_column("", width=first, overflow="fold")
            for place, its_width in zip(places, widths, strict=True):
                table.add_column(self.columns[place], justify="right", width=its_width, overflow="fold")
            for label, cells in self.rows:
                table.add_row(label, *(cells[place] for place in places))
            yield table
            title = None

    def markdown(self) -> list[str]:
        """Return its lines in Markdown, without title and note."""
        lines = [["", *self.columns], *([label, *cells] for label, cells in self.rows)]
        head, *rest = ["| " + " | ".join(map(markdown_cell, line)) + " |" for line in lines]
        return [head, "|---|" + "---:|" * len(self.columns), *rest]

    def _label_width(self, width: int, needed: int) -> int:
        """Return how wide the labels are: what the columns leave, or where not all fit, a third."""
        liked = _widest(label for label, _ in self.rows)
        left = width - needed - FRAME + 1
        return min(liked, left if left >= min(liked, LABEL) else max(width // 3, 1))


def _groups(columns: list[tuple[int, int]], room: int) -> Iterator[tuple[list[int], list[int]]]:
    """Divide columns, by what they need and like, into groups that fit into so much room; return places and widths."""
    groups: list[list[int]] = [[]]
    for place, (least, _) in enumerate(columns):
        if groups[-1] and sum(columns[one][0] + FRAME for one in groups[-1]) + least + FRAME > room:
            groups.append([])
        groups[-1].append(place)
    for group in groups:
        spare = room - sum(columns[place][0] + FRAME for place in group)
        yield group, _widened([columns[place] for place in group], spare)


def _least(texts: list[str]) -> int:
    """Return the width at which no short word is broken, and no short cell."""
    return min(max(_widest(word for text in texts for word in text.split()), _widest(texts[1:])), UNBROKEN)


def _widened(columns: list[tuple[int, int]], spare: int) -> list[int]:
    """Widen columns from what they need towards what they like, the narrowest first, as far as there is room."""
    widths = [least for least, _ in columns]
    for _ in range(spare):
        narrow = [place for place, (_, liked) in enumerate(columns) if widths[place] < liked]
        if narrow:
            widths[min(narrow, key=widths.__getitem__)] += 1
    return widths


def _widest(texts: Iterable[str]) -> int:
    return max((cell_len(printable(text)) for text in texts), default=0)
