"""Figures for other programs: a row per request, the summary, llm-d's Benchmark Report."""

import io
import json
from typing import Any

import pandas as pd

from reports import metrics
from reports.foreign import csv_cell
from reports.records import ArmResult
from reports.slo import parse
from reports.summary import summarize

Json = dict[str, Any]
LLMD_VERSION = "0.2"


def export(manifest: Json, runs: list[ArmResult], to: str) -> bytes:
    """Return a results folder's figures in a form of `export`: csv, parquet, json or llm-d."""
    if to in ("csv", "parquet"):
        frame = requests(runs)
        if to == "csv":
            text: str = frame.map(csv_cell).to_csv(index=False)
            return text.encode()
        buffer = io.BytesIO()
        frame.to_parquet(buffer, index=False)
        return buffer.getvalue()
    summary = summarize(runs, [parse(text) for text in manifest["limits"]], manifest.get("bound_s"))
    whole = {"experiment": manifest, "summary": summary}
    return json.dumps(whole if to == "json" else llmd(manifest, runs, summary), indent=2).encode() + b"\n"


def requests(runs: list[ArmResult]) -> pd.DataFrame:
    """Return a row per request, arm and repeat: its columns and its metrics (s)."""
    frames = []
    for run in runs:
        frame = pd.DataFrame(run.columns | metrics.per_request(run))
        frame.insert(0, "arm", run.arm)
        frame.insert(1, "repeat", run.repeat)
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def llmd(manifest: Json, runs: list[ArmResult], summary: Json) -> list[Json]:
    """Return llm-d's Benchmark Report (github.com/llm-d/llm-d-benchmark), one per arm; times in s."""
    reports = []
    for arm, figures in summary["arms"].items():
        took = sum(run.wall_s for run in runs if run.arm == arm)
        count = figures["requests"]
        isl = [value for run in runs if run.arm == arm for value in run.measured.columns["isl"]]
        osl = [value for run in runs if run.arm == arm for value in run.measured.columns["osl"]]
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
                                "input_length": _spread(metrics.describe(pd.Series(isl).to_numpy(float)), "count"),
                                "output_length": _spread(metrics.describe(pd.Series(osl).to_numpy(float)), "count"),
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
