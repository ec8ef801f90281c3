"""What AIPerf 0.13 writes of a run: profile_export_aiperf.json, and profile_export.jsonl with a line per request.

Its TTFT, request latency and throughputs are ours from sending; its ITL, one value per request, is our TPOT. Left out is
what has another meaning or is not kept: the time to the second token (a chunk there), what HTTP did, the latency from the
issue of a credit, concurrency over time, and `input_config`, which describes AIPerf's own settings.
"""

import datetime
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from reports.exports.answers import Answers, answers_of, begun_at, file_names
from reports.figures import metrics
from reports.folder import Manifest
from reports.record.records import Floats, Record

SCHEMA_VERSION = "1.4"
PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)
MS, TOKENS, USER = "ms", "tokens", "tokens/sec/user"


def files(manifest: Manifest, runs: list[Record]) -> Iterator[tuple[str, bytes]]:
    """Yield the path and content of the files of each run, in a folder of its own.

    Raises:
        ValueError: no request of a run was answered.
    """
    begun = begun_at(manifest)
    for name, run in zip(file_names(runs), runs, strict=True):
        yield f"{name}/profile_export_aiperf.json", json.dumps(_export(manifest, run, begun), indent=2).encode()
        yield f"{name}/profile_export.jsonl", "".join(f"{json.dumps(row)}\n" for row in _rows(run, begun)).encode()


def _export(manifest: Manifest, run: Record, begun: datetime.datetime) -> dict[str, Any]:
    answers = answers_of(run)
    failures = Counter(answers.errors)
    start, stop = float(np.nanmin(answers.sent_s)), float(np.nanmax(answers.last_s))
    return {
        "schema_version": SCHEMA_VERSION,
        **_counted(answers, stop - start),
        **{name: _spread(values, unit) for name, (values, unit) in _distributions(run, answers).items()},
        "run_info": {"run_label": run.arm, "trial": run.repeat, "cli_command": manifest["command"]},
        "was_cancelled": not run.is_complete,
        "is_complete": run.is_complete,
        "error_summary": [
            {"error_details": {"message": message}, "count": count} for message, count in failures.most_common()
        ],
        "start_time": _at(begun, start),
        "end_time": _at(begun, stop),
    }


def _counted(answers: Answers, duration_s: float) -> dict[str, Any]:
    """Return counts, the time from the first request's sending to the last token, and rates over the whole phase."""
    wall_s, prompts, tokens, failed = answers.wall_s, int(answers.isl.sum()), int(answers.osl.sum()), answers.num_failed
    attempted = len(answers) + failed
    values = {
        "request_count": (float(len(answers)), "requests"),
        "completed_request_count": (float(attempted), "requests"),
        "request_error_rate": (100.0 * failed / attempted, "%"),
        "benchmark_duration": (duration_s, "sec"),
        "request_throughput": (len(answers) / wall_s, "requests/sec"),
        "output_token_throughput": (tokens / wall_s, "tokens/sec"),
        "input_token_throughput": (prompts / wall_s, "tokens/sec"),
        "total_token_throughput": ((prompts + tokens) / wall_s, "tokens/sec"),
        "total_isl": (float(prompts), TOKENS),
        "total_osl": (float(tokens), TOKENS),
        **({"error_request_count": (float(failed), "requests")} if failed else {}),
    }
    return {name: {"unit": unit, "avg": value} for name, (value, unit) in values.items()}


def _distributions(run: Record, answers: Answers) -> dict[str, tuple[Floats, str]]:
    """Return the values of each metric, and their unit."""
    gap = metrics.of_each(answers.requests, "tpot")
    with np.errstate(divide="ignore", invalid="ignore"):
        per_user, prefill, whole = 1 / gap, answers.isl / answers.ttft, answers.osl / answers.latency
    return {
        "time_to_first_token": (answers.ttft * 1000, MS),
        "request_latency": (answers.latency * 1000, MS),
        "inter_token_latency": (gap * 1000, MS),
        "inter_chunk_latency": (answers.chunk_gaps * 1000, MS),
        "decode_duration": ((answers.last_s - answers.first_s) * 1000, MS),
        "output_token_throughput_per_user": (per_user, USER),
        "prefill_throughput_per_user": (prefill, USER),
        "e2e_output_token_throughput": (whole, USER),
        "output_sequence_length": (answers.osl.astype(float), TOKENS),
        "input_sequence_length": (answers.isl.astype(float), TOKENS),
    }


def _spread(values: Floats, unit: str) -> dict[str, Any]:
    """Return the statistics of the known values; percentiles are linear."""
    known = values[np.isfinite(values)]
    if not len(known):
        return {"unit": unit, "count": 0}
    cuts = zip(PERCENTILES, np.percentile(known, PERCENTILES), strict=True)
    return {
        "unit": unit,
        "avg": float(known.mean()),
        **{f"p{share}": float(value) for share, value in cuts},
        "min": float(known.min()),
        "max": float(known.max()),
        "std": float(known.std()),
        "count": len(known),
        "sum": float(known.sum()),
    }


def _rows(run: Record, begun: datetime.datetime) -> Iterator[dict[str, Any]]:
    """Yield a line per measured request that was sent."""
    requests, start_ns = run.measured.requests, int(begun.timestamp()) * 1_000_000_000
    sent = np.ma.filled(requests.sent_s, np.nan)
    times = {name: metrics.of_each(requests, key) for name, key in PER_REQUEST.items()}
    for place in np.flatnonzero(~np.isnan(sent)):
        known = {name: float(values[place]) * 1000 for name, values in times.items() if not np.isnan(values[place])}
        took_s = known.get("request_latency", 0.0) / 1000
        tokens = {"input_sequence_length": int(requests.isl[place]), "output_sequence_length": int(requests.osl[place])}
        error = str(requests.error[place])
        yield {
            "metadata": {
                "session_num": int(requests.request[place]),
                "request_start_ns": start_ns + round(float(sent[place]) * 1e9),
                "request_end_ns": start_ns + round((float(sent[place]) + took_s) * 1e9),
                "worker_id": "dynabench",
                "record_processor_id": "dynabench",
                "benchmark_phase": "profiling",
                "was_cancelled": False,
            },
            "metrics": {name: {"value": value, "unit": MS} for name, value in known.items()}
            | {name: {"value": value, "unit": TOKENS} for name, value in tokens.items()},
            "error": {"message": error} if error else None,
        }


PER_REQUEST = {"time_to_first_token": "ttft", "request_latency": "e2e", "inter_token_latency": "tpot"}
"""Our names for its metrics of a request."""


def _at(begun: datetime.datetime, seconds: float) -> str:
    return (begun + datetime.timedelta(seconds=seconds)).replace(tzinfo=None).isoformat()
