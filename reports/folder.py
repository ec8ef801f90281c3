"""The results folder: experiment.json, requests.parquet, gaps.npz, summary.json, report.html, charts/.

Everything is written under a temporary name next to the folder and then renamed, so a folder is complete or absent.
"""

import contextlib
import json
import os
import secrets
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from foundation.errors import UserError
from foundation.files import put_in_place, replace_text
from foundation.settings import FINITE
from foundation.text import one_line, printable
from reports import charts, page
from reports.fidelity import Fidelity
from reports.figures import fleet as fleet_figures
from reports.figures import tiers
from reports.figures.load import settings_of
from reports.figures.metrics import LABELS
from reports.figures.slo import parse_slo
from reports.record.fleet import FleetUse
from reports.record.pools import AdapterUse, DraftUse, EncoderUse, KvOverTime, LinkUse, PoolUse, TierUse
from reports.record.records import MAX_S, Floats, Record
from reports.record.server import ServerUse
from reports.record.table import read_requests, write_requests
from reports.summarize import summary_of
from reports.summary import SMALLEST, Summary
from reports.tables import comparison as tables
from reports.tables import fidelity as fidelity_table
from reports.tables import fleet as fleet_table
from reports.tables import use as use_tables
from reports.verdicts import headline
from reports.verdicts.engines import EngineError

if TYPE_CHECKING:
    pass

Part = TypeVar("Part")
Manifest = dict[str, Any]
"""What experiment.json holds; `ManifestHead` is the part that is read back."""
SCHEMA = "dynabench.experiment/3"
BEFORE = "dynabench.experiment/2"
"""An older schema that is read, too; it wrote -1 for unknown values."""
MAX_HEAD_BYTES = 1 << 28
GAPS_LIMIT = 4 << 30
"""Bytes; enough for the gaps of a hundred million tokens, each in its own row."""

WITHOUT_CHARTS = "There are no charts, because the run was interrupted: dynabench report FOLDER draws them."


OTHER_KINDS = {
    "plan": "for runs of its best layout, use dynabench simulate -f with its deployment.yaml",
    "sweep": "for runs of a point, use dynabench simulate with its settings",
}
"""What other folders hold, by the name of their file, and how to get runs of it."""


RUNS = "runs"
"""Where the folder of a benchmark has the results folders of its loads."""


class ReportError(UserError):
    """A results folder that cannot be written or read."""


def as_said(manifest: Manifest, kind: type[Part]) -> Part:
    """Return a part of experiment.json, converted to its types.

    Raises:
        ValueError: a field is missing or of the wrong type; the message names it.
    """
    try:
        return msgspec.convert(manifest, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"experiment.json: {error}") from error


def check_new(folder: Path) -> None:
    """Raise an error if a results folder exists.

    Raises:
        ReportError: it exists, or its parent is not a folder that we can write to.
    """
    if folder.exists():
        raise ReportError(f"{folder} exists; choose another results folder with --out, or remove it")
    parent = folder.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise ReportError(f"{folder}: cannot be written ({error.strerror})") from error


def write(folder: Path, experiment: Manifest, runs: list[Record], *, with_charts: bool = True) -> Summary:
    """Write a results folder and return its summary.

    Raises:
        ReportError: not all of it can be written; the message says where the runs are kept.
        KeyboardInterrupt: likewise.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _whole(folder) as work:
            _write_runs(work, experiment, runs)
            return _write_report(work, experiment, runs, with_charts=with_charts)
    except OSError as error:
        kept = _kept(_keep_runs(folder, experiment, runs), "make room and write their report with")
        raise ReportError(f"{folder}: cannot be written ({reason(error)}); {kept}") from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(keep(folder, experiment, runs)) from None


def keep(folder: Path, experiment: Manifest, runs: list[Record]) -> str:
    """Write the runs without a report, after an interrupt, and say where they are."""
    kept = _kept(_keep_runs(folder, experiment, runs), "write their report with")
    return f"interrupted before the report was written; {kept}"


def _kept(place: Path | None, way: str) -> str:
    if place is None:
        return "no results are kept"
    return f"the runs are in {place}; {way}: dynabench report {place}"


def _keep_runs(folder: Path, experiment: Manifest, runs: list[Record]) -> Path | None:
    """Write what was measured, without charts and report, if there is room for it; return the folder."""
    for place in (folder, Path(tempfile.gettempdir()) / f"dynabench-{secrets.token_hex(4)}"):
        with contextlib.suppress(OSError), _whole(place) as work:
            _write_runs(work, experiment, runs)
            return place
    return None


@contextlib.contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """Yield a folder to fill; it gets its final name on success, once it is on the disk, and is removed otherwise."""
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.absolute().parent))
    try:
        work.chmod(0o755)
        yield work
        put_in_place(work, folder)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def reason(error: OSError) -> str:
    """Say why something cannot be written."""
    return os.strerror(error.errno) if error.errno else str(error)  # `strerror` may name the file, too


class RunFacts(msgspec.Struct):
    """What experiment.json keeps of a run, apart from its requests."""

    arm: str
    repeat: Annotated[int, Meta(ge=0)]
    wall_s: Annotated[float, Meta(ge=0, le=MAX_S)]
    num_workers: Annotated[int, Meta(ge=1, le=1_000_000)]
    is_complete: bool
    notes: tuple[str, ...]
    facts: dict[str, Annotated[float, Meta(ge=-FINITE, le=FINITE)]]
    is_live: bool
    pools: tuple[PoolUse, ...] = ()
    links: tuple[LinkUse, ...] = ()
    tiers: tuple[TierUse, ...] = ()
    adapters: tuple[AdapterUse, ...] = ()
    drafts: tuple[DraftUse, ...] = ()
    encoders: tuple[EncoderUse, ...] = ()
    kv: tuple[KvOverTime, ...] = ()
    fleet: FleetUse | None = None
    server: ServerUse | None = None


class SentWorkload(msgspec.Struct):
    """What experiment.json must say of the workload."""

    name: str
    requests: int


class ManifestHead(msgspec.Struct):
    """What experiment.json must hold to be read back."""

    schema: str
    title: str
    subtitle: str
    command: str
    limits: list[str]
    workload: SentWorkload
    runs: Annotated[list[RunFacts], Meta(min_length=1)]
    bound_s: Annotated[float, Meta(ge=0, le=MAX_S)] | None = None
    best_hit_shares: dict[str, dict[str, Annotated[float, Meta(ge=0, le=1)]]] = {}
    """By arm: the highest possible hit share with its GPU memory, and with each further tier."""
    smallest_difference: Annotated[float, Meta(ge=0, le=1)] = SMALLEST
    """The relative difference below which two arms are equal in practice."""
    elsewhere: dict[str, str | None] = {}
    """What other routers call the router mode of each arm, if arms differ by it."""
    engine_errors: dict[str, EngineError] = {}
    """How far the times of each arm's engine are off, if arms differ by engine."""
    step_times: str | None = None
    """The source of simulated step times; older folders do not have it."""
    fidelity: Fidelity | None = None
    """Present if real runs were compared with simulated ones."""


def read(folder: Path) -> tuple[Manifest, list[Record]]:
    """Read a results folder back.

    Raises:
        ReportError: it is not a results folder.
    """
    _refuse_other_kinds(folder)
    try:
        for name in ("experiment.json", "requests.parquet", "gaps.npz"):
            if not (folder / name).is_file():
                raise ValueError(f"{name} is missing or not a file")
        experiment = _read_manifest(folder / "experiment.json")
        schema = experiment.get("schema") if isinstance(experiment, dict) else None
        if schema not in (SCHEMA, BEFORE):
            raise ReportError(f"{folder} was written by another version (schema {schema}, expected {SCHEMA})")
        head = as_said(experiment, ManifestHead)
        for limit in head.limits:
            parse_slo(limit)
        requests = read_requests(folder / "requests.parquet", len(head.runs), is_of_before=schema == BEFORE)
        gaps = _read_gaps(folder / "gaps.npz", len(head.runs))
    except (
        OSError,
        ValueError,
        EOFError,
        MemoryError,
        RecursionError,
        zipfile.BadZipFile,
    ) as error:
        raise ReportError(f"{folder}: not a results folder ({one_line(str(error))})") from error
    runs = []
    for facts, rows, its_gaps in zip(head.runs, requests, gaps, strict=True):
        if not facts.facts.pop("tells_hits", 1.0):  # the previous version's name for it
            rows = rows.replace(cached_tokens=None)
        if facts.is_live:  # where the previous version put the first byte
            is_byte = (rows.admitted_s == rows.first_byte_s).filled(False)
            rows = rows.replace(admitted_s=np.ma.MaskedArray(rows.admitted_s, is_byte))
        runs.append(Record(requests=rows, gaps=its_gaps, **msgspec.structs.asdict(facts)))
    return experiment, runs


def _refuse_other_kinds(folder: Path) -> None:
    """Refuse the folder of something that keeps no runs."""
    for kind, way_out in OTHER_KINDS.items():
        if (folder / f"{kind}.json").is_file() and not (folder / "experiment.json").exists():
            if kind == "sweep" and sweep_kind(folder) == "benchmark":
                loads = sorted(path for path in (folder / RUNS).iterdir() if path.is_dir())
                kind = "benchmark"
                way_out = ", such as ".join([f"each load has its own in {folder / RUNS}", *map(str, loads[:1])])
            raise ReportError(f"{folder} is the folder of a {kind}, not of runs; {way_out}")


def sweep_kind(folder: Path) -> str:
    """Return what a folder with a sweep.json is of: a benchmark is a sweep that keeps the runs of its loads."""
    return "benchmark" if (folder / RUNS).is_dir() else "sweep"


def _read_manifest(path: Path) -> Manifest:
    """Read experiment.json without checking its fields.

    Raises:
        ValueError: it is too large, not JSON, or holds text that cannot be written again.
    """
    if path.stat().st_size > MAX_HEAD_BYTES:
        raise ValueError(f"{path.name} is larger than {MAX_HEAD_BYTES:,} bytes")
    experiment: Manifest = json.loads(path.read_text())
    try:
        json.dumps(experiment, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{path.name} contains {error.object[error.start : error.end]!r}, half a character") from None
    return experiment


def _read_gaps(path: Path, count: int) -> list[Floats]:
    """Read the gaps of this many runs.

    Raises:
        ValueError: the file is not valid, or unpacks to more than any run has.
    """
    with zipfile.ZipFile(path) as packed:
        size = sum(entry.file_size for entry in packed.infolist())
    if size > GAPS_LIMIT:
        raise ValueError(f"gaps.npz unpacks to {size:,} bytes, more than {GAPS_LIMIT:,}")
    with np.load(path) as stored:
        gaps = [stored[str(place)] if str(place) in stored else np.empty(0) for place in range(count)]
    if any(rows.shape[1:] != (5,) or rows.dtype != float for rows in gaps):
        raise ValueError("gaps.npz does not have five columns for each run")
    if not all((np.abs(rows) <= MAX_S).all() for rows in gaps):
        raise ValueError(f"gaps.npz contains a value that is not a number or is beyond {MAX_S:g}")
    return gaps


def combine(folders: list[Path]) -> tuple[Manifest, list[Record]]:
    """Read several folders as the arms of one comparison, named by folder if a mode occurs twice.

    Raises:
        ReportError: one is not a results folder, or is given twice, or their workloads differ.
    """
    labels = labels_of(folders)
    sources = [(folder, *read(folder)) for folder in folders]
    names = [run.arm for _, _, runs in sources for run in runs if run.repeat == 0]
    runs, elsewhere, errors, sent = [], dict[str, str | None](), dict[str, Any](), dict[str, dict[str, Any]]()
    for folder, experiment, its_runs in sources:
        first = sources[0][1]["workload"]
        if (experiment["workload"]["name"], experiment["workload"]["requests"]) != (first["name"], first["requests"]):
            raise ReportError(
                f"{folder} ran {experiment['workload']['name']} ({experiment['workload']['requests']} requests), "
                f"{sources[0][0]} {first['name']} ({first['requests']}): requests cannot be paired"
            )
        for run in its_runs:
            name = printable(f"{labels[folder]}/{run.arm}") if names.count(run.arm) > 1 else run.arm
            sent[name] = settings_of(experiment, run.arm)
            if run.arm in experiment.get("elsewhere", {}):
                elsewhere[name] = experiment["elsewhere"][run.arm]
            if run.arm in experiment.get("engine_errors", {}):
                errors[name] = experiment["engine_errors"][run.arm]
            runs.append(replace(run, arm=name))
    manifest = sources[0][1] | {
        "schema": SCHEMA,
        "title": sources[0][1]["workload"]["name"]
        + (f": {len(folders)} runs side by side" if len(folders) > 1 else ""),
        "subtitle": ", ".join(str(folder) for folder in folders),
        "step_times": _step_times({str(folder): experiment for folder, experiment, _ in sources}),
        "command": f"dynabench compare {' '.join(str(folder) for folder in folders)}",
        "runs": facts_of(runs),
        "elsewhere": elsewhere,
        "engine_errors": errors,
        "sent": sent,
        "left_out": [reason for _, experiment, _ in sources for reason in experiment.get("left_out", [])],
        "sources": {str(folder): experiment for folder, experiment, _ in sources},
    }
    return manifest, runs


def labels_of(folders: Sequence[Path]) -> dict[Path, str]:
    """Name folders to compare: by their last parts, or in full if two of these are the same.

    Raises:
        ReportError: one is given twice.
    """
    if twice := next((folder for folder in folders if folders.count(folder) > 1), None):
        raise ReportError(f"{twice} is given twice; expected different results folders")
    last = [folder.name for folder in folders]
    return {folder: str(folder) if last.count(folder.name) > 1 else folder.name for folder in folders}


def _step_times(sources: dict[str, Manifest]) -> str | None:
    """Return the source of the step times of all folders, or of each if they differ."""
    known = {folder: experiment.get("step_times") for folder, experiment in sources.items()}
    if len(set(known.values())) == 1:
        return next(iter(known.values()))
    return "; ".join(f"{folder}: {text}" for folder, text in known.items() if text)


def rebuild(folder: Path) -> tuple[Manifest, Summary]:
    """Write the summary, charts and report of a folder again; return its manifest and the summary.

    Raises:
        ReportError: it is not a results folder, or cannot be written to.
    """
    experiment, runs = read(folder)
    try:
        return experiment, _write_report(folder, experiment, runs)
    except OSError as error:
        raise ReportError(f"{folder}: the report cannot be written ({reason(error)})") from error


def facts_of(runs: Sequence[Record]) -> list[Manifest]:
    """Return what experiment.json keeps of runs apart from their requests; their fleets only if one of them changed."""
    is_shown = any(run.fleet and run.fleet.is_shown for run in runs)
    return [
        run_facts(run) | ({"fleet": msgspec.to_builtins(run.fleet)} if is_shown and run.fleet else {}) for run in runs
    ]


def run_facts(run: Record) -> Manifest:
    """Return what experiment.json keeps of a run, apart from its requests and its fleet."""
    return {
        "arm": run.arm,
        "repeat": run.repeat,
        "wall_s": round(run.wall_s, 6),
        "num_workers": run.num_workers,
        "is_complete": run.is_complete,
        "notes": list(run.notes),
        "facts": dict(run.facts),
        "is_live": run.is_live,
        "pools": msgspec.to_builtins(run.pools),
        "links": msgspec.to_builtins(run.links),
        "tiers": msgspec.to_builtins(run.tiers),
        "adapters": msgspec.to_builtins(run.adapters),
        "kv": msgspec.to_builtins(run.kv),
    } | {name: msgspec.to_builtins(uses) for name in ("drafts", "encoders", "server") if (uses := getattr(run, name))}


def _write_runs(folder: Path, experiment: Manifest, runs: list[Record]) -> None:
    (folder / "experiment.json").write_text(json.dumps(experiment, indent=2) + "\n")
    write_requests(folder / "requests.parquet", runs)
    np.savez_compressed(folder / "gaps.npz", **{str(place): run.gaps for place, run in enumerate(runs)})  # type: ignore[arg-type]


def first_runs(runs: Sequence[Record], summary: Summary) -> dict[str, Record]:
    """Return the run of each arm that charts show: its first."""
    found = {run.arm: run.measured for run in reversed(runs)}
    return {arm: found[arm] for arm in summary.arms}


def _write_report(folder: Path, experiment: Manifest, runs: list[Record], *, with_charts: bool = True) -> Summary:
    summary = summary_of(experiment, runs)
    replace_text(folder / "summary.json", json.dumps(summary.as_json(), indent=2) + "\n")
    shown = first_runs(runs, summary)
    pictures = charts.draw(shown, summary, folder / "charts") if with_charts else []
    fidelity = msgspec.convert(experiment.get("fidelity"), Fidelity | None)
    validated = {} if fidelity is None else fidelity.arms
    verdict = [fidelity_table.lead(arm, found) for arm, found in validated.items()] or [
        headline.alone(summary),
        summary.verdict,
    ]
    differences = None if validated else tables.difference_grid(summary)
    limits = tables.limit_grid(summary)
    text = page.render(
        "report.html.jinja",
        pictures,
        arms=list(summary.arms),
        title=experiment["title"],
        subtitle=experiment["subtitle"],
        head=headline.head(experiment),
        alerts=headline.alerts(summary),
        verdict=" ".join(filter(None, verdict)),
        remarks=[
            *(f"Left out: {reason}" for reason in experiment.get("left_out", [])),
            *headline.remarks(summary),
            *([] if with_charts else [WITHOUT_CHARTS]),
        ],
        summary=summary,
        limits=tables.for_page(limits) if limits else [],
        fidelity=[fidelity_table.fidelity_grid(arm, found) for arm, found in validated.items()],
        figures=tables.for_page(tables.figures(summary)),
        differences=tables.for_page(differences) if differences else [],
        every=[part for grid in tables.sections(summary) for part in tables.for_page(grid)],
        changes=fleet_table.changes(shown) if summary.has_fleet else [],
        noted=fleet_table.notes(shown) if summary.has_fleet else [],
        grids=[
            part
            for grid in (*use_tables.grids(summary), tables.elsewhere_grid(experiment))
            if grid
            for part in tables.for_page(grid)
        ],
        labels=LABELS | tiers.LABELS | fleet_figures.LABELS,
        command=experiment["command"],
        settings=json.dumps(experiment, indent=2),
    )
    replace_text(folder / "report.html", text)
    return summary
