"""Tables for spreadsheets: a row per request, or a row per arm."""

import csv
import io
from typing import TYPE_CHECKING, Any

import numpy as np

from reports.figures import metrics
from reports.figures.load import load_of
from reports.folder import Manifest
from reports.foreign import csv_cell
from reports.record.records import Record
from reports.record.table import to_table
from reports.summary import ArmSummary, Summary

if TYPE_CHECKING:
    import pyarrow as pa

LATENCIES = ("ttft_sched", "ttft", "tpot", "itl", "e2e_sched", "e2e")
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")


def requests(runs: list[Record]) -> "pa.Table":
    """Return a row per request, arm and repeat, with its columns and metrics (s); unknown values are null."""
    import pyarrow as pa

    table = to_table(runs).drop_columns("run")
    values = [metrics.per_request(run.requests) for run in runs]
    for name in values[0]:
        table = table.append_column(name, pa.array(np.concatenate([value[name] for value in values]), from_pandas=True))
    return table


def as_csv(table: "pa.Table") -> bytes:
    """Return a table as CSV; an unknown value is an empty cell."""
    rows = zip(*(column.to_pylist() for column in table.columns), strict=True)
    return _csv(table.column_names, [list(row) for row in rows])


def as_parquet(table: "pa.Table") -> bytes:
    """Return a table as a Parquet file."""
    from pyarrow import parquet

    buffer = io.BytesIO()
    parquet.write_table(table, buffer)
    return buffer.getvalue()


def arms(manifest: Manifest, summary: Summary) -> bytes:
    """Return a header, the same for every run, and a line per arm; an unknown value is an empty cell."""
    lines = [_arm(manifest, name, arm) for name, arm in summary.arms.items()]
    return _csv(list(lines[0]), [list(line.values()) for line in lines])


def _arm(manifest: Manifest, name: str, arm: ArmSummary) -> dict[str, Any]:
    """Return the figures of an arm, by column; times in ms."""
    load = load_of(manifest, name)
    line: dict[str, Any] = {
        "created": manifest.get("created"),
        "title": manifest["title"],
        "arm": name,
        "workload": manifest["workload"]["name"],
        "concurrency": None if load.has_arrivals else load.streams,
        "repeats": arm.repeats,
        "requests": arm.requests,
        "failed": arm.failed,
        "is_valid": not arm.notes,
        "requests_per_s": arm.throughput.requests_per_s,
        "output_tokens_per_s": arm.throughput.output_tokens_per_s,
        "goodput_requests_per_s": arm.goodput.goodput_per_s if arm.goodput else None,
        "attainment": arm.goodput.attainment if arm.goodput else None,
        "hit_share": arm.cache.hit_share,
    }
    for metric in LATENCIES:
        for statistic in STATISTICS:
            value = arm.metric(metric).at(statistic)
            line[f"{metric}_{statistic}_ms"] = None if value is None else round(value * 1000, 6)
    return line


def _csv(header: list[str], rows: list[list[Any]]) -> bytes:
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(header)
    lines.writerows([csv_cell(cell) for cell in row] for row in rows)
    return text.getvalue().encode()
