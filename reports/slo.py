"""Service-level objectives: what a good request is, and what a good run is."""

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reports import metrics
from reports.records import Record

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
"""MLPerf inference's server scenarios: limits of the 99th percentiles of TTFT and TPOT (s)."""

_FORM = re.compile(r"\s*(ttft|tpot|itl|e2e)(?:\.(mean|p50|p90|p95|p99|max))?\s*<=?\s*([0-9.]+)\s*(ms|s)\s*")
_NAMES = {"ttft": "ttft_sched", "e2e": "e2e_sched"}


@dataclass(frozen=True, slots=True)
class Limit:
    """`ttft.p99 <= 2 s`: of a run; `ttft <= 2 s`: of a request."""

    metric: str
    statistic: str | None
    limit_s: float

    def __str__(self) -> str:
        name = next((short for short, long in _NAMES.items() if long == self.metric), self.metric)
        return f"{name}{'.' + self.statistic if self.statistic else ''} <= {self.limit_s * 1000:g} ms"


def parse(text: str) -> Limit:
    """Read a limit.

    Raises:
        ValueError: it is none.
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(
            f"slo {text!r} is not understood; expected something like 'ttft.p99 <= 2000ms' (of a run: mean, p50, p90, p95, p99, "
            "max) or 'ttft <= 2s' (of each request), of ttft, tpot, itl or e2e"
        )
    name, statistic, number, unit = match.groups()
    if name == "itl" and statistic is None:
        raise ValueError(f"slo {text!r}: itl has no value per request; use tpot, or itl.p99")
    return Limit(_NAMES.get(name, name), statistic, float(number) / (1000 if unit == "ms" else 1))


def preset(name: str) -> list[Limit]:
    """Return MLPerf's limits for a model.

    Raises:
        ValueError: there is no such preset.
    """
    if name not in MLPERF:
        raise ValueError(f"slo_preset {name!r} is unknown; expected one of {', '.join(MLPERF)}")
    ttft, tpot = MLPERF[name]
    return [Limit("ttft_sched", "p99", ttft), Limit("tpot", "p99", tpot)]


def good(run: Record, limits: list[Limit]) -> npt.NDArray[np.bool_]:
    """Tell which requests were good, shape (requests,): within every limit; failed ones are not good.

    A limit of a run counts for each request too. A request without a value (one token has no TPOT) is within it.
    """
    values = metrics.per_request(run.requests)
    result = run.requests.succeeded
    for limit in limits:
        if limit.metric in values:
            value = values[limit.metric]
            result &= np.isnan(value) | (value <= limit.limit_s)
    return np.asarray(result, bool)
