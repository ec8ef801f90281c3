"""The figures of arms as OpenMetrics text, which Prometheus and its textfile collector read: a summary per metric."""

from collections.abc import Callable, Iterator

from reports.figures.metrics import FORMULAS, Statistics
from reports.summary import ArmSummary, Summary

QUANTILES = {"p50": "0.5", "p90": "0.9", "p95": "0.95", "p99": "0.99"}
LATENCIES = {
    "ttft": "time_to_first_token",
    "ttft_sched": "scheduled_time_to_first_token",
    "tpot": "time_per_output_token",
    "itl": "inter_token_latency",
    "e2e": "end_to_end_latency",
    "e2e_sched": "scheduled_end_to_end_latency",
}
GAUGES: dict[str, tuple[str, Callable[[ArmSummary], float | None]]] = {
    "requests": ("Requests that were sent.", lambda arm: arm.requests),
    "failed_requests": ("Requests that failed.", lambda arm: arm.failed),
    "valid": ("1 if the runs of the arm are valid.", lambda arm: float(not arm.notes)),
    "requests_per_second": (FORMULAS["throughput"], lambda arm: arm.throughput.requests_per_s),
    "output_tokens_per_second": (FORMULAS["throughput"], lambda arm: arm.throughput.output_tokens_per_s),
    "goodput_requests_per_second": (
        FORMULAS["goodput"],
        lambda arm: arm.goodput.goodput_per_s if arm.goodput else None,
    ),
    "attainment_ratio": (FORMULAS["attainment"], lambda arm: arm.goodput.attainment if arm.goodput else None),
    "prefix_cache_hit_ratio": (FORMULAS["hit_share"], lambda arm: arm.cache.hit_share),
}


def text(summary: Summary) -> str:
    """Return a family per figure, with a sample for each arm that has it."""
    lines = list[str]()
    for metric, name in LATENCIES.items():
        samples = [line for arm, its in summary.arms.items() for line in _summary(name, arm, its.metric(metric))]
        lines += _family(f"{name}_seconds", "summary", FORMULAS[metric], samples, unit="seconds")
    for name, (help_text, value_of) in GAUGES.items():
        values = {arm: value_of(its) for arm, its in summary.arms.items()}
        samples = [_sample(name, value, arm=arm) for arm, value in values.items() if value is not None]
        lines += _family(name, "gauge", help_text, samples)
    return "\n".join([*lines, "# EOF", ""])


def _summary(name: str, arm: str, figures: Statistics) -> Iterator[str]:
    """Yield the samples of a summary; quantiles for which the sample is too small are left out."""
    if figures.mean is None:
        return
    for statistic, quantile in QUANTILES.items():
        value = figures.at(statistic)
        if value is not None:
            yield _sample(f"{name}_seconds", value, arm=arm, quantile=quantile)
    yield _sample(f"{name}_seconds_count", figures.count, arm=arm)
    yield _sample(f"{name}_seconds_sum", figures.mean * figures.count, arm=arm)


def _family(name: str, kind: str, help_text: str, samples: list[str], *, unit: str = "") -> list[str]:
    """Return a family with its description; nothing without samples."""
    if not samples:
        return []
    full = f"dynabench_{name}"
    head = [
        f"# TYPE {full} {kind}",
        *([f"# UNIT {full} {unit}"] if unit else []),
        f"# HELP {full} {_escaped(help_text)}",
    ]
    return [*head, *samples]


def _sample(name: str, value: float, **labels: str) -> str:
    said = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"dynabench_{name}{{{said}}} {value!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
