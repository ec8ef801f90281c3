"""Flags of dynabench that pages show, also where nothing runs them, are ones that a command takes, as often as shown."""

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from dynabench.cli.app import COMMANDS, app

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name not in ("reference", "decisions")),
]
LINE = re.compile(r"^(?: {4}|\$ )(?:\S+/)?dynabench ([a-z].*)$", re.MULTILINE)
INLINE = re.compile(r"`(?:dynabench ([a-z][^`]*)|(--[a-z][^`]*))`")
QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
REST = re.compile(r"\s#.*|\s--\s.*|[|;&<>()].*|\s\.\.\..*| {3,}.*")
"""What follows a command: a comment, another program's flags or command, what a page leaves out or explains."""
FLAG = re.compile(r"(?<!\S)--[a-z][a-z0-9-]*")
OF_OTHERS = {"vllm"}
"""Commands that take the flags of other programs."""


def shown(page: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each command of a page with its flags, and each snippet of several flags, whose command is "" then."""
    joined = page.replace("\\\n", " ")
    for line in [*LINE.findall(joined), *(command or flags for command, flags in INLINE.findall(joined))]:
        words = REST.sub("", QUOTED.sub("''", " ".join(line.split("\n"))))
        flags = FLAG.findall(words)
        command = re.match(r"[a-z]+(?: (?:convert|fit|formats|inspect|merge|synth))?(?=\s|$)", words)
        if command and command[0].split()[0] in COMMANDS.keys() - OF_OTHERS:
            yield command[0], flags
        elif not command and len(flags) > 1:
            yield "", flags


@cache
def taken(command: str) -> dict[str, bool]:
    """Return the flags of a command, and whether each may be repeated."""
    program = app
    for word in command.split():
        program = program[word]
    arguments = program.assemble_argument_collection()
    return {name: argument.token_count()[1] for argument in arguments if argument.parse for name in argument.names}


def problems(command: str, flags: list[str]) -> list[str]:
    """Return why a command does not take its flags."""
    known = taken(command)
    found = [f"{command} has no {flag}" for flag in flags if flag not in known]
    return found + [
        f"{flag} is repeated" for flag, count in Counter(flags).items() if count > 1 and not known.get(flag)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_command_takes_the_flags_that_a_page_shows(page):
    for command, flags in shown(page.read_text()):
        every = [command] if command else COMMANDS.keys() - OF_OTHERS - {"workload"}
        of_each = {name: problems(name, flags) for name in every}
        assert not all(of_each.values()), f"{flags}: {of_each[command] if command else 'no command takes these'}"


def test_flags_of_each_command_and_of_snippets_are_found_without_those_of_others():
    page = """
    dynabench simulate x.jsonl --slo 'ttft.p99 <= 2s --not' --workers \\
        4 -- --theirs        # --said
Use `dynabench workload inspect F`, and `--gpu h100 --gpu a100` or `--alone`.
"""
    assert list(shown(page)) == [
        ("simulate", ["--slo", "--workers"]),
        ("workload inspect", []),
        ("", ["--gpu", "--gpu"]),
    ]
    assert problems("plan", ["--gpu", "--gpu", "--slo", "--slo", "--nonsense"]) == [
        "plan has no --nonsense",
        "--gpu is repeated",
    ]
