"""OpenAI's batch files: `{"custom_id", "method", "url", "body"}`."""

from collections.abc import Iterator
from typing import IO

import msgspec

from workloads import texts
from workloads.formats.format import Format, has, json_priority
from workloads.request import Request
from workloads.row import Row, short
from workloads.source import Source
from workloads.workload import Workload

ENDPOINTS = ("/chat/completions", "/completions")
"""Ends of the addresses whose requests can be sent again."""


def _read(source: Source) -> Iterator[Request]:
    for row in source.objects():
        url = row.values.get("url", "/completions")
        if not str(url).endswith(ENDPOINTS):
            raise row.fail(f"url {short(url)} is not supported; expected /v1/chat/completions or /v1/completions")
        body = row.values.get("body")
        if not isinstance(body, dict):
            raise row.fail("body must be an object")
        yield texts.body_request(source, Row(body, f"{row.place}, body"))


def _write(workload: Workload, file: IO[bytes]) -> None:
    for place, request in enumerate(workload):
        is_chat = not isinstance(request.content, str)
        body = {"model": "", "messages" if is_chat else "prompt": request.content}
        body |= (request.extra_body or {}) | {request.limit_field: request.output_length} | json_priority(request)
        url = "/v1/chat/completions" if is_chat else "/v1/completions"
        file.write(msgspec.json.encode({"custom_id": str(place), "method": "POST", "url": url, "body": body}) + b"\n")


FORMAT = Format(
    name="openai-batch",
    description="OpenAI batch JSONL: custom_id, method, url, body",
    tried="tried on vllm-project/vllm: examples/offline_inference/openai_batch/openai_example_batch.jsonl",
    is_like=has("body"),
    read=_read,
    write=_write,
    block_size=16,
    keeps=frozenset({"sharing", "text", "priorities", "fields"}),
)
