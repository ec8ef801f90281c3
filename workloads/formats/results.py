"""The requests of one of our runs: requests.parquet of a results folder, or its export by `dynabench export`.

If a file has several runs, the first is read; the others were sent the same requests.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from workloads.formats.format import Format, has_columns
from workloads.request import Ends, Request
from workloads.source import Source

MEDIA_LEFT_OUT = "images and other media are left out, because results do not hold them"
"""A note."""


def _had_media(file: Path) -> bool:
    """Return whether what is beside a file of requests says that they had images or other media."""
    try:
        runs = json.loads((file.parent / "experiment.json").read_bytes())["runs"]
        return any(run.get("encoders") for run in runs)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False  # an export on its own does not say


def _read(source: Source) -> Iterator[Request]:
    first: tuple[str, str] | None = None
    for row in source.rows():
        run = (row.text("arm"), row.text("repeat"))
        if first is None:
            first = run
            source.keep([f"the requests of {run[0]}, repeat {run[1]}"])
            source.keep([MEDIA_LEFT_OUT] if any(map(_had_media, source.files)) else [])
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
