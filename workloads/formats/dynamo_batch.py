"""Dynamo's batch input: `{"text"}`."""

from collections.abc import Iterator

from workloads import texts
from workloads.formats.format import Format
from workloads.request import Request
from workloads.source import Source


def _read(source: Source) -> Iterator[Request]:
    return (texts.prompt_request(source, row) for row in source.objects())


FORMAT = Format(
    name="dynamo-batch",
    description="Dynamo's batch input: text",
    is_like=lambda first, _: first is not None and set(first) == {"text"},
    read=_read,
    block_size=16,
)
