"""AIPerf's records of a run (profile_export.jsonl): a row per request, with `metadata` and `metrics`.

Prompts are not included, so only lengths are known. Times are those at which the load generator released a request.
"""

from collections.abc import Iterator

from workloads.formats.format import Format, has
from workloads.request import Request
from workloads.row import Row
from workloads.source import FAILED, Source

SENT = ("request_start_ns", "timestamp_ns")
"""Names of the time at which a request was sent; older versions have the second."""
WARM_UP = "requests of the warm-up left out"


def _read(source: Source) -> Iterator[Request]:
    for metadata, _, sizes in requests_of(source):
        # A request is released at its time, and sent when there is a connection for it.
        arrival_s, session = (
            metadata.seconds("credit_issued_ns", *SENT, unit="ns"),
            metadata.text("x_correlation_id", ""),
        )
        yield Request(arrival_s, *sizes, source.lengths_only(sizes[0]), session)


def requests_of(source: Source) -> Iterator[tuple[Row, Row, tuple[int, int]]]:
    """Yield the metadata, metrics and sizes of the measured requests that were answered, and count the others."""
    for row in source.objects():
        metadata, metrics = row.object("metadata"), _values(row.object("metrics"))
        sizes = _sizes(metrics)
        if "warmup" in (metadata.values.get("benchmark_phase"), metadata.values.get("credit_phase")):
            source.count(WARM_UP)
        elif row.values.get("error") or not all(sizes):
            source.count(FAILED)
        else:
            yield metadata, metrics, sizes


def _sizes(metrics: Row) -> tuple[int, int]:
    """Return the tokens of a request's prompt and answer: as the server counted them, with its template, or the client."""
    return (
        metrics.count("usage_prompt_tokens", "input_sequence_length", least=0, default=0),
        metrics.count("usage_completion_tokens", "output_sequence_length", least=0, default=0),
    )


def _values(metrics: Row) -> Row:
    """Return metrics without their units."""
    plain = {name: metric.get("value") for name, metric in metrics.values.items() if isinstance(metric, dict)}
    return Row(plain, metrics.place)


FORMAT = Format(
    name="aiperf-export",
    description="a run of AIPerf: profile_export.jsonl, with metadata and metrics of each request",
    tried="tried on what AIPerf 0.13 wrote of a run against the mocker; ai-dynamo/aiperf: "
    "examples/artifacts/run1/profile_export.jsonl, which an older version wrote",
    is_like=has("metadata", "metrics"),
    read=_read,
)
