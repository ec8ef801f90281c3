"""What `vllm bench serve` and SGLang's bench_serving write of a run.

Both divide by n - 1 for TPOT, leave answers of one token out of it, and take a gap between chunks as ITL. They differ in
when an answer ends: with its last token in vLLM, with the end of the stream in SGLang. Times between the chunks of one
request are not kept, so the lists `itls` and `generated_texts` are left out, and so are the peaks of single seconds.
"""

from typing import Any

import numpy as np

from reports.exports.answers import Answers, answers_of, begun_at, file_names, model_of, request_rate
from reports.figures.load import load_of
from reports.folder import Manifest
from reports.record.records import Floats, Record

SPREAD = (50, 90, 95, 99)
"""The percentiles of each metric."""


def vllm(manifest: Manifest, runs: list[Record]) -> dict[str, dict[str, Any]]:
    """Return what `vllm bench serve --save-detailed` would write of each run, by name.

    Raises:
        ValueError: no request of a run was answered.
    """
    return {name: _vllm(manifest, run) for name, run in zip(file_names(runs), runs, strict=True)}


def sglang(manifest: Manifest, runs: list[Record]) -> list[dict[str, Any]]:
    """Return a line of SGLang's `bench_serving --output-file` for each run.

    Raises:
        ValueError: no request of a run was answered.
    """
    return [_sglang(manifest, run) for run in runs]


def _vllm(manifest: Manifest, run: Record) -> dict[str, Any]:
    answers = answers_of(run)
    facts = {
        "date": begun_at(manifest).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "dynabench",
        "backend": "dynabench",
        "label": run.arm,
        "model_id": model_of(manifest),
        "tokenizer_id": None,
        "num_prompts": len(run.measured.requests),
        **_load(manifest, run.arm, answers),
        **_counts(answers),
        "failed": answers.num_failed,
        "total_token_throughput": int(answers.isl.sum() + answers.osl.sum()) / answers.wall_s,
    }
    requests = run.measured.requests
    sent = requests.sent_s.filled(0.0)
    answered = requests.succeeded
    detailed = {
        "input_lens": requests.isl.tolist(),
        "output_lens": np.where(answered, requests.osl, 0).tolist(),
        "ttfts": _times(requests.first_token_s, sent, answered),
        "latencies": _times(requests.last_token_s, sent, answered),
        "start_times": sent.tolist(),
        "queue_times": (sent - requests.intended_s).clip(min=0.0).tolist(),
        "errors": requests.error.tolist(),
    }
    return facts | detailed | _latencies(answers, answers.last_s, "e2el", ("mean", "median", "std", *SPREAD))


def _sglang(manifest: Manifest, run: Record) -> dict[str, Any]:
    answers = answers_of(run)
    ends = answers.end_s
    return {
        "tag": run.arm,
        "backend": "dynabench",
        "dataset_name": manifest["workload"]["name"],
        **_load(manifest, run.arm, answers),
        "server_info": None,
        **_counts(answers),
        "input_throughput": int(answers.isl.sum()) / answers.wall_s,
        "total_throughput": int(answers.isl.sum() + answers.osl.sum()) / answers.wall_s,
        **_latencies(answers, ends, "e2e_latency", ("mean", "median", "std", 90, 95, 99)),
        "concurrency": float((ends - answers.sent_s).sum()) / answers.wall_s,
        "accept_length": None,
    }


def _load(manifest: Manifest, arm: str, answers: Answers) -> dict[str, Any]:
    """Return the load; without arrival times, requests are sent as soon as they may be."""
    load = load_of(manifest, arm)
    rate = request_rate(answers) if load.has_arrivals else None
    return {"request_rate": "inf" if rate is None else rate, "max_concurrency": load.streams}


def _counts(answers: Answers) -> dict[str, Any]:
    return {
        "duration": answers.wall_s,
        "completed": len(answers),
        "total_input_tokens": int(answers.isl.sum()),
        "total_output_tokens": int(answers.osl.sum()),
        "request_throughput": len(answers) / answers.wall_s,
        "output_throughput": int(answers.osl.sum()) / answers.wall_s,
    }


def _latencies(answers: Answers, ends: Floats, end_to_end: str, statistics: tuple[str | int, ...]) -> dict[str, float]:
    """Return the statistics (ms) of TTFT, TPOT, ITL and the time to some ends."""
    several = answers.osl > 1
    decoded = (ends - answers.first_s)[several] / (answers.osl[several] - 1)
    found = {
        "ttft": answers.ttft,
        "tpot": decoded,
        "itl": answers.chunk_gaps,
        end_to_end: ends - answers.sent_s,
    }
    return {
        f"{statistic if isinstance(statistic, str) else f'p{statistic}'}_{name}_ms": _at(values * 1000, statistic)
        for name, values in found.items()
        if len(values)
        for statistic in statistics
    }


def _at(values: Floats, statistic: str | int) -> float:
    """Return a statistic; percentiles are linear, and the standard deviation is that of the values themselves."""
    match statistic:
        case "mean":
            return float(values.mean())
        case "median":
            return float(np.median(values))
        case "std":
            return float(values.std())
        case _:
            return float(np.percentile(values, int(statistic)))


def _times(ends: Any, sent: Floats, answered: Any) -> list[float]:
    """Return how long after sending something came, 0 for requests without an answer, as vLLM writes it."""
    return [float(value) for value in np.where(answered, np.ma.filled(ends, np.nan) - sent, 0.0)]
