"""Figures for other programs: a row per request, the summary, llm-d's Benchmark Report."""

import io
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from reports import metrics
from reports.foreign import csv_cell
from reports.records import Record, to_table
from reports.slo import parse
from reports.summary import summarize

if TYPE_CHECKING:
    import pyarrow as pa

Json = dict[str, Any]
LLMD_VERSION = "0.2"


def export(manifest: Json, runs: list[Record], to: str) -> bytes:
    """Return a results folder's figures in a form of `export`: csv, parquet, json or llm-d."""
    if to in ("csv", "parquet"):
        return as_csv(requests(runs)) if to == "csv" else as_parquet(requests(runs))
    summary = summarize(runs, [parse(text) for text in manifest["limits"]], manifest.get("bound_s"))
    whole = {"experiment": manifest, "summary": summary}
    return json.dumps(whole if to == "json" else llmd(manifest, runs, summary), indent=2).encode() + b"\n"


def requests(runs: list[Record]) -> "pa.Table":
    """Return a row per request, arm and repeat: its columns and its metrics (s); what is unknown is null."""
    import pyarrow as pa

    table = to_table(runs).drop_columns("run")
    values = [metrics.per_request(run.requests) for run in runs]
    for name in values[0]:
        table = table.append_column(name, pa.array(np.concatenate([value[name] for value in values]), from_pandas=True))
    return table


def as_csv(table: "pa.Table") -> bytes:
    """Return a table as CSV; an unknown value is an empty cell."""
    text: str = table.to_pandas(integer_object_nulls=True).map(csv_cell).to_csv(index=False)
    return text.encode()


def as_parquet(table: "pa.Table") -> bytes:
    """Return a table as a Parquet file."""
    from pyarrow import parquet

    buffer = io.BytesIO()
    parquet.write_table(table, buffer)
    return buffer.getvalue()


def llmd(manifest: Json, runs: list[Record], summary: Json) -> list[Json]:
    """Return llm-d's Benchmark Report (github.com/llm-d/llm-d-benchmark), one per arm; times in s."""
    reports = []
    for arm, figures in summary["arms"].items():
        took = sum(run.wall_s for run in runs if run.arm == arm)
        count = figures["requests"]
        isl, osl = (
            np.concatenate([getattr(run.measured.requests, name) for run in runs if run.arm == arm]).astype(float)
            for name in ("isl", "osl")
        )
        reports.append(
            {
                "version": LLMD_VERSION,
                "run": {
                    "uid": f"{manifest['created']}/{arm}",
                    "eid": manifest["title"],
                    "time": {"start": manifest["created"], "duration": f"PT{took:.3f}S"},
                    "description": manifest["subtitle"],
                },
                "scenario": {
                    "stack": [
                        {
                            "standardized": {"kind": "inference_engine", "replicas": manifest["workers"].get(arm)},
                            "native": {"config": manifest["engine"] | manifest["arms"].get(arm, {})},
                        },
                        {"standardized": {"kind": "router", "name": arm}, "native": {"config": manifest["router"]}},
                    ],
                    "load": {
                        "standardized": {
                            "tool": "dynabench",
                            "tool_version": manifest["versions"]["dynabench"],
                            "source": manifest["workload"]["name"],
                        },
                        "native": {"args": {"command": manifest["command"], **manifest["load"]}},
                    },
                },
                "results": {
                    "request_performance": {
                        "aggregate": {
                            "requests": {
                                "total": count,
                                "failures": figures["failed"],
                                "input_length": _spread(metrics.describe(isl), "count"),
                                "output_length": _spread(metrics.describe(osl), "count"),
                            },
                            "latency": {
                                "time_to_first_token": _spread(figures["ttft"], "s"),
                                "time_per_output_token": _spread(figures["tpot"], "s/token"),
                                "inter_token_latency": _spread(figures["itl"], "s/token"),
                                "request_latency": _spread(figures["e2e"], "s"),
                            },
                            "throughput": {
                                "request_rate": {
                                    "mean": figures["throughput"]["requests_per_s"], "units": "queries/s",
                                },
                                "output_token_rate": {
                                    "mean": figures["throughput"]["output_tokens_per_s"], "units": "tokens/s",
                                },
                            },
                        }
                    }
                },
            }
        )  # fmt: skip
    return reports


def _spread(figures: Json, units: str) -> Json:
    names = {"mean": "mean", "p50": "p50", "p90": "p90", "p95": "p95", "p99": "p99", "max": "max"}
    return {"units": units} | {
        ours: figures[theirs] for theirs, ours in names.items() if figures.get(theirs) is not None
    }
