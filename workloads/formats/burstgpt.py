"""BurstGPT's CSV; rows without response tokens are failures of the recorded service."""

from collections.abc import Iterator
from typing import IO

from workloads.formats.format import Format, csv_priorities, has_columns
from workloads.request import Request
from workloads.source import Source
from workloads.workload import Workload

QUOTE = '"'
SPECIAL = {QUOTE, ",", "\n", "\r"}
"""Characters that a CSV cell can contain only in quotes."""


def _read(source: Source) -> Iterator[Request]:
    for row in source.rows():
        sizes = source.sizes(row, "Request tokens", "Response tokens")
        if sizes is None:
            continue
        arrival_s, session = row.seconds("Timestamp", unit="s"), str(row.values.get("Session ID") or "")
        yield Request(arrival_s, *sizes, source.lengths_only(sizes[0]), session, priority=row.priority())


def _write(workload: Workload, file: IO[bytes]) -> None:
    name, priorities = csv_priorities(workload)
    columns = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
    file.write(f"{columns}{name}\n".encode())
    for request, priority in zip(workload, priorities, strict=True):
        sizes = f"{request.input_length},{request.output_length},{request.input_length + request.output_length}"
        session = f'"{request.session.replace(QUOTE, 2 * QUOTE)}"' if SPECIAL & {*request.session} else request.session
        file.write(f"{request.arrival_s:.6f},{session},,,{sizes},API log{priority}\n".encode())


FORMAT = Format(
    name="burstgpt",
    description="BurstGPT CSV: Timestamp (s), Request tokens, Response tokens",
    tried="tried on rows of HPMLL/BurstGPT: data/BurstGPT_1.csv (its own copy is a pointer), in fnstggl/energy2: tests/fixtures",
    is_like=has_columns("Timestamp", "Request tokens"),
    read=_read,
    write=_write,
    time_unit="s",
    suffix=".csv",
    keeps=frozenset({"times", "names", "priorities"}),
)
