"""Commands that list what can be chosen."""

import re
from pathlib import Path

import pytest

from dynabench.cli.lists import FIRST
from serving.router import ROUTER_MODES
from serving.router.elsewhere import name_elsewhere
from serving.router.policies.modes import SYMBOLS
from tests.dynabench.test_terminal import in_terminal
from tests.support.commands import dynabench

PAGE = Path(__file__).parents[2] / "docs" / "router-modes.md"
KNOWN = {symbol for symbols in SYMBOLS for symbol in symbols.split(", ")}


@pytest.mark.parametrize("name", ROUTER_MODES)
def test_each_symbol_of_a_formula_is_in_the_legend(name):
    text = re.sub(r"E\[out\]", "", ROUTER_MODES[name].description)
    used = set(re.findall(r"(?<![\w.'-])(?:[A-Z]|[b-z]|T\w|miss|decay|weight|alpha)(?![\w-])", text))
    assert used - KNOWN - {"x"} == set()  # 1.5 x the idlest


def test_the_page_has_the_legend_of_the_command():
    plain = re.sub(r"\]\([^)]*\)|[`\[]", "", PAGE.read_text())
    assert [name for name, text in SYMBOLS.items() if f"| {name.replace('[', '')} | {text} |" not in plain] == []


def test_the_page_has_the_names_in_other_routers():
    named = {name: where.split(", ") for name in ROUTER_MODES if (where := name_elsewhere(name))}
    expected = [f"| `{name}` | {'<br>'.join(f'`{one}`' for one in its)} |" for name, its in named.items()]
    shown = [line for line in PAGE.read_text().splitlines() if line in expected]
    assert shown == expected, "docs/router-modes.md: the table in 'In other routers' is not:\n" + "\n".join(expected)


def test_modes_names_what_other_routers_call_them():
    lines = dynabench("modes").stdout.splitlines()
    assert f"{'p2c':20} {name_elsewhere('p2c')}" in lines


def test_modes_says_which_to_try_first_and_explains_its_symbols():
    lines = dynabench("modes").stdout.splitlines()
    assert lines[0].startswith("Try first: dynabench simulate TRACE --router-mode round-robin --router-mode kv ")
    assert set(FIRST) <= set(ROUTER_MODES)
    begin = lines.index("") + 1  # after the reason, which is wrapped
    described = lines[begin : lines.index("", begin)]
    assert [line.split()[0] for line in described] == [*ROUTER_MODES]  # a line each in a pipe
    assert [line for line in lines if line.startswith("Q ")] == [f"{'Q':20} {SYMBOLS['Q']}"]


def test_modes_names_those_that_herd_and_the_way_out():
    text = dynabench("modes").stdout
    herding = {line.split()[0] for line in text.splitlines() if line.endswith(" Herds.")}
    assert herding == {name for name, kind in ROUTER_MODES.items() if kind.herds}
    assert "Add +bound(1.25) where bursts occur." in text


@pytest.mark.parametrize("columns", [40, 80, 120])
@pytest.mark.parametrize("command", [("modes",), ("planners",), ("hardware",), ("workload", "formats")])
def test_lists_are_wrapped_between_words_on_a_terminal(command, columns):
    shown = in_terminal(*command, columns=columns).replace("\r", "").splitlines()
    words = {word for line in dynabench(*command).stdout.splitlines() for word in line.split()}
    assert {word for line in shown for word in line.split()} <= words
    wide = [line for line in shown if len(line) > columns and not line.startswith("Try first")]
    assert not [line for line in wide if max(map(len, line.split())) < columns // 3]
