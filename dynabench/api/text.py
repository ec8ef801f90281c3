"""Results as text: what commands print, and what Python shows of a result."""

import io
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from dynabench.api.wording import in_python
from dynabench.terminal import Terminal
from reports.capacity import answer as capacity
from reports.capacity.answer import PlanAnswer
from reports.key import key_of, with_short_names
from reports.summary import Summary
from reports.sweep import report as sweep_report
from reports.sweep import table as sweep_table
from reports.sweep.points import Sweep
from reports.tables import comparison as tables
from reports.tables import use as use_tables
from reports.tables.grid import Grid
from reports.verdicts import headline

REASONS = 4
"""The most reasons for impossible layouts that are printed."""


def print_summary(
    manifest: dict[str, Any], summary: Summary, console: Terminal, *, is_whole: bool = False, has_hint: bool = True
) -> None:
    """Print what was run and what was found, and first of all whether it is valid; with `has_hint`, also the flag for more."""
    for note in headline.notes(summary):
        console.item(f"not valid: {note}", style="red")
    _print_heading(headline.heading(manifest), headline.qualified(headline.head(manifest)), console)
    key = key_of(list(summary.arms))
    compared = tables.comparison(summary, is_whole=is_whole)
    for grid in (compared, *use_tables.grids(summary, is_whole=is_whole)):
        for table in grid.tables(console.width, key):
            console.print(table)
    if unknown := tables.too_few(compared.rows):
        console.say(unknown)
    for entry in key.values():
        if entry.name != entry.arm:
            console.say(f"{entry.name}: {entry.arm}")
    console.say(with_short_names(summary.verdict, key))
    for line in headline.limits(summary):
        console.item(with_short_names(line, key))
    for line in headline.remarks(summary):
        console.say(with_short_names(line, key))
    print_elsewhere(manifest, console)
    if has_hint and not is_whole:
        console.say("More metrics: --all-metrics, or the report.")


def _print_heading(what: Sequence[str], facts: Sequence[str], console: Terminal) -> None:
    """Print what was run, and what a reader should know before the figures."""
    for line in filter(None, what):
        console.say(line)
    for fact in facts:
        console.say(fact)


def print_elsewhere(manifest: dict[str, Any], console: Terminal) -> None:
    """Print what other routers call the compared router modes."""
    if named := headline.elsewhere(manifest):
        console.say(f"\n{tables.ELSEWHERE}:")
    for mode, where in named.items():
        console.entry(mode, where)


def print_sweep(manifest: dict[str, Any], sweep: Sweep, console: Terminal, *, is_whole: bool) -> None:
    """Print what was swept, and what was found."""
    _print_heading(headline.heading(manifest), headline.qualified(headline.head(manifest)), console)
    key, shown = sweep_report.key_of_rows(sweep)
    colours = [entry.dark if entry else "" for entry in shown]
    for table in sweep_table.tables(sweep, console.width, is_whole=is_whole, colours=colours):
        console.print(table)
    for grid in sweep.grids:
        for table in grid.tables(console.width, key):
            console.print(table)
    if unknown := tables.too_few(zip(sweep.columns, zip(*sweep.rows, strict=True), strict=False)):
        console.say(unknown)
    console.say(sweep.verdict)
    print_elsewhere(manifest, console)


def print_plan(answer: PlanAnswer, console: Terminal) -> None:
    """Print what a plan found."""
    what = [f"{answer.title}: {answer.subtitle}", *headline.understood(answer.head)]
    _print_heading(what, headline.qualified(answer.head), console)
    # Row labels are folded, so there is room for full names.
    key = {name: replace(entry, name=name) for name, entry in capacity.key(answer).items()}
    for grid in capacity.grids(answer):
        for table in grid.tables(console.width, key):
            console.print(table)
        if grid.note:
            console.say(grid.note)
    reasons = list(capacity.impossible(answer))
    for reason in reasons[:REASONS]:
        console.item(f"impossible: {reason}")
    if len(reasons) > REASONS:
        console.say(f"impossible for {len(reasons) - REASONS} more reasons, in plan.json")
    console.say(answer.verdict)
    for note in answer.notes:
        console.say(note)
    for sure in answer.sureness:
        console.say(sure.text)
    if any(sure.has_interval for sure in answer.sureness):
        console.say(capacity.COVERED)
    for line in answer.commands:
        console.verbatim(line)
    console.say(f"{answer.simulated} simulations, {answer.wall_s:.0f} s")


def text_of(show: Callable[[Terminal], object]) -> str:
    """Return what something prints, for the width of this terminal."""
    file = io.StringIO()
    width = shutil.get_terminal_size((110, 24)).columns
    show(_InPython(file=file, width=width, force_jupyter=False))  # in a notebook, rich would display it instead
    return file.getvalue().rstrip()


class _InPython(Terminal):
    """A terminal on which sentences name arguments instead of flags."""

    def say(self, text: str, **options: Any) -> None:
        super().say(in_python(text), **options)

    def item(self, text: str, **options: Any) -> None:
        super().item(in_python(text), **options)


def html_of(title: str, verdict: str, grids: Iterable[Grid], lines: Iterable[str], details: Iterable[str]) -> str:
    """Return a result for a notebook: the verdict, its tables, what a reader should know, and, folded, what was run."""
    return "\n".join([
        f"<p><b>{escape(title)}</b></p>",
        _html_line(verdict),
        *map(_html_table, grids),
        *map(_html_line, filter(None, lines)),
        "<details><summary>What was run</summary>",
        *map(_html_line, filter(None, details)),
        "</details>",
    ])  # fmt: skip


def _html_line(text: str) -> str:
    return f"<p>{escape(in_python(text))}</p>"


def _html_table(grid: Grid) -> str:
    rows = "".join(
        f"<tr><th>{escape(label)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for label, cells in grid.rows
    )
    heads = "".join(f"<th>{escape(column)}</th>" for column in grid.columns)
    return f"<table><caption>{escape(grid.title)}</caption><thead><tr><th></th>{heads}</tr></thead><tbody>{rows}</tbody></table>"
