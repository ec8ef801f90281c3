"""vLLM's custom dataset: `{"prompt"}`, optionally with `output_tokens`."""

from collections.abc import Iterator
from typing import IO

import msgspec

from workloads import texts
from workloads.formats.format import Format, has, json_priority
from workloads.request import Request, WorkloadError
from workloads.source import Source
from workloads.workload import Workload


def _read(source: Source) -> Iterator[Request]:
    return (texts.prompt_request(source, row) for row in source.objects())


def _write(workload: Workload, file: IO[bytes]) -> None:
    for request in workload:
        if not isinstance(request.content, str):
            raise WorkloadError(
                "vllm-custom has one text per prompt, not chat messages; convert to openai-batch instead"
            )
        row = {"prompt": request.content, "output_tokens": request.output_length, **json_priority(request)}
        file.write(msgspec.json.encode(row) + b"\n")


FORMAT = Format(
    name="vllm-custom",
    description="vLLM's custom dataset: prompt, perhaps output_tokens",
    is_like=has("prompt"),
    read=_read,
    write=_write,
    block_size=16,
    keeps=frozenset({"sharing", "text", "priorities"}),
)
