"""The results folder: experiment.json, requests.parquet, gaps.npz, summary.json, report.html, charts/.

Everything is written under a temporary name beside the folder and renamed, so a folder is whole or not there.
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from reports import charts, page, tables
from reports.foreign import printable
from reports.metrics import LABELS
from reports.records import ArmResult
from reports.slo import parse
from reports.summary import PAIRED, summarize

Json = dict[str, Any]
SCHEMA = "dynabench.experiment/2"


class ReportError(Exception):
    """A results folder that cannot be written or read."""


def check_new(folder: Path) -> None:
    """Refuse a results folder that exists.

    Raises:
        ReportError: it does, or its parent is no folder one can write to.
    """
    if folder.exists():
        raise ReportError(f"{folder} exists; name another results folder with --out, or remove it")
    parent = folder.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise ReportError(f"{folder}: cannot be written ({error.strerror})") from error


def write(folder: Path, experiment: Json, runs: list[ArmResult]) -> Json:
    """Write a results folder and return its summary."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.absolute().parent))
    try:
        work.chmod(0o755)
        _write_runs(work, runs)
        (work / "experiment.json").write_text(json.dumps(experiment, indent=2) + "\n")
        summary = _write_report(work, experiment, runs)
        work.rename(folder)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return summary


def read(folder: Path) -> tuple[Json, list[ArmResult]]:
    """Read a results folder back.

    Raises:
        ReportError: it is none.
    """
    import pandas as pd

    try:
        experiment: Json = json.loads((folder / "experiment.json").read_text())
        frame = pd.read_parquet(folder / "requests.parquet")
        with np.load(folder / "gaps.npz") as stored:
            gaps = dict(stored)
    except (OSError, ValueError) as error:
        raise ReportError(f"{folder}: not a results folder ({error})") from error
    if experiment.get("schema") != SCHEMA:
        raise ReportError(
            f"{folder}: was written by another version (schema {experiment.get('schema')}, expected {SCHEMA})"
        )
    runs = []
    for place, facts in enumerate(experiment["runs"]):
        rows = frame[frame["run"] == place]
        columns = {name: rows[name].to_numpy() for name in rows.columns if name not in ("run", "arm", "repeat")}
        run = ArmResult(facts["arm"], columns, gaps[str(place)], facts["wall_s"], facts["num_workers"])
        run.repeat, run.is_complete, run.notes = facts["repeat"], facts["is_complete"], tuple(facts["notes"])
        run.facts, run.is_live = facts["facts"], facts["is_live"]
        runs.append(run)
    return experiment, runs


def combine(folders: list[Path]) -> tuple[Json, list[ArmResult]]:
    """Read several folders as the arms of one comparison, named by folder where one mode occurs twice.

    Raises:
        ReportError: one is no results folder, or their workloads differ.
    """
    sources = [(folder, *read(folder)) for folder in folders]
    names = [run.arm for _, _, runs in sources for run in runs if run.repeat == 0]
    runs = []
    for folder, experiment, its_runs in sources:
        first = sources[0][1]["workload"]
        if (experiment["workload"]["name"], experiment["workload"]["requests"]) != (first["name"], first["requests"]):
            raise ReportError(
                f"{folder} ran {experiment['workload']['name']} ({experiment['workload']['requests']} requests), "
                f"{sources[0][0]} {first['name']} ({first['requests']}): requests cannot be paired"
            )
        for run in its_runs:
            if names.count(run.arm) > 1:
                run.arm = printable(f"{folder.name}/{run.arm}")
            runs.append(run)
    manifest = sources[0][1] | {
        "title": f"{sources[0][1]['workload']['name']}: {len(folders)} runs side by side",
        "subtitle": ", ".join(str(folder) for folder in folders),
        "command": f"dynabench compare {' '.join(str(folder) for folder in folders)}",
        "runs": [run_facts(run) for run in runs],
        "sources": {str(folder): experiment for folder, experiment, _ in sources},
    }
    return manifest, runs


def rebuild(folder: Path) -> Json:
    """Make summary, charts and report of a folder anew."""
    experiment, runs = read(folder)
    return _write_report(folder, experiment, runs)


def run_facts(run: ArmResult) -> Json:
    """Return what experiment.json keeps of a run beside its requests."""
    return {
        "arm": run.arm,
        "repeat": run.repeat,
        "wall_s": round(run.wall_s, 6),
        "num_workers": run.num_workers,
        "is_complete": run.is_complete,
        "notes": list(run.notes),
        "facts": run.facts,
        "is_live": run.is_live,
    }


def _write_runs(folder: Path, runs: list[ArmResult]) -> None:
    import pandas as pd

    frames = []
    for place, run in enumerate(runs):
        frame = pd.DataFrame(run.columns)
        frame.insert(0, "run", place)
        frame.insert(1, "arm", run.arm)
        frame.insert(2, "repeat", run.repeat)
        frames.append(frame)
    pd.concat(frames, ignore_index=True).to_parquet(folder / "requests.parquet", index=False)
    np.savez_compressed(folder / "gaps.npz", **{str(place): run.gaps for place, run in enumerate(runs)})  # type: ignore[arg-type]


def _write_report(folder: Path, experiment: Json, runs: list[ArmResult]) -> Json:
    summary = summarize(runs, [parse(text) for text in experiment["limits"]], experiment.get("bound_s"))
    _replace(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    shown = {run.arm: run.measured for run in reversed(runs)}
    pictures = charts.draw({arm: shown[arm] for arm in summary["arms"]}, summary, folder / "charts")
    text = page.render(
        "report.html.jinja",
        pictures,
        title=experiment["title"],
        subtitle=experiment["subtitle"],
        summary=summary,
        arm_names=list(summary["arms"]) if len(summary["arms"]) > 1 else [],
        paired=PAIRED,
        rows=tables.rows(summary),
        fidelity=tables.fidelity_rows(experiment["fidelity"]) if "fidelity" in experiment else {},
        labels=LABELS,
        command=experiment["command"],
        settings=json.dumps(experiment, indent=2),
    )
    _replace(folder / "report.html", text)
    return summary


def _replace(path: Path, text: str) -> None:
    work = path.with_name(f".{path.name}.tmp")
    work.write_text(text)
    work.replace(path)
