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


def _read(source: Source) -> Iterator[Request]:
    for number, run in enumerate(source.objects()):
        if number:
            raise run.fail(
                "a second run, which may have another clock; put each run into its own file and join them with "
                "dynabench workload merge"
            )
        yield from _requests(run, source)


def _requests(run: Row, source: Source) -> Iterator[Request]:
    if missing := [name for name in NEEDED if name not in run.values]:
        raise run.fail(f"there is no {', '.join(missing)}; save the run with --save-detailed")
    starts, inputs, outputs = (_list(run, name) for name in NEEDED)
    waits, errors = (
        _list(run, name) if name in run.values else [None] * len(starts) for name in ("queue_times", "errors")
    )
    if len({len(each) for each in (starts, inputs, outputs, waits, errors)}) > 1:
        raise run.fail("the lists of its requests differ in length")
    for place, (start, length, output, wait, error) in enumerate(
        zip(starts, inputs, outputs, waits, errors, strict=True)
    ):
        row = Row(
            {"start_times": start, "input_lens": length, "output_lens": output, "queue_times": wait},
            f"{run.place}, request {place}",
        )
        sizes = source.sizes(row, "input_lens", "output_lens", is_failed=bool(error))
        if sizes is None:
            continue
        # With --max-concurrency, a request waits in the client before it is sent.
        sent_s, waited_s = (
            row.seconds("start_times", unit="s", least=None),
            row.seconds("queue_times", unit="s", default=0),
        )
        yield Request(sent_s - waited_s, *sizes, source.lengths_only(sizes[0]))


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
