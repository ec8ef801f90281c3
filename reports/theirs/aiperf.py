"""What AIPerf wrote of a run: profile_export.jsonl, a line per request, or profile_export_aiperf.json, its figures."""

from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from reports.figures.load import Load, sent_as
from reports.figures.metrics import Statistics, Throughput
from reports.record.records import MAX_S, Record, Requests
from reports.theirs.measured import Measured, gap_rows, of_figures, of_runs, statistics

TOOL = "AIPerf"
GAPS_OF_CHUNKS = "its gaps are between chunks, however many tokens they have, so they are not shown as ITL"
ROWS_FOR_INTERVALS = "give its profile_export.jsonl, or the folder, for intervals"
Nanoseconds = Annotated[int, Meta(ge=0)]


class Metadata(msgspec.Struct, frozen=True):
    """What is needed of a line's metadata."""

    request_start_ns: Nanoseconds
    request_end_ns: Nanoseconds
    benchmark_phase: str = "profiling"


class Value(msgspec.Struct, frozen=True):
    """A metric of a request."""

    value: float | list[float] | None = None


class Row(msgspec.Struct, frozen=True):
    """A line."""

    metadata: Metadata
    metrics: dict[str, Value] = {}
    error: Any = None

    def ms(self, name: str) -> float:
        """Return a time (ms), NaN where there is none."""
        found = self.metrics.get(name)
        value = found.value if found else None
        return value if isinstance(value, float | int) and abs(value) <= MAX_S else np.nan

    def tokens(self, *names: str) -> int:
        """Return the first of some counts that there is, or 0."""
        for name in names:
            if not np.isnan(count := self.ms(name)):
                return int(count)
        return 0

    @property
    def gaps_ms(self) -> list[float]:
        """Times between its chunks."""
        found = self.metrics.get("inter_chunk_latency")
        return found.value if found and isinstance(found.value, list) else []


class Figure(msgspec.Struct, frozen=True):
    """A metric of a run."""

    unit: str
    avg: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None
    count: int | None = None


SCALES = {"ms": 1e-3, "sec": 1.0, "s": 1.0, "us": 1e-6, "ns": 1e-9}


def is_like_rows(first: dict[str, Any]) -> bool:
    """Return whether it is a line of a request."""
    return {"metadata", "metrics"} <= first.keys() and "benchmarks" not in first


def is_like(first: dict[str, Any]) -> bool:
    """Return whether it has the figures of a run."""
    latency = first.get("request_latency")
    return isinstance(latency, dict) and "unit" in latency


def read_rows(objects: list[dict[str, Any]]) -> dict[str, Measured]:
    """Return the measured requests as a run.

    Raises:
        ValueError: no request was answered.
    """
    rows = [msgspec.convert(value, Row) for value in objects]
    rows = sorted(
        (row for row in rows if row.metadata.benchmark_phase != "warmup"),
        key=lambda row: row.metadata.request_start_ns,
    )
    answered = [not row.error and not np.isnan(row.ms("request_latency")) for row in rows]
    if not any(answered):
        raise ValueError("no request was answered")
    base = rows[0].metadata.request_start_ns
    sent = np.array([(row.metadata.request_start_ns - base) / 1e9 for row in rows])
    first, last = (sent + [row.ms(name) / 1e3 for row in rows] for name in ("time_to_first_token", "request_latency"))
    # An answer that is not streamed has no first token of its own.
    requests = Requests.of(
        intended_s=sent,
        sent_s=sent,
        first_token_s=first,
        last_token_s=last,
        done_s=np.array([(row.metadata.request_end_ns - base) / 1e9 for row in rows]),
        isl=[row.tokens("usage_prompt_tokens", "input_sequence_length") for row in rows],
        osl=[row.tokens("usage_completion_tokens", "output_sequence_length") for row in rows],
        first_chunk_tokens=[int(each) for each in answered],
        error=["" if good else str(_message(row.error)) for good, row in zip(answered, rows, strict=True)],
    )
    gaps = [gap / 1e3 for row in rows for gap in row.gaps_ms if abs(gap) <= MAX_S]
    is_by_token = len(gaps) == int(np.maximum(requests.osl - 1, 0).sum())
    wall_s = float(requests.done_s.max() - sent.min())
    record = Record("", requests, gap_rows(gaps if is_by_token else []), wall_s, 1, is_live=True)
    return {"": of_runs([record], tool=TOOL, lacks=() if is_by_token else (GAPS_OF_CHUNKS,))}


def _message(error: Any) -> str:
    """Return why a request failed."""
    return str(error.get("message") if isinstance(error, dict) else error or "no answer")


def read(objects: list[dict[str, Any]]) -> dict[str, Measured]:
    """Return a run of which its figures are known."""
    value = objects[0]
    known = {
        name: msgspec.convert(one, Figure) for name, one in value.items() if isinstance(one, dict) and "unit" in one
    }

    def average(name: str) -> float | None:
        return known[name].avg if name in known else None

    answered, failed = round(average("request_count") or 0), round(average("error_request_count") or 0)
    chunks, tokens = known.get("inter_chunk_latency"), average("total_osl")
    is_by_token = chunks is not None and tokens is not None and chunks.count == round(tokens) - answered
    names = {"ttft": "time_to_first_token", "tpot": "inter_token_latency", "e2e": "request_latency"}
    names |= {"itl": "inter_chunk_latency"} if is_by_token else {}
    lacks = (ROWS_FOR_INTERVALS,) if is_by_token else (ROWS_FOR_INTERVALS, GAPS_OF_CHUNKS)
    measured = of_figures(
        {ours: _statistics(known[theirs]) for ours, theirs in names.items() if theirs in known},
        answered=answered,
        failed=failed,
        rates=Throughput(average("request_throughput"), average("output_token_throughput")),
        tokens=(average("input_sequence_length"), average("output_sequence_length")),
        tool=TOOL,
        load=load_of(value),
        lacks=lacks,
    )
    return {"": measured}


def _statistics(figure: Figure) -> Statistics:
    """Return a figure in s.

    Raises:
        ValueError: it has a unit that is not known.
    """
    if figure.unit not in SCALES:
        raise ValueError(f"a time has the unit {figure.unit!r}; expected one of {', '.join(SCALES)}")
    found = {"mean": figure.avg} | {name: getattr(figure, name) for name in ("p50", "p90", "p95", "p99", "max")}
    return statistics(figure.count or 0, found, scale=SCALES[figure.unit])


def load_of(value: dict[str, Any]) -> Load | None:
    """Return how requests were sent, if its settings are there."""
    config = value.get("input_config")
    phases = config.get("phases") if isinstance(config, dict) else None
    first = next((one for one in phases or () if isinstance(one, dict) and one.get("name") == "profiling"), {})
    return sent_as(first.get("concurrency"), first.get("rate"))
