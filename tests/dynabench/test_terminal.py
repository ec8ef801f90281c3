"""What commands show on a terminal: arms have the names, the colours and the order of the report's key."""

import os
import re
import sys

import pexpect
import pytest
from rich.color import Color, ColorSystem

from reports.key import key_of
from tests.support.commands import dynabench
from tests.support.waiting import PATIENCE_S

SMALL = ("--max-requests", "60", "--workers", "2", "--rate-scale", "4")
MODES = ("least-loaded", "kv", "round-robin")
COLOURED = re.compile(r"\x1b\[(?:1;)?38;5;(\d+)m([^\x1b]*)")
PAINT = re.compile(r"\x1b\[[^a-zA-Z]*[a-zA-Z]")
KEYED = re.compile(r'<label title="([^"]*)">.*?<span>([^<]*)</span>')


def in_terminal(*arguments, columns, **environment):
    """Run a command in a terminal of 256 colours; return all that it shows."""
    known = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    child = pexpect.spawn(
        sys.executable, ["-m", "dynabench", *map(str, arguments)], env=known | {"TERM": "xterm-256color"} | environment,
        encoding="utf8", timeout=PATIENCE_S, dimensions=(50, columns),
    )  # fmt: skip
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0, child.before
    return child.before


def colours_of(key):
    """Return the number that each name of a key has on a terminal of 256 colours."""
    return {entry.name: str(Color.parse(entry.dark).downgrade(ColorSystem.EIGHT_BIT).number) for entry in key.values()}


def in_report(out):
    """Return the key of a report: whole names, and short ones."""
    return dict(KEYED.findall((out / "report.html").read_text()))


def seen(text, names):
    """Return the colour of each of these names in the order in which they come first; the progress bar has others."""
    found = {}
    for colour, said in COLOURED.findall(text):
        if (name := said.strip()) in names:
            found.setdefault(name, set()).add(colour)
    return found


def modes(names):
    return [flag for mode in names for flag in ("--router-mode", mode)]


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("names", [MODES[:2], MODES])
def test_a_comparison_has_the_key_of_its_report(tmp_path, names, columns):
    text = in_terminal("simulate", *modes(names), *SMALL, "--out", tmp_path / "out", columns=columns)
    key = key_of(names)
    assert in_report(tmp_path / "out") == {mode: key[mode].name for mode in names}
    assert seen(text, names) == {name: {colour} for name, colour in colours_of(key).items()}
    assert list(seen(text, names)) == list(names)
    rows = [line for line in PAINT.sub("", text).splitlines() if line[:1] in ("┃", "│")]
    assert max(map(len, rows)) <= columns


COPIED = ("report: ", "  --step-", "Try first: ")
"""How lines begin that are copied, which stay lines at any width."""


def test_what_a_comparison_says_is_wrapped_on_a_narrow_terminal_and_in_a_pipe(tmp_path):
    words = ("simulate", *modes(MODES[1:]), *SMALL)
    in_pipe = dynabench(*words, "--out", tmp_path / "pipe", env={"COLUMNS": "60"}).stdout
    on_terminal = PAINT.sub("", in_terminal(*words, "--out", tmp_path / "terminal", columns=60))
    for text in (in_pipe, on_terminal):
        assert "so the load was never steady" in " ".join(text.split())
        lines = [line for line in text.splitlines() if not line.startswith(COPIED) and "\r" not in line]
        assert max(map(len, lines)) <= 60


@pytest.mark.parametrize("words", [("hardware",), ("modes",), ("model", "openai/gpt-oss-120b", "--gpu", "h200")])
def test_lists_are_as_wide_as_columns_says_and_lines_in_a_pipe_without_it(words):
    narrow = dynabench(*words, env={"COLUMNS": "60"}).stdout
    assert max(len(line) for line in narrow.splitlines() if not line.startswith(COPIED)) <= 60
    assert max(map(len, dynabench(*words).stdout.splitlines())) > 80  # in a pipe of no width


@pytest.mark.parametrize("columns", ["0", "-1", "abc", "1"])
@pytest.mark.parametrize("words", [("--help",), ("plan", "--help"), ("hardware",), ("model", "Qwen/Qwen3-8B")])
def test_what_is_no_width_is_ignored(words, columns):
    done = dynabench(*words, env={"COLUMNS": columns})
    assert (done.returncode, done.stderr, done.stdout) == (0, "", dynabench(*words).stdout)


def test_the_live_view_and_the_tables_after_it_have_one_key(tmp_path):
    names = MODES[:2]
    text = in_terminal("run", *modes(names), *SMALL, "--out", tmp_path / "out", columns=80)
    colours = colours_of(key_of(names))
    assert list(in_report(tmp_path / "out")) == list(names)
    live = [f"{name} ({place}/2)" for place, name in enumerate(names, 1)]
    assert seen(text, live) == {title: {colours[name]} for title, name in zip(live, names, strict=True)}
    assert seen(text, names) == {name: {colour} for name, colour in colours.items()}


def test_a_sweep_has_the_key_of_its_report(tmp_path):
    vary = ("--vary", "max_num_seqs=16,8", "--vary", "workers=1,2,3")
    text = in_terminal("sweep", "--router-mode", "kv", *vary, *SMALL, "--out", tmp_path / "out", columns=120)
    arms = [f"max_num_seqs {value}" for value in (16, 8)]
    assert list(in_report(tmp_path / "out")) == arms
    lines = [line for line in text.splitlines() if line.startswith("│")]
    shown = [seen(line, {"16", "8"}) for line in lines]
    colours = list(colours_of(key_of(arms)).values())
    assert shown == [{"16": {colours[0]}}] * 3 + [{"8": {colours[1]}}] * 3


def test_without_colours_a_terminal_shows_the_same_names_in_the_same_order(tmp_path):
    text = in_terminal("simulate", *modes(MODES), *SMALL, "--out", tmp_path / "out", columns=80, NO_COLOR="1")
    assert "38;5;" not in text
    (head, *_) = (line for line in text.splitlines() if line.startswith("┃"))
    assert sorted(MODES, key=head.index) == list(MODES)


def test_the_layouts_of_a_plan_have_whole_names_in_the_colours_of_its_report(tmp_path):
    model = ("--model", "Qwen/Qwen3-8B", "--price", "h100=2.5", "--price", "h200=3.9", "--tensor-parallel-size", "1")
    shape = ("--rate-scale", "3", "--max-requests", "300", "--max-num-batched-tokens", "2048", "--loads", "1")
    limits = ("--slo", "ttft.p90 <= 400ms")
    text = in_terminal("plan", *model, *shape, *limits, "--out", tmp_path / "out", columns=120)
    layouts = in_report(tmp_path / "out")
    assert set(layouts) == {"gpu h100, TP 1, chunk 2048", "gpu h200, TP 1, chunk 2048"}
    colours = colours_of(key_of(list(layouts)))
    assert seen(text, layouts) == {arm: {colours[short]} for arm, short in layouts.items()}
