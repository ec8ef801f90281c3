"""A report of guidellm 0.8: a benchmark per run, which `guidellm export` and `load_file` read.

Its ITL and TPOT are means over a request that count as often as it has tokens, and its TPOT includes the prompt. Rates
are taken over time, with the tokens of an answer spread evenly between its first and its last. Left out, which is a
distribution of no values there, is what is not kept or has another meaning: streaming iterations, tokens per iteration,
round trips, times of failed requests. The delays of its scheduler's own processes, which we do not have, are 0, as it requires a number there.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from reports.exports.answers import Answers, answers_of, begun_at, model_of
from reports.figures.load import Load, load_of
from reports.folder import Manifest
from reports.record.records import Floats, Record

QUANTILES = {
    "p001": 0.001,
    "p01": 0.01,
    "p05": 0.05,
    "p10": 0.1,
    "p25": 0.25,
    "p50": 0.5,
    "p75": 0.75,
    "p90": 0.9,
    "p95": 0.95,
    "p99": 0.99,
    "p999": 0.999,
}
NO_SERVER = "http://simulated.invalid"
"""The target of a simulation; guidellm requires an address."""
MERGED_S = 1e-4
"""Events this close together are one in a rate over time."""
NONE_OF = ("input", "input_per_second", "input_concurrency", "output", "output_per_second", "output_concurrency",
           "total", "total_per_second", "total_concurrency")  # fmt: skip
MEDIA = {
    "image": ("tokens", "images", "pixels", "bytes"),
    "video": ("tokens", "frames", "seconds", "bytes"),
    "audio": ("tokens", "samples", "seconds", "bytes"),
    "tool_call": ("tokens", "mixed_tokens", "count"),
    "text": ("tokens", "words", "characters"),
}
TEXT_TOKENS = {
    "input": "prompt_token_count",
    "output": "output_token_count",
    "total": "total_token_count",
    "input_per_second": "prompt_tokens_per_second",
    "output_per_second": "output_tokens_per_second",
    "total_per_second": "tokens_per_second",
}
"""Where it repeats metrics among those of text."""
NOT_KEPT = (
    "request_streaming_iterations_count",
    "time_to_first_output_token_ms",
    "time_to_last_round_trip_ms",
    "avg_round_trip_time_ms",
    "output_tokens_per_iteration",
    "iter_tokens_per_iteration",
)
NOTHING = {
    **dict.fromkeys(("mean", "median", "mode", "variance", "std_dev", "min", "max", "total_sum"), 0.0),
    "count": 0,
    "percentiles": dict.fromkeys(QUANTILES, 0.0),
}
"""A distribution of no values, as it writes it."""


def report(manifest: Manifest, runs: list[Record]) -> dict[str, Any]:
    """Return a report.

    Raises:
        ValueError: no request of a run was answered.
    """
    load = load_of(manifest, runs[0].arm)
    profile = {"kind": "replay"} if load.has_arrivals else {"kind": "concurrent", "streams": [load.streams]}
    spec = {
        "backend": {"kind": "openai_http", "target": _target(manifest), "model": model_of(manifest) or ""},
        "profile": profile,
        "data": [{"kind": "json_file", "path": manifest["workload"]["name"]}],
    }
    return {
        "metadata": {"version": 2, "guidellm_version": f"written by dynabench {_version(manifest)}"},
        "config": {"spec": spec, "metadata": {"labels": {"title": manifest["title"]}}},
        "benchmarks": [_benchmark(manifest, run, place) for place, run in enumerate(runs)],
    }


def _target(manifest: Manifest) -> str:
    return str((manifest.get("client") or {}).get("url") or NO_SERVER)


def _version(manifest: Manifest) -> str:
    return str(manifest.get("versions", {}).get("dynabench", ""))


def _benchmark(manifest: Manifest, run: Record, place: int) -> dict[str, Any]:
    answers = answers_of(run)
    strategy = _strategy(load_of(manifest, run.arm))
    start = begun_at(manifest).timestamp()
    first, last = start + float(np.nanmin(answers.sent_s)), start + float(np.nanmax(answers.end_s))
    return {
        "type_": "generative_benchmark",
        "config": {
            "run_id": f"{manifest['title']}: {run.arm}",
            "run_index": place,
            "strategy": strategy,
            "constraints": {},
            "profile": {"kind": strategy["type_"]},
            "requests": {"data": manifest["workload"]["name"]},
            "backend": {"target": _target(manifest), "model": model_of(manifest)},
            "environment": {"arm": run.arm, "repeat": run.repeat, "tool": "dynabench"},
        },
        "scheduler_state": {},
        "scheduler_metrics": _scheduled(answers, first, last),
        "metrics": _metrics(answers),
        "requests": {"successful": _requests(answers, start), "errored": [], "incomplete": []},
    }


def _strategy(load: Load) -> dict[str, Any]:
    if load.has_arrivals:
        return {"type_": "trace"}
    return {"type_": "concurrent", "streams": load.streams, "max_concurrency": load.streams}


def _scheduled(answers: Answers, first: float, last: float) -> dict[str, Any]:
    late_s = float(np.nanmean(answers.sent_s - answers.requests.intended_s))
    delays = ("queued_time", "resolve_start_delay", "resolve_targeted_start_delay", "request_start_delay",
              "resolve_end_delay", "resolve_time", "finalized_delay", "processed_delay")  # fmt: skip
    times = ("start_time", "request_start_time", "measure_start_time")
    return {
        **dict.fromkeys(times, first),
        **dict.fromkeys(("measure_end_time", "request_end_time", "end_time"), last),
        "requests_made": _made(answers),
        **{f"{name}_avg": 0.0 for name in delays},
        "request_targeted_start_delay_avg": late_s,
        "request_time_avg": float(np.nanmean(answers.end_s - answers.sent_s)),
    }


def _made(answers: Answers) -> dict[str, int]:
    good, failed = len(answers), answers.num_failed
    return {"successful": good, "errored": failed, "incomplete": 0, "total": good + failed}


def _metrics(answers: Answers) -> dict[str, Any]:
    found = {name: _by_status(_summary(*pair)) for name, pair in _values(answers).items()}
    found |= {name: _by_status(_summary(*pair, count)) for name, (pair, count) in _over_time(answers).items()}
    none_of: dict[str, Any] = {kind: {part: dict.fromkeys(NONE_OF) for part in parts} for kind, parts in MEDIA.items()}
    none_of["text"]["tokens"] |= {part: found[name] for part, name in TEXT_TOKENS.items()}
    return {"request_totals": _made(answers), **found, **{name: _by_status(None) for name in NOT_KEPT}, **none_of}


def _values(answers: Answers) -> dict[str, tuple[Floats, Floats]]:
    """Return the values of the metrics of requests, and how often each counts."""
    once, osl = np.ones(len(answers)), answers.osl.astype(float)
    decoded = np.maximum(osl - 1, 0)
    return {
        "request_latency": (answers.end_s - answers.sent_s, once),
        "prompt_token_count": (answers.isl.astype(float), once),
        "output_token_count": (osl, once),
        "total_token_count": (answers.isl + osl, once),
        "time_to_first_token_ms": (answers.ttft * 1000, once),
        "time_per_output_token_ms": (answers.latency * 1000 / np.maximum(osl, 1), osl),
        "inter_token_latency_ms": ((answers.last_s - answers.first_s) * 1000 / np.maximum(decoded, 1), decoded),
    }


def _over_time(answers: Answers) -> dict[str, tuple[tuple[Floats, Floats], int]]:
    """Return the values of rates and of the concurrency, how long each held, and the number of events."""
    window = float(np.nanmin(answers.sent_s)), float(np.nanmax(answers.end_s))
    ends = np.stack([answers.end_s, np.ones(len(answers))], axis=1)
    prompts, outputs = np.stack([answers.first_s, answers.isl], axis=1), _token_times(answers)
    num_prompt, num_output = int(answers.isl.sum()), int(answers.osl.sum())
    return {
        "requests_per_second": (_rates(ends, window), len(answers)),
        "prompt_tokens_per_second": (_rates(prompts, window), num_prompt),
        "output_tokens_per_second": (_rates(outputs, window), num_output),
        "tokens_per_second": (_rates(np.concatenate([prompts, outputs]), window), num_prompt + num_output),
        "request_concurrency": (_concurrency(answers.sent_s, answers.end_s), len(answers)),
    }


def _by_status(summary: dict[str, Any] | None) -> dict[str, Any]:
    """Return a breakdown by status; times of failed requests are not known, so the total is that of the others."""
    found = NOTHING if summary is None else summary
    return {"successful": found, "errored": NOTHING, "incomplete": NOTHING, "total": found}


def _summary(values: Floats, weights: Floats, count: int | None = None) -> dict[str, Any] | None:
    """Return the statistics of weighted values; percentiles are the smallest value that reaches the share."""
    is_known = np.isfinite(values) & (weights > 0)
    if not is_known.any():
        return None
    places, inverse = np.unique(values[is_known], return_inverse=True)
    shares = np.bincount(inverse, weights[is_known]) / weights[is_known].sum()
    reached = np.cumsum(shares)
    mean = float((places * shares).sum())
    variance = float(((places - mean) ** 2 * shares).sum())
    count = round(float(weights[is_known].sum())) if count is None else count

    def quantile(share: float) -> float:
        return float(places[min(int(np.searchsorted(reached, share)), len(places) - 1)])

    return {
        "mean": mean,
        "median": quantile(0.5),
        "mode": float(places[shares.argmax()]),
        "variance": variance,
        "std_dev": variance**0.5,
        "min": float(places[0]),
        "max": float(places[-1]),
        "count": count,
        "total_sum": mean * count,
        "percentiles": {name: quantile(share) for name, share in QUANTILES.items()},
    }


def _token_times(answers: Answers) -> Floats:
    """Return (time, 1) for every output token, evenly spaced between the first and the last of its answer."""
    osl = np.maximum(answers.osl, 1)
    row = np.repeat(np.arange(len(osl)), osl)
    place = np.arange(len(row)) - np.repeat(np.cumsum(osl) - osl, osl)
    share = place / np.maximum(osl - 1, 1)[row]
    times = answers.first_s[row] + share * (answers.last_s - answers.first_s)[row]
    return np.stack([times, np.ones(len(times))], axis=1)


def _rates(events: Floats, window: tuple[float, float]) -> tuple[Floats, Floats]:
    """Return rates over time and how long each held: an event's weight, over the time to halfway to its neighbours."""
    ends = np.array([[window[0], 0.0], [window[1], 0.0]])
    events = np.concatenate([events, ends])
    events = events[events[:, 0].argsort(kind="stable")]
    times, weights = _merged(events)
    if len(times) < 2:
        return np.empty(0), np.empty(0)
    middles = (times[1:] + times[:-1]) / 2
    edges = np.concatenate([times[:1], middles, times[-1:]])
    lasted = np.maximum(np.diff(edges), 1e-12)
    return weights / lasted, lasted


def _merged(events: Floats) -> tuple[Floats, Floats]:
    """Return the times and weights of events, in order, with those that are close together as one at the first's time."""
    starts, latest = [0], float(events[0, 0])
    for place, time in enumerate(events[:, 0].tolist()):
        if time - latest > MERGED_S:
            starts.append(place)
            latest = time
    return events[starts, 0], np.add.reduceat(events[:, 1], starts)


def _concurrency(sent: Floats, ends: Floats) -> tuple[Floats, Floats]:
    """Return how many requests were in flight, and how long each number held."""
    times = np.concatenate([sent, ends])
    changes = np.concatenate([np.ones(len(sent)), -np.ones(len(ends))])
    order = times.argsort(kind="stable")
    return np.cumsum(changes[order])[:-1], np.diff(times[order])


def _requests(answers: Answers, start: float) -> Iterable[dict[str, Any]]:
    columns = zip(
        answers.requests.request.tolist(),
        *(
            (start + times).tolist()
            for times in (answers.requests.intended_s, answers.sent_s, answers.first_s, answers.last_s, answers.end_s)
        ),
        answers.isl.tolist(),
        answers.osl.tolist(),
        strict=True,
    )
    return [
        {
            "type_": "generative_request_stats",
            "request_id": str(number),
            "info": {
                "request_id": str(number),
                "status": "completed",
                "timings": {
                    "targeted_start": intended,
                    "request_start": sent,
                    "first_token_iteration": first,
                    "last_token_iteration": last,
                    "request_end": end,
                    "resolve_end": end,
                },
            },
            "input_metrics": {"text_tokens": isl},
            "output_metrics": {"text_tokens": osl},
        }
        for number, intended, sent, first, last, end, isl, osl in columns
    ]
