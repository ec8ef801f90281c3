"""LLMServingSim's workloads: requests with token ids, and sessions whose calls wait for each other and for tools.

`{"input_toks", "output_toks", "arrival_time_ns", "input_tok_ids"}`
`{"session_id", "arrival_time_ns", "sub_requests": [{"input_toks", "output_toks", "tool_duration_ns"}]}`
"""

from collections.abc import Iterator

from workloads.formats.format import Format, has
from workloads.request import Request
from workloads.row import Row
from workloads.source import Source

UNKNOWN = "requests without input_tok_ids, so what their prompts share is not known"
OTHER_LENGTH = (
    "requests with more or fewer input_tok_ids than input_toks: cut, or filled with tokens that are not shared"
)


def _read(source: Source) -> Iterator[Request]:
    number = 0
    for line, row in enumerate(source.objects()):
        arrival_s = row.seconds("arrival_time_ns", unit="ns")
        calls = row.items("sub_requests") if row.has("sub_requests") else [row]
        session = row.text("session_id", f"session {line}") if row.has("sub_requests") else ""
        delay_s = 0.0
        for place, call in enumerate(calls):
            length = call.count("input_toks")
            after = (number - 1,) if place else ()
            ids, output = _ids(call, length, source), source.output(call, "output_toks")
            yield Request(arrival_s, length, output, ids, session, after, delay_s, priority=call.priority())
            delay_s = call.seconds("tool_duration_ns", unit="ns", default=0)
            number += 1


def _ids(row: Row, length: int, source: Source) -> tuple[int, ...]:
    """Name the blocks of a prompt by its tokens."""
    if not row.values.get("input_tok_ids"):
        source.count(UNKNOWN)
        return source.lengths_only(length)
    tokens = row.ids("input_tok_ids")
    if len(tokens) == length:
        return source.namer.named(tokens)
    source.count(OTHER_LENGTH)
    size = source.namer.block_size
    known = min(len(tokens), length) // size * size
    return source.namer.named(tokens[:known]) + source.namer.unshared(length - known)


FORMAT = Format(
    name="llmservingsim",
    description="LLMServingSim JSONL: input_toks, output_toks, arrival_time_ns, perhaps input_tok_ids; sessions with sub_requests",
    tried="tried on casys-kaist/LLMServingSim: workloads/example_trace.jsonl, sharegpt-llama-3.1-8b-300-sps10.jsonl and "
    "workload_me2_01_mixed.jsonl",
    is_like=has("arrival_time_ns"),
    read=_read,
    block_size=16,
)
