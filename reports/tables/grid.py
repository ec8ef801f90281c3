"""A table with labelled lines, for a terminal of any width, for Markdown, and for a page."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rich.cells import cell_len, chop_cells
from rich.table import Table
from rich.text import Text

from foundation.text import printable
from reports.foreign import markdown_cell
from reports.key import Key

FRAME = 3
"""The width of a column besides its text: a line, and a blank on each side of it."""
UNBROKEN = 15
"""A word or a cell up to this width stays on one line: a number, one with its share, an interval."""
LABEL = 16
"""The width down to which labels shrink so that all columns fit side by side."""
HEAD = 5
"""Lines of a table besides its rows."""

PROSE = 40
"""A longer cell is a sentence."""
NOTHING = ("-", "n/a", "0", "0.00")
"""Cells that mean that nothing happened."""

_WORD = re.compile(r"(?:\[[^\[\]]*\]|\S)+(?:(?<=\]) [~=](?!\S))?")
"""An interval is one word, together with the sign after it."""
_PIECE = re.compile(r"[^\s_/,:+-]*[\s_/,:+-]+|[^\s_/,:+-]+")
"""A word that is too long is broken after a sign."""


class GridColumn(NamedTuple):
    """A column of a table: labels or figures."""

    head: str
    cells: list[str]


@dataclass(frozen=True)
class Grid:
    """A small table."""

    title: str
    columns: list[str]
    rows: list[tuple[str, list[str]]]
    """Each row's label, and its cell for each column."""
    note: str = ""
    corner: str = ""
    """The head of the labels."""

    def tables(self, width: int, key: Key | None = None) -> Iterator[Table]:
        """Return it for a terminal: as many columns side by side as fit, and the others in further tables.

        Arms have the names and colours of the key, if one is given.

        If not all fit, rows and columns are swapped if that is shorter. Long text is folded, never cut, so that
        names that start alike remain distinct.
        """
        if key:
            self = replace(
                self,
                columns=[_short(name, key) for name in self.columns],
                rows=[(_short(label, key), [_short(cell, key) for cell in cells]) for label, cells in self.rows],
            )
        if self._num_tables(width) > 1:
            self = min(self, self.turned(), key=lambda grid: grid._num_tables(width) * (HEAD + len(grid.rows)))
        colours = {entry.name: entry.dark for entry in (key or {}).values()}
        yield from tables(self.title, [self._labels()], self._columns(), width, colours)

    def markdown(self) -> list[str]:
        """Return its lines in Markdown, without title and note."""
        lines = [["", *self.columns], *([label, *cells] for label, cells in self.rows)]
        head, *rest = ["| " + " | ".join(map(markdown_cell, line)) + " |" for line in lines]
        return [head, "|---|" + "---:|" * len(self.columns), *rest]

    def turned(self) -> "Grid":
        """Return it with rows and columns swapped."""
        rows = [(column.head, column.cells) for column in self._columns()]
        return replace(self, columns=[label for label, _ in self.rows], rows=rows)

    def eventful(self) -> "Grid":
        """Return it without the columns in which nothing happened."""
        kept = [
            place for place in range(len(self.columns)) if any(cells[place] not in NOTHING for _, cells in self.rows)
        ]
        return replace(
            self,
            columns=[self.columns[place] for place in kept],
            rows=[(label, [cells[place] for place in kept]) for label, cells in self.rows],
        )

    def is_prose(self, place: int) -> bool:
        """Return whether a column holds sentences."""
        return any(len(cells[place]) > PROSE for _, cells in self.rows)

    def _num_tables(self, width: int) -> int:
        return len(_laid_out([self._labels()], self._columns(), width)[1])

    def _labels(self) -> GridColumn:
        return GridColumn(self.corner, [label for label, _ in self.rows])

    def _columns(self) -> list[GridColumn]:
        return [GridColumn(head, [cells[place] for _, cells in self.rows]) for place, head in enumerate(self.columns)]


def _short(text: str, key: Key) -> str:
    """Shorten the name of an arm where it is alone, before a colon, or the base of a difference."""
    if text in key:
        return key[text].name
    name, colon, rest = text.partition(": ")
    if name in key:
        return f"{key[name].name}{colon}{rest}"
    what, against, name = text.partition(" vs ")
    return f"{what}{against}{key[name].name}" if name in key else text


def tables(
    title: str,
    labels: list[GridColumn],
    columns: list[GridColumn],
    width: int,
    colours: Mapping[str, str] | None = None,
    row_colours: Sequence[str] = (),
) -> Iterator[Table]:
    """Yield tables no wider than this that together show all columns, in order; each table has all labels.

    Args:
        title: the title of the first.
        labels: the columns that each of them has.
        columns: the columns that are divided among the tables.
        width: the number of character cells.
        colours: the colours of heads and cells that have one.
        row_colours: the colour of each row's labels, or none.
    """
    tints = colours or {}
    row_tints = list(row_colours) or [""] * len(labels[0].cells)
    label_widths, groups = _laid_out(labels, columns, width)
    for number, (places, widths) in enumerate(groups):
        table = Table(title=None if number else title, title_justify="left", caption_justify="left", pad_edge=False)
        shown = [
            *zip(labels, label_widths, strict=True),
            *((columns[p], w) for p, w in zip(places, widths, strict=True)),
        ]
        for place, (column, its_width) in enumerate(shown):
            table.add_column(
                folded(column.head, its_width),
                justify="left" if place < len(labels) else "right",
                width=its_width,
                overflow="fold",
                header_style=f"bold {tints[column.head]}" if column.head in tints else "",
            )
        for tint, *cells in zip(row_tints, *(column.cells for column, _ in shown), strict=True):
            table.add_row(
                *(
                    Text(folded(cell, its_width), tints.get(cell, tint if place < len(labels) else ""))
                    for place, (cell, (_, its_width)) in enumerate(zip(cells, shown, strict=True))
                )
            )
        yield table


def folded(text: str, width: int) -> str:
    """Break a text into lines no wider than this: between words, else after a sign within a word, else anywhere."""
    lines: list[str] = []
    for word in _WORD.findall(printable(text)):
        if lines and cell_len(lines[-1]) + 1 + cell_len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines += [word] if cell_len(word) <= width else _broken(word, width)
    return "\n".join(lines)


def _broken(word: str, width: int) -> list[str]:
    """Break a word that is too long."""
    lines = [""]
    for piece in _PIECE.findall(word):
        if cell_len(lines[-1] + piece.rstrip()) <= width:
            lines[-1] += piece
        else:
            lines += chop_cells(piece, width)
    return [line.rstrip() for line in lines if line.strip()]


Group = tuple[list[int], list[int]]
"""Indices of columns that fit side by side, and their widths."""


def _laid_out(labels: list[GridColumn], columns: list[GridColumn], width: int) -> tuple[list[int], list[Group]]:
    """Return the width of the labels, and which columns are side by side."""
    sizes = [(_least(column), _widest([column.head, *column.cells])) for column in columns]
    label_widths = _label_widths(labels, width, sum(least + FRAME for least, _ in sizes))
    room = max(width - sum(label_widths) - FRAME * len(labels) + 1, FRAME + 1)
    sizes = [(min(least, room - FRAME), liked) for least, liked in sizes]
    return label_widths, list(_groups(sizes, room))


def _label_widths(labels: list[GridColumn], width: int, needed: int) -> list[int]:
    """Return the width of the labels: what the columns leave or, if not all fit, a third, or what they need."""
    sizes = [(_least(label), max(_widest(label.cells), _least(GridColumn(label.head, [])))) for label in labels]
    least, liked = (sum(each) for each in zip(*sizes, strict=True))
    left = width - needed - FRAME * len(labels) + 1
    room = left if left >= min(liked, max(LABEL, least)) else max(width // 3, min(least, width // 2), len(labels))
    if least > room:
        sizes = [(1, wide) for _, wide in sizes]
    return _widened(sizes, room - sum(narrow for narrow, _ in sizes))


def _groups(columns: list[tuple[int, int]], room: int) -> Iterator[Group]:
    """Divide columns, by minimum and preferred widths, into groups that fit this room; return indices and widths."""
    groups: list[list[int]] = [[]]
    for place, (least, _) in enumerate(columns):
        if groups[-1] and sum(columns[one][0] + FRAME for one in groups[-1]) + least + FRAME > room:
            groups.append([])
        groups[-1].append(place)
    for group in groups:
        spare = room - sum(columns[place][0] + FRAME for place in group)
        yield group, _widened([columns[place] for place in group], spare)


def _least(column: GridColumn) -> int:
    """Return the width at which no short word and no short cell is broken."""
    heads = [
        piece
        for word in column.head.split()
        for piece in ([word] if cell_len(word) <= UNBROKEN else _PIECE.findall(word))
    ]
    return min(max(_widest(heads), _widest(column.cells)), UNBROKEN)


def _widened(columns: list[tuple[int, int]], spare: int) -> list[int]:
    """Widen columns from the minimum towards the preferred width, narrowest first, as far as there is room."""
    widths = [least for least, _ in columns]
    for _ in range(spare):
        narrow = [place for place, (_, liked) in enumerate(columns) if widths[place] < liked]
        if narrow:
            widths[min(narrow, key=widths.__getitem__)] += 1
    return widths


def _widest(texts: Iterable[str]) -> int:
    return max((cell_len(printable(text)) for text in texts), default=0)
