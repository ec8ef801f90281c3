"""Applied Compute's workloads of agents (trie): the lengths of a session's prompt, answers and tool results, and waits.

Each turn's prompt holds the earlier prompts, answers and tool results. The files have no arrival times.
"""

from collections.abc import Iterator
from typing import Any

from workloads.formats.format import Format, has
from workloads.request import Request
from workloads.row import MAX_TOKENS, Row
from workloads.source import Source

LISTS = ("assistant_response_length", "tool_call_output_length", "tool_call_latency")
UNTIMED = "sessions without arrival times, which arrive at time 0 (--session-concurrency N plays N at a time)"


def _read(source: Source) -> Iterator[Request]:
    number = 0
    for session, row in enumerate(source.objects()):
        source.count(UNTIMED)
        before: Request | None = None
        for length, output, delay_s in _turns(row, source):
            if length > MAX_TOKENS:
                raise row.fail(f"the session's prompt has grown to {length:,} tokens; the limit is {MAX_TOKENS:,}")
            ids = source.namer.unshared(length) if before is None else source.namer.extended(before, length)
            after = () if before is None else (number - 1,)
            before = Request(0.0, length, output, ids, f"session {session}", after, delay_s)
            yield before
            number += 1


def _turns(row: Row, source: Source) -> Iterator[tuple[int, int, float]]:
    """Yield the prompt, answer and delay of each turn; the last has no tool call."""
    length, delay_s = row.count("input_prompt_length"), 0.0
    for turn in _tool_turns(row):
        output = source.output(turn, "assistant_response_length")
        yield length, output, delay_s
        length += output + turn.count("tool_call_output_length", least=0)
        delay_s = turn.seconds("tool_call_latency", unit="s")
    yield length, source.output(row, "final_assistant_response_length"), delay_s


def _tool_turns(row: Row) -> list[Row]:
    """Return the turns that call a tool, each with its values.

    Raises:
        WorkloadError: the lists do not have a value for each turn.
    """
    columns: list[list[Any]] = []
    for name in LISTS:
        values = row.values.get(name)
        if not isinstance(values, list) or len(values) != row.count("num_turns", least=0):
            raise row.fail(f"{name} must be a list of num_turns numbers")
        columns.append(values)
    rows = zip(*columns, strict=True)
    return [Row(dict(zip(LISTS, values, strict=True)), f"{row.place}, turn {n}") for n, values in enumerate(rows)]


FORMAT = Format(
    name="applied-compute",
    description="Applied Compute's sessions of agents (trie): num_turns, input_prompt_length, lists of lengths and tool waits (s)",
    tried="tried on Applied-Compute/trie: the beginning of workloads/office_work_8k.jsonl; applied-compute-agentic.jsonl in "
    "dynamo/replay/tests of ai-dynamo 1.6.1 (PyPI)",
    is_like=has("input_prompt_length", *LISTS),
    read=_read,
)
