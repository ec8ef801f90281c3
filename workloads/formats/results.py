"""The requests of one of our runs: requests.parquet of a results folder, or its export by `dynabench export`.

If a file has several runs, the first is read; the others were sent the same requests.
"""

from collections.abc import Iterator

from workloads.formats.format import Format, has_columns
from workloads.request import Ends, Request
from workloads.source import Source


def _read(source: Source) -> Iterator[Request]:
    first: tuple[str, str] | None = None
    for row in source.rows():
        run = (row.text("arm"), row.text("repeat"))
        if first is None:
            first = run
            source.keep([f"the requests of {run[0]}, repeat {run[1]}"])
        if run != first:
            continue
        sizes = source.sizes(row, "isl", "osl", is_failed=bool(row.text("error", "")))
        if sizes is None:
            continue
        ends: Ends = "stop" if row.values.get("finish_reason") == "stop" else "length"
        arrival_s = row.seconds("intended_s", unit="s", least=None)
        yield Request(
            arrival_s, *sizes, source.lengths_only(sizes[0]), ends=ends, priority=row.priority(), adapter=row.adapter()
        )


FORMAT = Format(
    name="dynabench-results",
    description="a run of ours: the results folder, its requests.parquet, or what dynabench export wrote (CSV, Parquet)",
    tried="what dynabench writes",
    is_like=has_columns("arm", "intended_s", "isl", "osl"),
    read=_read,
    suffix=".parquet",
)
