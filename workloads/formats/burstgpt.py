"""BurstGPT's CSV; rows without response tokens are failures of the recorded service."""

from collections.abc import Iterator
from typing import IO

from workloads.formats.format import Format, has_columns
from workloads.request import Request, Workload
from workloads.source import FAILED, Source

QUOTE = '"'
SPECIAL = {QUOTE, ",", "\n", "\r"}
"""Characters that a CSV cell can contain only in quotes."""


def _read(source: Source) -> Iterator[Request]:
    for row in source.rows():
        length, output = row.count("Request tokens", least=0), row.count("Response tokens", least=0)
        if not length or not output:
            source.count(FAILED)
            continue
        session = row.values.get("Session ID") or ""
        yield Request(row.number("Timestamp", least=0), length, output, source.lengths_only(length), str(session))


def _write(workload: Workload, file: IO[bytes]) -> None:
    file.write(b"Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n")
    for request in workload:
        sizes = f"{request.input_length},{request.output_length},{request.input_length + request.output_length}"
        session = f'"{request.session.replace(QUOTE, 2 * QUOTE)}"' if SPECIAL & {*request.session} else request.session
        file.write(f"{request.arrival_s:.6f},{session},,,{sizes},API log\n".encode())


FORMAT = Format(
    name="burstgpt",
    description="BurstGPT CSV: Timestamp (s), Request tokens, Response tokens",
    tried="tried on rows of HPMLL/BurstGPT: data/BurstGPT_1.csv (its own copy is a pointer), in fnstggl/energy2: tests/fixtures",
    is_like=has_columns(b"Timestamp", b"Request tokens"),
    read=_read,
    write=_write,
    suffix=".csv",
    keeps=frozenset({"times", "names"}),
)
