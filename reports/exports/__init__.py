"""Figures for other programs: tables, the summary, reports of other tools, metrics for Prometheus."""

import json
from collections.abc import Mapping
from typing import Literal

from reports.exports import aiperf, bench, guidellm, llmd, openmetrics, tables
from reports.folder import Manifest
from reports.record.records import Record
from reports.summarize import summary_of
from reports.tables import comparison

File = Literal["csv", "csv-arms", "parquet", "json", "markdown", "llm-d", "guidellm", "sglang-bench", "openmetrics"]
Folder = Literal["aiperf", "vllm-bench"]
FOLDERS: tuple[Literal["aiperf"], Literal["vllm-bench"]] = ("aiperf", "vllm-bench")
"""Forms of several files: one run is one file, or folder, there."""


def export(manifest: Manifest, runs: list[Record], to: File) -> bytes:
    """Return a results folder's figures in one of the forms that are a file.

    Raises:
        ValueError: the folder lacks what the form needs.
    """
    if to in ("csv", "parquet"):
        table = tables.requests(runs)
        return tables.as_csv(table) if to == "csv" else tables.as_parquet(table)
    if to == "guidellm":
        return _json(guidellm.report(manifest, runs))
    if to == "sglang-bench":
        return "".join(f"{json.dumps(line)}\n" for line in bench.sglang(manifest, runs)).encode()
    summary = summary_of(manifest, runs)
    match to:
        case "csv-arms":
            return tables.arms(manifest, summary)
        case "markdown":
            return f"{comparison.markdown(summary, manifest, [])}\n".encode()
        case "openmetrics":
            return openmetrics.text(summary).encode()
        case "llm-d":
            return _json(llmd.llmd(manifest, runs, summary))
        case _:
            return _json({"experiment": manifest, "summary": summary.as_json()})


def export_files(manifest: Manifest, runs: list[Record], to: Folder) -> Mapping[str, bytes]:
    """Return the files, by their paths in a folder, of one of the forms that are several files.

    Raises:
        ValueError: the folder lacks what the form needs.
    """
    if to == "vllm-bench":
        return {f"{name}.json": _json(run) for name, run in bench.vllm(manifest, runs).items()}
    return dict(aiperf.files(manifest, runs))


def _json(value: object) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"
