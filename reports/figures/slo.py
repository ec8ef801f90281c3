"""Service-level objectives: what a good request is, and what a good run is."""

import numpy as np
import numpy.typing as npt

from foundation.text import instead_of
from reports.figures import metrics
from reports.figures.conditions import METRICS, Condition, read_condition
from reports.record.records import Record

MLPERF = {
    "llama2-70b": (2.0, 0.2),
    "llama2-70b-interactive": (0.45, 0.04),
    "llama3.1-8b": (2.0, 0.1),
    "llama3.1-8b-interactive": (0.5, 0.03),
    "llama3.1-405b": (6.0, 0.175),
    "llama3.1-405b-interactive": (4.5, 0.08),
    "mixtral-8x7b": (2.0, 0.2),
    "deepseek-r1": (2.0, 0.08),
    "deepseek-r1-interactive": (1.5, 0.015),
    "gpt-oss-120b": (3.0, 0.08),
    "gpt-oss-120b-interactive": (2.0, 0.02),
}
"""MLPerf inference's server scenarios: limits on the 99th percentiles of TTFT and TPOT (s)."""


def parse_slo(text: str) -> Condition:
    """Parse a limit: `ttft.p99 <= 2s` on a run, or `ttft <= 2s` on each request.

    Raises:
        ValueError: it is not a limit.
    """
    found = read_condition(text)
    if (
        found is None
        or found.is_above
        or found.is_signed
        or found.metric not in ("ttft", "ttst", "tpot", "itl", "e2e")
        or found.unit not in ("ms", "s")
    ):
        raise ValueError(
            f"slo {text!r} is not understood; expected something like 'ttft.p99 <= 2000ms' (on a run: mean, p50, p90, p95, p99, "
            "max) or 'ttft <= 2s' (on each request); metrics: ttft, ttst, tpot, itl and e2e"
        )
    if found.metric == "itl" and found.statistic is None:
        raise ValueError(f"slo {text!r}: itl has no value per request; use tpot, or itl.p99")
    return _limit(found.metric, found.statistic, found.value)


def preset(name: str) -> list[Condition]:
    """Return MLPerf's limits for a model.

    Raises:
        ValueError: there is no such preset.
    """
    if name not in MLPERF:
        raise ValueError(f"slo_preset {name!r} is unknown; {instead_of(name, MLPERF)}")
    ttft, tpot = MLPERF[name]
    return [_limit("ttft", "p99", ttft), _limit("tpot", "p99", tpot)]


def _limit(metric: str, statistic: str | None, limit_s: float) -> Condition:
    """Return a limit with the text that reports show for it."""
    name = metric if statistic is None else f"{metric}.{statistic}"
    return Condition(f"{name} <= {limit_s * 1000:.12g} ms", metric, statistic, "<=", limit_s, "s")


def good_requests(run: Record, limits: list[Condition]) -> npt.NDArray[np.bool_]:
    """Return which requests were good (within every limit), shape (requests,); failed ones are not good.

    A limit on a run applies to each request, too. A request without a value (one token has no TPOT) is within it; one with an
    unknown time of the second token is not.
    """
    values = metrics.per_request(run.requests)
    result = run.requests.succeeded
    for limit in limits:
        value = values.get(METRICS[limit.metric])
        if value is not None:
            has_none = np.isnan(value) & ((limit.metric != "ttst") | (run.requests.osl < 2))
            result &= has_none | (value <= limit.value)
    return np.asarray(result, bool)
