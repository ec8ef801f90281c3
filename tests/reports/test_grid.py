"""Tables on terminals that are too narrow for them."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from dynabench.terminal import Terminal
from reports.grid import Grid

ARMS = [f"transfer_bandwidth_gb_s {speed}, prefill_workers {number}" for speed in (10, 20) for number in (1, 2, 3)]


def printed(grid, width):
    """Return the lines of each of its tables."""
    found = []
    for table in grid.tables(width):
        terminal = Terminal(file=io.StringIO(), width=width)
        terminal.print(table)
        found.append(terminal.file.getvalue().splitlines())
    return found


def heads(lines):
    """Return the heads of a table's columns, put together again."""
    parts = [line.strip("┃").split("┃") for line in lines if line.startswith("┃")]
    return ["".join(column).replace(" ", "") for column in zip(*parts, strict=True)][1:]


def grid(arms):
    return Grid("Arms compared", arms, [("TTFT mean (ms)", [f"{place:,}.5" for place in range(len(arms))])])


@pytest.mark.parametrize("width", [40, 70, 120, 300])
def test_arms_whose_names_begin_alike_are_told_apart(width):
    found = [head for lines in printed(grid(ARMS), width) for head in heads(lines)]
    assert found == [arm.replace(" ", "") for arm in ARMS]


@pytest.mark.parametrize("width", [40, 70, 120, 300])
def test_no_figure_is_cut_or_broken(width):
    text = "\n".join("\n".join(lines) for lines in printed(grid(ARMS), width))
    assert "…" not in text
    assert all(f" {place:,}.5" in text for place in range(len(ARMS)))


def test_what_fits_is_one_table_under_one_title():
    (lines,) = printed(grid(["a", "b"]), 70)
    assert lines[0].strip() == "Arms compared"
    assert len(printed(grid(ARMS), 70)) == 2


def test_columns_that_do_not_fit_stand_below_under_the_same_labels():
    first, second = printed(grid(ARMS), 70)
    assert [line.split("│")[1].strip() for line in first if "mean" in line] == ["TTFT mean (ms)"]
    assert [line.split("│")[1].strip() for line in second if "mean" in line] == ["TTFT mean (ms)"]


@given(
    arms=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=60), min_size=1, max_size=6),
    label=st.text(max_size=60),
    width=st.integers(24, 200),
)
def test_no_table_is_wider_than_the_terminal(arms, label, width):
    for lines in printed(Grid("", arms, [(label, ["1,234"] * len(arms))]), width):
        assert max(cell_len(line) for line in lines) <= width
