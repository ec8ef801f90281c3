"""Commands that read results: report, compare, export."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from dynabench.api.result import Result, SweepResult
from dynabench.api.text import print_summary, print_sweep
from dynabench.cli.gates import (
    CompareGate,
    CompareGateConfig,
    GateConfig,
    checks_of,
    checks_of_sweep,
    finish,
    gates_as_json,
    print_results,
    wall_s_of,
    wall_s_of_sweep,
)
from dynabench.cli.groups import Output, OutputConfig, RunsOutput, RunsOutputConfig, plain_errors
from dynabench.terminal import Terminal
from foundation.errors import UserError
from foundation.files import new_file
from foundation.text import printable
from reports import exports, folder, pictures, theirs
from reports.gate import POINTS, RUNS, of_summary, of_sweep
from reports.key import key_of
from reports.summarize import summary_of
from reports.summary import Summary
from reports.sweep import report as sweep_report
from reports.tables import comparison as tables
from reports.theirs import comparison as their_table
from reports.verdicts import headline


def report(
    results: Path,
    /,
    *,
    metrics_like: Literal["aiperf", "vllm", "guidellm"] | None = None,
    output: Output = OutputConfig(),  # noqa: B008 (frozen)
) -> None:
    """Write the summary, charts and report of a results folder again.

    Args:
        results: The folder.
        metrics_like: Also print the figures as another tool would define them.
        output: What to print.
    """
    manifest, summary = folder.rebuild(results)
    console = output.terminal()
    print_summary(manifest, summary, console, is_whole=output.all_metrics)
    if metrics_like is not None:
        print_like(results, metrics_like, console)
    console.verbatim(f"report: {results / 'report.html'}")
    output.document(results, summary.as_json())


def compare(
    results: list[Path],
    /,
    *,
    out: Path | None = None,
    gate_config: CompareGate = CompareGateConfig(),  # noqa: B008 (frozen)
    output: RunsOutput = RunsOutputConfig(),  # noqa: B008
) -> int:
    """Compare earlier runs side by side, with the first as the baseline.

    Sweeps are merged into one table; they must have the same workload and limits. Files that other tools wrote are
    read too: AIPerf, guidellm, vllm bench serve, SGLang's bench_serving.

    Exit code 1: a run is not valid, or --fail-if applies.

    Args:
        results: Results folders, folders of sweeps, or files of other tools.
        out: Write a results folder for the comparison, with charts and report.
        gate_config: When to exit with 1.
        output: What to print.
    """
    if any(theirs.is_theirs(each) for each in results):
        return _compare_theirs(results, out, gate_config, output)
    if out is not None:
        folder.check_new(out)
    if swept := next(filter(sweep_report.is_sweep, results), None):
        if output.markdown:
            raise UserError(f"--markdown applies to runs, but {swept} is a {folder.sweep_kind(swept)}")
        return _compare_sweeps(results, out, gate_config, output)
    with plain_errors():
        gate_config.gates(RUNS)
    manifest, runs = folder.combine(results)
    summary = summary_of(manifest, runs) if out is None else folder.write(out, manifest, runs)
    return finish_runs(Result(out, manifest, summary, runs), gate_config, output)


def finish_runs(
    result: Result, gate_config: GateConfig, output: RunsOutputConfig, *, metrics_like: str | None = None
) -> int:
    """Print a comparison, as Markdown if requested, and the results of its gates; return the exit code."""
    manifest, summary, out = result.manifest, result.summary, result.folder
    console, found = output.terminal(), of_summary(summary, gate_config.gates(RUNS), manifest["left_out"])
    if output.markdown:
        print(tables.markdown(summary, manifest, found))
    else:
        print_summary(manifest, summary, console, is_whole=output.all_metrics)
    print_results(found, console)
    if metrics_like is not None and out is not None:
        print_like(out, metrics_like, console)
    if out is not None:
        console.verbatim(f"report: {out / 'report.html'}")
    output.document(out, summary.as_json() | gates_as_json(found))
    checks, wall_s = checks_of(summary), wall_s_of(manifest)
    return finish(gate_config, manifest["title"], checks, found, wall_s=wall_s, console=console)


def _compare_theirs(results: list[Path], out: Path | None, gate_config: GateConfig, output: RunsOutputConfig) -> int:
    """Compare runs of which some were measured by other tools."""
    file = next(each for each in results if theirs.is_theirs(each))
    if out is not None:
        raise UserError(f"--out needs results folders, but {file} is the output of another tool")
    with plain_errors():
        gates = gate_config.gates(RUNS)
    if scheduled := [gate for gate in gates if gate.metric in ("ttft", "e2e")]:
        raise UserError(f"fail_if '{scheduled[0]}': other tools measure from sending; use {scheduled[0].metric}_sent")
    found = theirs.read_all(results)
    summary, console = their_table.summarize(found), output.terminal()
    judged = of_summary(summary, gates)
    if output.markdown:
        print(their_table.markdown(found))
    else:
        print_theirs(found, summary, console, is_whole=output.all_metrics)
    print_results(judged, console)
    lacks = {name: list(run.lacks) for name, run in found.items()}
    output.document(None, summary.as_json() | {"lacks": lacks} | gates_as_json(judged))
    return finish(gate_config, their_table.TITLE, checks_of(summary), judged, wall_s={}, console=console)


def print_theirs(found: Mapping[str, theirs.Measured], summary: Summary, console: Terminal, *, is_whole: bool) -> None:
    """Print runs of several tools, and what is not known of them."""
    for note in headline.notes(summary):
        console.item(f"not valid: {note}", style="red")
    for table in their_table.grid(found, is_whole=is_whole).tables(console.width, key_of(list(found))):
        console.print(table)
    for line in (summary.verdict, *their_table.remarks(found)):
        console.say(printable(line))
    if not is_whole:
        console.say("More metrics: --all-metrics.")


def _compare_sweeps(results: list[Path], out: Path | None, gate_config: GateConfig, output: OutputConfig) -> int:
    if others := [each for each in results if not sweep_report.is_sweep(each)]:
        raise UserError(
            f"{others[0]} is not a sweep, but another folder is; compare sweeps with sweeps and runs with runs"
        )
    with plain_errors():
        gate_config.gates(POINTS)
    return finish_sweep(SweepResult(out, *sweep_report.combine(results, out)), gate_config, output, is_merged=True)


def finish_sweep(result: SweepResult, gate_config: GateConfig, output: OutputConfig, *, is_merged: bool = False) -> int:
    """Print a sweep and the results of its gates; return the exit code."""
    manifest, sweep, out = result.manifest, result.sweep, result.folder
    console, found = output.terminal(), of_sweep(sweep, gate_config.gates(POINTS), manifest.get("left_out", []))
    print_sweep(manifest, sweep, console, is_whole=output.all_metrics)
    print_results(found, console)
    if out is not None:
        console.verbatim(f"report: {out / 'report.html'}")
    content = (
        {"summary": msgspec.to_builtins(sweep)}
        if is_merged or out is None
        else json.loads((out / "sweep.json").read_text())
    )
    output.document(out, content | gates_as_json(found))
    checks, wall_s = checks_of_sweep(sweep), wall_s_of_sweep(sweep)
    return finish(gate_config, manifest["title"], checks, found, wall_s=wall_s, console=console)


def export(
    results: Path,
    out: Path,
    /,
    *,
    to: Literal[exports.File, exports.Folder, "png"] = "csv",
) -> None:
    """Export a results folder's figures or charts in another format.

    Args:
        results: The folder; for png, also that of a sweep or plan.
        out: The file to write (for aiperf, vllm-bench and png, the folder); it must not exist.
        to: What to write: csv or parquet (a row per request), csv-arms (a row per arm), json (the summary, with its
            schema), markdown (the table), openmetrics (for Prometheus), or what another tool would have written of each
            run: aiperf, guidellm, vllm-bench or sglang-bench (bench_serving); llm-d (a Benchmark Report per arm), png
            (the charts, one file each).
    """
    if to == "png":
        for picture in pictures.write(results, out):
            print(printable(str(picture)))
        return
    manifest, runs = folder.read(results)
    try:
        if to in exports.FOLDERS:
            _write_files(out, exports.export_files(manifest, runs, to))
            return
        data = exports.export(manifest, runs, to)
    except ValueError as error:
        raise UserError(f"{results}: {error}") from error
    with new_file(out) as file:
        file.write(data)
    print(printable(str(out)))


def _write_files(out: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a new folder, and print their names."""
    out.mkdir()
    for name, data in files.items():
        (out / name).parent.mkdir(exist_ok=True)
        with new_file(out / name) as file:
            file.write(data)
        print(printable(str(out / name)))


def print_like(out: Path, tool: str, console: Terminal) -> None:
    """Print the figures of a results folder as another tool would define them."""
    runs = folder.read(out)[1]
    key = key_of(list(dict.fromkeys(run.arm for run in runs)))
    for table in tables.like_grid(runs, tool).tables(console.width, key):
        console.print(table)
