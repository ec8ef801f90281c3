"""Tables on terminals that are too narrow for them."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from dynabench.terminal import Terminal
from reports.key import key_of
from reports.tables.grid import Grid, GridColumn, folded, tables

ARMS = [f"transfer_bandwidth_gb_s {speed}, prefill_workers {number}" for speed in (10, 20) for number in (1, 2, 3)]


def printed(tables, width):
    """Return the lines of each table."""
    found = []
    for table in tables:
        terminal = Terminal(file=io.StringIO(), width=width)
        terminal.print(table)
        found.append(terminal.file.getvalue().splitlines())
    return found


def heads(lines):
    """Return the heads of a table's columns, put together again."""
    parts = [line.strip("┃").split("┃") for line in lines if line.startswith("┃")]
    return ["".join(column).replace(" ", "") for column in zip(*parts, strict=True)][1:]


def side_by_side(arms, width):
    """Return the tables of one figure, a column for each arm."""
    columns = [GridColumn(arm, [f"{place:,}.5"]) for place, arm in enumerate(arms)]
    return printed(tables("Arms compared", [GridColumn("", ["TTFT mean (ms)"])], columns, width), width)


@pytest.mark.parametrize("width", [40, 70, 120, 300])
def test_arms_whose_names_begin_alike_are_told_apart(width):
    found = [head for lines in side_by_side(ARMS, width) for head in heads(lines)]
    assert found == [arm.replace(" ", "") for arm in ARMS]


@pytest.mark.parametrize("width", [40, 70, 120, 300])
def test_no_figure_is_cut_or_broken(width):
    text = "\n".join("\n".join(lines) for lines in side_by_side(ARMS, width))
    assert "…" not in text
    assert all(f" {place:,}.5" in text for place in range(len(ARMS)))


def test_what_fits_is_one_table_under_one_title():
    (lines,) = side_by_side(["a", "b"], 70)
    assert lines[0].strip() == "Arms compared"
    assert len(side_by_side(ARMS, 70)) == 2


def test_columns_that_do_not_fit_stand_below_under_the_same_labels():
    first, second = side_by_side(ARMS, 70)
    assert [line.split("│")[1].strip() for line in first if "mean" in line] == ["TTFT mean (ms)"]
    assert [line.split("│")[1].strip() for line in second if "mean" in line] == ["TTFT mean (ms)"]


@given(
    arms=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=60), min_size=1, max_size=6),
    label=st.text(max_size=60),
    width=st.integers(24, 200),
)
def test_no_table_is_wider_than_the_terminal(arms, label, width):
    for lines in printed(Grid("", arms, [(label, ["1,234"] * len(arms))]).tables(width), width):
        assert max(cell_len(line) for line in lines) <= width


def test_what_does_not_fit_side_by_side_has_a_row_each():
    (lines,) = printed(Grid("Arms compared", ARMS, [("TTFT mean (ms)", ["1.5"] * len(ARMS))]).tables(70), 70)
    assert [line.split("│")[1].strip() for line in lines if "1.5" in line] == ARMS


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("max num batched tokens", 8, ["max num", "batched", "tokens"]),
        ("-9.4% [-14.1, -4.8]", 15, ["-9.4%", "[-14.1, -4.8]"]),
        ("-9.4% [-14.1, +4.8] ~", 15, ["-9.4%", "[-14.1, +4.8] ~"]),
        ("transfer_bandwidth_gb_s 10", 12, ["transfer_", "bandwidth_", "gb_s 10"]),
        ("round-robin", 8, ["round-", "robin"]),
        ("incomprehensible", 8, ["incompre", "hensible"]),
    ],
)
def test_texts_are_folded_between_words_then_behind_signs(text, width, lines):
    assert folded(text, width).split("\n") == lines


def test_arms_have_the_names_and_colours_of_the_key():
    names = ["kv, num_gpu_blocks 100", "random, num_gpu_blocks 100"]
    key = key_of(names)
    (table,) = Grid("", names, [("TTFT", ["1", "2"])]).tables(80, key)
    assert [column.header for column in table.columns][1:] == [key[name].name for name in names] == ["kv", "random"]
    assert [column.header_style for column in table.columns][1:] == [f"bold {key[name].dark}" for name in names]


def test_the_short_name_of_an_arm_also_stands_before_a_colon_and_after_vs():
    rows = [(f"{ARMS[0]}: host memory", ["1"]), (f"TTFT mean vs {ARMS[0]}", ["2"]), ("a: b", ["3"])]
    (lines,) = printed(Grid("t", ["figure"], rows).tables(200, key_of(ARMS)), 200)
    name = key_of(ARMS)[ARMS[0]].name
    assert [line.split("│")[1].strip() for line in lines if line.startswith("│")] == [
        f"{name}: host memory", f"TTFT mean vs {name}", "a: b",
    ]  # fmt: skip
