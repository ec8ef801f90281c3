"""The same records as other tools would report them, under their names, for comparison with their output."""

from collections.abc import Callable

import numpy as np

from reports.figures import metrics
from reports.record.records import Floats, Record, Requests

Rows = list[tuple[str, str, Floats]]
"""(name, formula, values in s) of each line of the table."""


def aiperf(run: Record) -> Rows:
    """aiperf 0.13: its ITL is one value per request."""  # noqa: D403
    values = metrics.per_request(run.requests)
    return [
        ("Time to First Token", "first response - request start", values["ttft"]),
        ("Request Latency", "last response - request start", values["e2e"]),
        ("Inter Token Latency", "(latency - TTFT) / (OSL - tokens of the first chunk), per request", values["tpot"]),
        ("Inter Chunk Latency", "gaps between chunks, pooled", between_chunks(run)),
    ]


def vllm(run: Record) -> Rows:
    """`vllm bench serve` 0.32: TPOT divides by n - 1; ITL is a gap between chunks, however many tokens they have."""
    values = metrics.per_request(run.requests)
    return [
        ("TTFT", "first chunk with text - request start", values["ttft"]),
        (
            "TPOT",
            "(E2EL - TTFT) / (output tokens - 1), per request; none for one token",
            np.where(np.isnan(values["ttft"]), np.nan, _between(run.requests)),
        ),
        ("ITL", "gaps between chunks, pooled; a chunk of many tokens is one gap", between_chunks(run)),
        ("E2EL", "last chunk - request start", values["e2e"]),
    ]


def guidellm(run: Record) -> Rows:
    """guidellm 0.8: its TPOT includes the prompt's computation; a request counts as often as it has tokens."""  # noqa: D403
    values, osl = metrics.per_request(run.requests), run.requests.osl
    between = np.where(np.isnan(values["ttft"]), np.nan, _between(run.requests))
    return [
        ("TTFT", "first token - request start", values["ttft"]),
        (
            "TPOT",
            "(last token - request start) / output tokens: prefill included; weighted by output tokens",
            np.repeat(values["e2e"] / np.where(osl > 0, osl, np.nan), osl),
        ),
        (
            "ITL",
            "(last token - first token) / (output tokens - 1); weighted by output tokens - 1",
            np.repeat(between, np.maximum(osl - 1, 0)),
        ),
        ("Request Latency", "end of the answer - request start", _whole(run.requests)),
    ]


LIKE: dict[str, Callable[[Record], Rows]] = {"aiperf": aiperf, "vllm": vllm, "guidellm": guidellm}


def table(runs: list[Record], tool: str) -> list[tuple[str, str, metrics.Statistics]]:
    """Return (name, formula, mean and percentiles) of the runs of one arm, as a tool would report them."""
    parts = [LIKE[tool](run.measured) for run in runs]
    return [
        (name, formula, metrics.describe(np.concatenate([part[place][2] for part in parts])))
        for place, (name, formula, _) in enumerate(parts[0])
    ]


def _between(requests: Requests) -> Floats:
    """Return (last token - first token) / (output tokens - 1), NaN for one token."""
    decoding: Floats = (requests.last_token_s - requests.first_token_s).filled(np.nan)
    return decoding / np.where(requests.osl > 1, requests.osl - 1, np.nan)


def _whole(requests: Requests) -> Floats:
    """Return end of the answer - sent, NaN where a request failed; the last token is the end where no other is known."""
    ends = np.where(np.ma.getmaskarray(requests.done_s), requests.last_token_s.filled(np.nan), requests.done_s.data)
    whole = ends - requests.sent_s.filled(np.nan)
    return np.where(requests.succeeded, whole, np.nan)


def between_chunks(run: Record) -> Floats:
    """Return the gaps between chunks: a live run logs each chunk, and a simulated one has one token per chunk."""
    first, slope, curve, steps, tokens = run.gaps.T if len(run.gaps) else np.empty((5, 0))
    if run.is_live:
        gaps: Floats = first * tokens
        return gaps
    total = steps.sum()
    stride = max(int(total // 200_000), 1)  # a sample of the steps is enough for percentiles
    parts = [
        np.repeat(f + s * j + c * j * j, int(w))
        for f, s, c, n, w in zip(first, slope, curve, steps, tokens, strict=True)
        for j in (np.arange(0, n, stride),)
    ]
    return np.concatenate(parts) if parts else np.empty(0)
