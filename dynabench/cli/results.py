"""Commands that read results: report, compare, export."""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from dynabench.cli.groups import plain_errors
from dynabench.terminal import Terminal
from foundation.errors import UserError
from foundation.files import new_file
from foundation.text import printable
from reports import exports, folder, gate, tables
from reports.summary import Summary, summarize


def report(results: Path, /, *, metrics_like: Literal["aiperf", "vllm", "guidellm"] | None = None) -> None:
    """Write summary, charts and report of a results folder again.

    Args:
        results: the folder.
        metrics_like: print the figures once more as another tool would define them.
    """
    manifest, summary = folder.rebuild(results)
    console = Terminal()
    print_summary(manifest, summary, console)
    if metrics_like is not None:
        print_like(results, metrics_like, console)
    console.print(f"report: {results / 'report.html'}", soft_wrap=True)


def compare(
    results: list[Path],
    /,
    *,
    out: Path | None = None,
    fail_if: tuple[str, ...] = (),
    markdown: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Put earlier runs side by side, the first as the baseline; exit with 1 if one of them is not valid.

    Args:
        results: results folders.
        out: write a results folder of the comparison, with charts and report.
        fail_if: exit with 1 if an arm is worse than the baseline by more than this, such as 'ttft.p90 > +5%' or
            'throughput < -3%', beyond noise; may be repeated.
        markdown: print a Markdown summary, for a pull request.
    """
    with plain_errors():
        gates = [gate.parse(text) for text in fail_if]
    if out is not None:
        folder.check_new(out)
    console = Terminal()
    manifest, runs = folder.combine(results)
    summary = summarize(runs) if out is None else folder.write(out, manifest, runs)
    found = gate.results(summary, gates)
    failures = [result.text for result in found if result.has_failed]
    if markdown:
        print(tables.markdown(summary, manifest, failures))
    else:
        print_summary(manifest, summary, console)
        for result in found:
            console.print(f"{'failed' if result.has_failed else 'passed'}: {result.text}", soft_wrap=True)
    if out is not None:
        print(printable(f"report: {out / 'report.html'}"), file=sys.stderr if markdown else sys.stdout)
    return 1 if failures or not summary.is_valid else 0


def export(results: Path, out: Path, /, *, to: Literal["csv", "parquet", "json", "llm-d"] = "csv") -> None:
    """Write a results folder's figures in another form.

    Args:
        results: the folder.
        out: the file to write; it must not exist.
        to: csv or parquet (a row per request), json (the summary, with its schema), llm-d (a Benchmark Report per arm).
    """
    manifest, runs = folder.read(results)
    try:
        data = exports.export(manifest, runs, to)
    except ValueError as error:
        raise UserError(f"{results}: {error}") from error
    with new_file(out) as file:
        file.write(data)
    print(printable(str(out)))


def print_summary(manifest: dict[str, Any], summary: Summary, console: Terminal) -> None:
    """Print what was run and what was found, and before all else whether it counts."""
    for note in tables.notes(summary):
        console.print(f"not valid: {note}", style="red", soft_wrap=True)
    for line in filter(None, tables.heading(manifest)):
        console.print(line, soft_wrap=True)
    for grid in (tables.comparison(summary), *tables.grids(summary)):
        for table in grid.tables(console.width):
            console.print(table)
    console.print(summary.verdict)
    for line in tables.limits(summary):
        console.print(line, soft_wrap=True)
    for arm, figures in summary.arms.items():
        for remark in figures.remarks:
            console.print(f"{arm}: {remark}", soft_wrap=True)


def print_like(out: Path, tool: str, console: Terminal) -> None:
    """Print the figures of a results folder as another tool would define them."""
    console.print(tables.like_table(folder.read(out)[1], tool))
