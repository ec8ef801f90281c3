"""Azure's LLM inference traces, with UTC times: 2023 has seven decimals; 2024 has an offset and sometimes no decimals."""

import datetime
from collections.abc import Iterator
from typing import IO

from workloads.formats.format import Format, csv_priorities, has_columns
from workloads.request import Request
from workloads.row import Row
from workloads.source import Source
from workloads.workload import Workload


def _read(source: Source) -> Iterator[Request]:
    for row in source.rows():
        seconds = _seconds(row)
        if sizes := source.sizes(row, "ContextTokens", "GeneratedTokens"):
            yield Request(seconds, *sizes, source.lengths_only(sizes[0]), priority=row.priority())


def _seconds(row: Row) -> float:
    text = row.text("TIMESTAMP")
    try:
        time = datetime.datetime.fromisoformat(text.strip())
    except ValueError:
        raise row.fail(f"TIMESTAMP must be a time such as 2023-11-16 18:15:46.6805900, not {text[:40]!r}") from None
    return (time if time.tzinfo else time.replace(tzinfo=datetime.UTC)).timestamp()


def _write(workload: Workload, file: IO[bytes]) -> None:
    start = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
    name, priorities = csv_priorities(workload)
    file.write(f"TIMESTAMP,ContextTokens,GeneratedTokens{name}\n".encode())
    for request, priority in zip(workload, priorities, strict=True):
        time = start + datetime.timedelta(microseconds=round(request.arrival_s * 1e6))
        file.write(f"{time:%Y-%m-%d %H:%M:%S.%f}0,{request.input_length},{request.output_length}{priority}\n".encode())


FORMAT = Format(
    name="azure",
    description="Azure 2023 / 2024 CSV: TIMESTAMP, ContextTokens, GeneratedTokens",
    tried="tried on Azure/AzurePublicDataset: data/AzureLLMInferenceTrace_code.csv and _conv.csv; rows of 2024 in its notebook",
    is_like=has_columns("TIMESTAMP", "ContextTokens"),
    read=_read,
    write=_write,
    suffix=".csv",
    keeps=frozenset({"times", "priorities"}),
)
