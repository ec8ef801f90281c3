"""Azure's LLM inference traces, with UTC times: 2023 has seven decimals; 2024 has an offset and sometimes no decimals."""

import datetime
from collections.abc import Iterator
from typing import IO

from workloads.formats.format import Format, has_columns
from workloads.request import Request, Workload
from workloads.source import FAILED, Row, Source


def _read(source: Source) -> Iterator[Request]:
    for row in source.rows():
        seconds = _seconds(row)
        length, output = row.count("ContextTokens", least=0), row.count("GeneratedTokens", least=0)
        if not length or not output:
            source.count(FAILED)
            continue
        yield Request(seconds, length, output, source.lengths_only(length))


def _seconds(row: Row) -> float:
    text = row.text("TIMESTAMP")
    try:
        time = datetime.datetime.fromisoformat(text.strip())
    except ValueError:
        raise row.fail(f"TIMESTAMP must be a time such as 2023-11-16 18:15:46.6805900, not {text[:40]!r}") from None
    return (time if time.tzinfo else time.replace(tzinfo=datetime.UTC)).timestamp()


def _write(workload: Workload, file: IO[bytes]) -> None:
    start = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
    file.write(b"TIMESTAMP,ContextTokens,GeneratedTokens\n")
    for request in workload:
        time = start + datetime.timedelta(microseconds=round(request.arrival_s * 1e6))
        file.write(f"{time:%Y-%m-%d %H:%M:%S.%f}0,{request.input_length},{request.output_length}\n".encode())


FORMAT = Format(
    name="azure",
    description="Azure 2023 / 2024 CSV: TIMESTAMP, ContextTokens, GeneratedTokens",
    tried="tried on Azure/AzurePublicDataset: data/AzureLLMInferenceTrace_code.csv and _conv.csv; rows of 2024 in its notebook",
    is_like=has_columns(b"TIMESTAMP", b"ContextTokens"),
    read=_read,
    write=_write,
    suffix=".csv",
    keeps=frozenset({"times"}),
)
