"""The output of `vllm bench serve --save-result --save-detailed`: a JSON object of figures, and of lists with an item per request.

Prompts are not included, so only lengths are known. Times are those of the client's monotonic clock.
"""

from collections.abc import Iterator
from typing import Any

from workloads.formats.format import Format, has
from workloads.request import Request
from workloads.row import Row
from workloads.source import Source

NEEDED = ("start_times", "input_lens", "output_lens")
OPTIONAL = ("queue_times", "errors", "latencies")


def _read(source: Source) -> Iterator[Request]:
    for row in requests_of(source):
        sizes = source.sizes(row, "input_lens", "output_lens", is_failed=bool(row.values["errors"]))
        if sizes is None:
            continue
        # With --max-concurrency, a request waits in the client before it is sent.
        arrival_s = sent_s(row) - row.seconds("queue_times", unit="s", default=0)
        yield Request(arrival_s, *sizes, source.lengths_only(sizes[0]))


def requests_of(source: Source, *more: str) -> Iterator[Row]:
    """Yield each request with its values in the lists that are needed, optional, or named.

    Raises:
        WorkloadError: a list is missing, or there is a second run.
    """
    for number, run in enumerate(source.objects()):
        if number:
            raise run.fail(
                "a second run, which may have another clock; put each run into its own file and join them with "
                "dynabench workload merge"
            )
        yield from _rows(run, (*NEEDED, *more))


def sent_s(row: Row) -> float:
    """Return when a request was sent, on the client's clock."""
    return row.seconds("start_times", unit="s", least=None)


def _rows(run: Row, needed: tuple[str, ...]) -> Iterator[Row]:
    if missing := [name for name in needed if name not in run.values]:
        raise run.fail(f"there is no {', '.join(missing)}; save the run with --save-detailed")
    columns = {name: _list(run, name) for name in needed}
    count = len(columns[needed[0]])
    columns |= {name: _list(run, name) if name in run.values else [None] * count for name in OPTIONAL}
    if any(len(column) != count for column in columns.values()):
        raise run.fail("the lists of its requests differ in length")
    for place, values in enumerate(zip(*columns.values(), strict=True)):
        yield Row(dict(zip(columns, values, strict=True)), f"{run.place}, request {place}")


def _list(run: Row, name: str) -> list[Any]:
    value = run.values[name]
    if not isinstance(value, list):
        raise run.fail(f"{name} must be a list")
    return value


FORMAT = Format(
    name="vllm-bench",
    description="a run of vllm bench serve --save-detailed: start_times, input_lens, output_lens",
    tried="tried on what vLLM 0.32 wrote of a run against the mocker",
    is_like=has("request_throughput", "total_input_tokens"),
    read=_read,
)
