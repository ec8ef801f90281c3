"""What `simulate`, `run`, `sweep`, `plan` and `bench` return, and `load` reads from a folder."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dynabench.api import frames
from dynabench.api.arguments import path_of
from dynabench.api.deployment import Deployment
from dynabench.api.differences import ArmDifference, check_arm
from dynabench.api.plots import Plots
from dynabench.api.text import html_of, print_plan, print_summary, print_sweep, text_of
from dynabench.api.wording import in_python, plain_errors
from foundation.errors import UserError
from reports import folder as folders
from reports.capacity import answer as capacity
from reports.capacity.answer import PlanAnswer
from reports.key import key_of
from reports.record.records import Record
from reports.summarize import compared, summary_of
from reports.summary import ArmSummary, Summary
from reports.sweep.points import AnyPoint, Impossible, Point, SearchResult, Sweep
from reports.tables import comparison as tables
from reports.tables import use as use_tables
from reports.tables.grid import Grid
from reports.verdicts import headline

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


class Result:
    """What came of every arm of an experiment; shown as a table and a verdict.

    All times in frames and figures are in seconds unless their name says another unit.
    """

    def __init__(self, folder: Path | None, manifest: dict[str, Any], summary: Summary, runs: Sequence[Record]) -> None:
        """Hold an experiment: what `run_experiment` returns.

        Args:
            folder: where it is on the disk, if it was saved.
            manifest: everything needed to run it again and to understand it, as in `experiment.json`.
            summary: its figures and verdicts, as in `summary.json`.
            runs: what was measured.
        """
        self.folder, self._manifest, self.summary = folder, manifest, summary
        self._runs = list(runs)
        self._frames: dict[str, pd.DataFrame] = {}

    @property
    def manifest(self) -> dict[str, Any]:
        """Everything needed to run it again and to understand it: a copy."""
        return deepcopy(self._manifest)

    @property
    def arms(self) -> dict[str, ArmSummary]:
        """The figures of each arm, by name, the baseline first."""
        return dict(self.summary.arms)

    @property
    def verdict(self) -> str:
        """Which arm is best, by how much, and whether that is more than noise."""
        return in_python(self.summary.verdict)

    @property
    def is_complete(self) -> bool:
        """Whether nothing was interrupted."""
        return self.summary.is_complete

    @property
    def is_valid(self) -> bool:
        """Whether nothing makes a run invalid, such as too many failed requests."""
        return self.summary.is_valid

    @property
    def left_out(self) -> list[str]:
        """The arms that could not be tried, and why."""
        return list(map(in_python, self._manifest.get("left_out", [])))

    @property
    def requests(self) -> "pd.DataFrame":
        """One row per request, arm and repeat: its times (s), lengths (tokens) and metrics (s); see `columns`."""
        return self._frame("requests")

    @property
    def steps(self) -> "pd.DataFrame":
        """One row per series of engine steps that generate tokens for the same sequences; live: per chunk."""
        return self._frame("steps")

    @property
    def workers(self) -> "pd.DataFrame":
        """One row per worker, arm and repeat: what it answered."""
        return self._frame("workers")

    @property
    def events(self) -> "pd.DataFrame":
        """Everything that has a time, in order: the stages of each request, and changes of the fleet."""
        return self._frame("events")

    @property
    def columns(self) -> "pd.DataFrame":
        """The unit and the meaning of each column, by table and column."""
        return frames.columns()

    @plain_errors()
    def arrow(self, name: str = "requests") -> "pa.Table":
        """Return one of the tables as Arrow, for polars (`polars.from_arrow`) and other libraries; unknown values are null.

        Raises:
            UserError: there is no such table.
        """
        return frames.table(name, self._runs)

    @plain_errors()
    def compare(self, arm: str, to: str | None = None) -> ArmDifference:
        """Return how an arm differs from another, request by request.

        `result.compare("kv", to="round-robin").ttft.p90` has `value` and `interval` (s), `relative` and `verdict`.

        Args:
            arm: the arm.
            to: the arm that it is compared with (default: the baseline).

        Raises:
            UserError: there is no such arm.
        """
        to = self.summary.baseline if to is None else to
        for name in (arm, to):
            check_arm(name, self.arms)
        if arm == to:
            raise UserError(f"{arm} would be compared with itself; name another arm")
        smallest = self._manifest["smallest_difference"]
        return ArmDifference.of(arm, to, compared(self._runs, arm, to, smallest=smallest))

    @property
    def plot(self) -> Plots:
        """The report's charts, as axes of matplotlib: `result.plot.ttft_tails()`; `result.plot()` lists those that are not empty."""
        return Plots(self._runs, self.summary)

    @plain_errors()
    def save(self, folder: str | Path) -> Path:
        """Write the results folder, with report and charts, as the commands do.

        Raises:
            UserError: the folder exists, or cannot be written.
        """
        folder = path_of("folder", folder)
        folders.check_new(folder)
        folders.write(folder, self._manifest, self._runs)
        self.folder = folder
        return folder

    def __repr__(self) -> str:
        text = text_of(lambda console: print_summary(self._manifest, self.summary, console, has_hint=False))
        return "\n".join([text.rstrip(), *self._remarks()])

    def _repr_html_(self) -> str:
        compared = tables.comparison(self.summary, is_whole=False)
        grids = [_short(grid, list(self.arms)) for grid in (compared, *use_tables.grids(self.summary, is_whole=False))]
        lines = [
            *(f"not valid: {note}" for note in headline.notes(self.summary)),
            tables.too_few(compared.rows),
            *headline.limits(self.summary),
            *headline.remarks(self.summary),
            *self._remarks(),
        ]
        return html_of(self._manifest["title"], self.verdict, grids, lines, headline.whole_heading(self._manifest))

    def _remarks(self) -> Iterable[str]:
        yield from (f"left out: {reason}" for reason in self.left_out)
        if not self.is_complete:
            yield "interrupted: these are the results so far"

    def _frame(self, name: str) -> "pd.DataFrame":
        """Return a table as a frame that its user may change."""
        if name not in self._frames:
            self._frames[name] = frames.frame(name, self._runs, self.manifest)
        return self._frames[name].copy()


class SweepResult:
    """What a sweep or benchmark found at each point; its folder keeps the points, and the same call resumes it."""

    def __init__(self, folder: Path | None, manifest: dict[str, Any], sweep: Sweep) -> None:
        """Hold a sweep: what `run_sweep` and `run_bench` return."""
        self.folder, self._manifest, self.sweep = folder, manifest, sweep

    @property
    def manifest(self) -> dict[str, Any]:
        """Everything that was asked: a copy."""
        return deepcopy(self._manifest)

    @property
    def verdict(self) -> str:
        """The best point, or what the search found."""
        return in_python(self.sweep.verdict)

    @property
    def is_complete(self) -> bool:
        """Whether it was not interrupted."""
        return self.sweep.is_complete

    @cached_property
    def points(self) -> "pd.DataFrame":
        """One row per point: what was varied, the latencies (s), throughput and, with limits, whether they are met.

        With `find`, one row per combination: the value found, with its interval if there are repeats.
        """
        import pyarrow as pa

        rows = [_row(row) for row in self.sweep.points]
        names = dict.fromkeys(name for row in rows for name in row)
        made = pa.table({name: _plain([row.get(name) for row in rows]) for name in names})
        found = frames.to_pandas(made, "result.points")
        found.attrs = {"manifest": frames.Manifest(self.manifest)}
        return found

    def __repr__(self) -> str:
        return text_of(lambda console: print_sweep(self._manifest, self.sweep, console, is_whole=False))

    def _repr_html_(self) -> str:
        rows = [(row[0], row[1:]) for row in self.sweep.rows]
        grid = Grid(self.sweep.title, self.sweep.columns[1:], rows, corner=self.sweep.columns[0])
        title, grids = self._manifest["title"], [grid, *self.sweep.grids]
        return html_of(title, self.verdict, grids, [], headline.whole_heading(self._manifest))


class PlanResult:
    """The cheapest layout that meets the limits, what binds it, what more load needs, and how certain that is."""

    def __init__(self, folder: Path, answer: PlanAnswer) -> None:
        """Hold a plan: what `run_plan` returns."""
        self.folder, self.answer = folder, answer

    @property
    def verdict(self) -> str:
        """The best layout, and how certain it is."""
        return in_python(self.answer.verdict)

    @property
    def is_complete(self) -> bool:
        """Whether it was not interrupted."""
        return self.answer.is_complete

    @property
    def manifest(self) -> dict[str, Any]:
        """Everything that was asked: a copy."""
        return deepcopy(self.answer.settings)

    @property
    def deployment(self) -> Deployment | None:
        """The best layout, ready to simulate or to serve; None if no layout meets the limits."""
        file = self.folder / "deployment.yaml"
        return Deployment.from_yaml(file) if file.exists() else None

    @cached_property
    def layouts(self) -> "pd.DataFrame":
        """One row per layout, the best first: the GPUs, workers and cost with which it meets the limits, if it does."""
        import pyarrow as pa

        names = ("name", "gpus", "workers", "prefill_workers", "cost", "at_least", "tried", "impossible")
        made = pa.table({name: [getattr(each, name) for each in self.answer.layouts] for name in names})
        return frames.to_pandas(made, "result.layouts")

    def __repr__(self) -> str:
        return text_of(lambda console: print_plan(self.answer, console))

    def _repr_html_(self) -> str:
        answer = self.answer
        lines = [*(one.text for one in answer.sureness), *answer.notes]
        details = [answer.subtitle, *(f"{name}: {text}" for name, text in answer.head.items())]
        return html_of(answer.title, answer.verdict, capacity.grids(answer), lines, details)


AnyResult = Result | SweepResult | PlanResult


def read_result(paths: Sequence[Path]) -> AnyResult:
    """Read results folders: one of runs, of a sweep, benchmark or plan; or several of one kind, side by side.

    Raises:
        UserError: one is not a results folder, or they cannot be compared.
    """
    from reports.sweep import report as sweep_report

    if len(paths) == 1 and (paths[0] / "plan.json").is_file():
        try:
            return PlanResult(paths[0], msgspec.json.decode((paths[0] / "plan.json").read_bytes(), type=PlanAnswer))
        except msgspec.DecodeError as error:
            raise UserError(f"{paths[0]}: not the folder of a plan ({error})") from error
    folder = paths[0] if len(paths) == 1 else None
    if all(map(sweep_report.is_sweep, paths)):
        return SweepResult(folder, *sweep_report.combine(list(paths), None))
    manifest, runs = folders.combine(list(paths)) if folder is None else folders.read(folder)
    return Result(folder, manifest, summary_of(manifest, runs), runs)


def _short(grid: Grid, arms: Sequence[str]) -> Grid:
    """Return a table with the short names of arms."""
    names = {arm: entry.name for arm, entry in key_of(arms).items()}
    return replace(grid, columns=[names.get(column, column) for column in grid.columns])


def _row(row: AnyPoint | SearchResult) -> dict[str, Any]:
    """Return a point as one line."""
    if isinstance(row, SearchResult):
        low, high = row.interval or (None, None)
        found: dict[str, Any] = {
            row.find: row.met,
            f"{row.find}_low": low,
            f"{row.find}_high": high,
            "missed_at": row.missed_at,
        }
        return {"name": row.arm} | row.changes | found | (_figures(row.point) if row.point else {})
    if isinstance(row, Point):
        return {"name": row.name} | row.changes | _figures(row)
    return {"name": row.name} | row.changes | ({"impossible": row.reason} if isinstance(row, Impossible) else {})


def _figures(point: Point) -> dict[str, Any]:
    spans = {"ttft": point.ttft_sched, "tpot": point.tpot, "itl": point.itl, "e2e": point.e2e_sched}
    return {
        "gpus": point.gpus or None,
        **{f"{name}_{at}_s": getattr(span, at) for name, span in spans.items() for at in ("mean", "p50", "p90", "p99")},
        "requests_per_s": point.throughput.requests_per_s,
        "output_tokens_per_s": point.throughput.output_tokens_per_s,
        "hit_share": point.cache.hit_share,
        "attainment": point.goodput.attainment if point.goodput else None,
        "state": point.state if point.outcomes else None,
    }


def _plain(values: list[Any]) -> list[Any]:
    """Return values of one type: texts if they differ."""
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) < 2 or kinds == {int, float}:
        return values
    return [None if value is None else str(value) for value in values]
