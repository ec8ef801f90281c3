"""Formats of lengths and ids: Mooncake's sessions, Bailian, BurstGPT, Azure, Weka (STUDY-measurement 2.2)."""

import datetime
import itertools
from collections.abc import Generator, Iterator
from typing import IO

import msgspec

from workloads.blocks import wrong_count
from workloads.request import Request, Workload, WorkloadError
from workloads.source import MAX_TOKENS, Row, Source

Requests = Iterator[Request]
FAILED = "rows without prompt or response tokens left out"


def read_mooncake_sessions(source: Source) -> Requests:
    """Mooncake's rows with `session_id`: one with `delay` (ms), or without a time, follows the one before it."""
    last: dict[str, int] = {}
    for number, row in enumerate(source.objects()):
        session, length = row.text("session_id"), row.count("input_length")
        ids = _ids(row, length, source.namer.block_size)
        arrival_s, after, delay_s = row.timing(last.get(session))
        yield Request(arrival_s, length, row.count("output_length"), ids, session, after, delay_s)
        last[session] = number


def read_mooncake_delta(source: Source) -> Requests:
    """Mooncake's rows of sessions that hold only what a turn adds to the session's last prompt and answer.

    What a turn adds begins inside a block, so its blocks are named anew; full blocks of the prompt before stay.
    """
    size = source.namer.block_size
    last: dict[str, tuple[int, Request]] = {}
    for number, row in enumerate(source.objects()):
        session, length = row.text("session_id"), row.count("input_length")
        ids = source.namer.renamed("", _ids(row, length, size))
        before, earlier = last.get(session, (None, None))
        if earlier is not None:
            length += earlier.input_length + earlier.output_length
            if length > MAX_TOKENS:
                raise row.fail(f"the session's prompt has grown to {length:,} tokens; at most {MAX_TOKENS:,} are taken")
            kept = earlier.hash_ids[: earlier.input_length // size]
            ids = kept + source.namer.unshared(length - len(kept) * size)
        arrival_s, after, delay_s = row.timing(before)
        request = Request(arrival_s, length, row.count("output_length"), ids, session, after, delay_s)
        yield request
        last[session] = number, request


def write_mooncake_sessions(workload: Workload, file: IO[bytes]) -> None:
    """Write whole prompts with sessions; turns that wait have a delay instead of a timestamp."""
    for place, request in enumerate(workload):
        row = {
            "session_id": request.session or f"request {place}",
            "input_length": request.input_length,
            "output_length": request.output_length,
            "hash_ids": request.hash_ids,
        }
        row |= (
            {"delay": round(request.delay_s * 1000, 3)}
            if request.after
            else {"timestamp": round(request.arrival_s * 1000, 3)}
        )
        file.write(msgspec.json.encode(row) + b"\n")


def read_bailian(source: Source) -> Requests:
    """Alibaba's Qwen-Bailian: timestamps in s, ids of 16 tokens without what is before them, chats linked by parent."""
    roots: dict[str, str] = {}
    for row in source.objects():
        chat, parent = row.text("chat_id"), row.text("parent_chat_id", "-1")
        roots[chat] = session = roots.get(parent, parent) if parent != "-1" else chat
        length = row.count("input_length")
        ids = source.namer.chained(_ids(row, length, source.namer.block_size))
        yield Request(row.number("timestamp", least=0), length, row.count("output_length"), ids, session)


def write_bailian(workload: Workload, file: IO[bytes]) -> None:
    """Write chats linked by their parents."""
    last: dict[str, tuple[int, int]] = {}
    for place, request in enumerate(workload):
        parent, turn = last.get(request.session, (-1, 0)) if request.session else (-1, 0)
        row = {
            "chat_id": place,
            "parent_chat_id": parent,
            "timestamp": round(request.arrival_s, 6),
            "input_length": request.input_length,
            "output_length": request.output_length,
            "type": "text",
            "turn": turn + 1,
            "hash_ids": request.hash_ids,
        }
        last[request.session] = (place, turn + 1)
        file.write(msgspec.json.encode(row) + b"\n")


def read_burstgpt(source: Source) -> Requests:
    """BurstGPT's CSV; rows without response tokens are failures of the service recorded."""
    for row in source.csv_rows():
        length, output = row.count("Request tokens", least=0), row.count("Response tokens", least=0)
        if not length or not output:
            source.count(FAILED)
            continue
        session = row.values.get("Session ID") or ""
        yield Request(row.number("Timestamp", least=0), length, output, source.namer.unshared(length), str(session))


def write_burstgpt(workload: Workload, file: IO[bytes]) -> None:
    """Write lengths, times and the names of sessions."""
    file.write(b"Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n")
    for request in workload:
        sizes = f"{request.input_length},{request.output_length},{request.input_length + request.output_length}"
        file.write(f"{request.arrival_s:.6f},{request.session},,,{sizes},API log\n".encode())


def read_azure(source: Source) -> Requests:
    """Azure's LLM inference traces: UTC times, of 2023 with seven decimals, of 2024 with an offset and perhaps none."""
    for row in source.csv_rows():
        text = row.text("TIMESTAMP")
        try:
            time = datetime.datetime.fromisoformat(text.strip())
        except ValueError:
            raise row.fail(f"TIMESTAMP must be a time such as 2023-11-16 18:15:46.6805900, not {text[:40]!r}") from None
        length, output = row.count("ContextTokens", least=0), row.count("GeneratedTokens", least=0)
        if not length or not output:
            source.count(FAILED)
            continue
        seconds = (time if time.tzinfo else time.replace(tzinfo=datetime.UTC)).timestamp()
        yield Request(seconds, length, output, source.namer.unshared(length))


def write_azure(workload: Workload, file: IO[bytes]) -> None:
    """Write lengths and times."""
    start = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
    file.write(b"TIMESTAMP,ContextTokens,GeneratedTokens\n")
    for request in workload:
        time = start + datetime.timedelta(microseconds=round(request.arrival_s * 1e6))
        file.write(f"{time:%Y-%m-%d %H:%M:%S.%f}0,{request.input_length},{request.output_length}\n".encode())


def read_weka(source: Source) -> Requests:
    """Weka's agentic conversations: one object each, 64-token ids local to it, calls in order with think times."""
    numbers = itertools.count()
    for conversation in source.objects():
        size = conversation.count("block_size", default=64)
        if size != source.namer.block_size:
            raise conversation.fail(
                f"block_size is {size}, not {source.namer.block_size}; name it with --trace-block-size"
            )
        yield from _Conversation(conversation, source, numbers).requests()


class _Conversation:
    """Calls of an agent and of its sub-agents, which all name blocks in one scope.

        call ──┬── sub-agent: call, call ──┬── call
               └── sub-agent: call ────────┘

    Sub-agents start when the call before them has ended, and the next call waits for all of them. A recorded `t` is
    when a call began, and of a sub-agent with a `duration_ms` when it ended; one without was not waited for.
    """

    def __init__(self, row: Row, source: Source, numbers: Iterator[int]) -> None:
        self._row = row
        self._name = row.text("id")
        self._scope = self._name if row.values.get("hash_id_scope", "local") == "local" else ""
        self._source = source
        self._numbers = numbers

    def requests(self) -> Requests:
        """Yield its calls, each behind those it waits for."""
        yield from self._calls(self._row.items("requests"), 0.0, None, 0.0)

    def _calls(
        self, entries: list[Row], start: float, before: int | None, before_end: float
    ) -> Generator[Request, None, int | None]:
        """Yield a chain of calls whose times count from `start`, behind the call `before`; return its last."""
        results: list[int] = []
        results_end = 0.0
        is_first = True
        for entry in entries:
            time = start + entry.number("t", least=0, default=0.0)
            if entry.values.get("type") == "subagent":
                duration = entry.number("duration_ms", least=0, default=-1.0) / 1000
                began = max(time - max(duration, 0.0), 0.0)
                last = yield from self._calls(entry.items("requests"), began, before, before_end)
                if duration >= 0 and last is not None and last != before:
                    results.append(last)
                    results_end = max(results_end, time)
                continue
            delay = time - max(before_end, results_end)
            if not results and not is_first:
                delay = entry.number("think_time", least=0, default=max(delay, 0.0))
            after = tuple(results) or (() if before is None else (before,))
            yield self._call(entry, time, after, max(delay, 0.0) if after else 0.0)
            before, before_end = next(self._numbers), time + entry.number("api_time", least=0, default=0.0)
            results, is_first = [], False
        return before

    def _call(self, entry: Row, time: float, after: tuple[int, ...], delay: float) -> Request:
        namer, length = self._source.namer, entry.count("in")
        output = entry.count("out", least=0)
        if not output:
            self._source.count("calls without output, taken as of 1 token")
        ids, expected = entry.ids("hash_ids"), -(-length // namer.block_size)
        problem = wrong_count(length, ids, namer.block_size)
        if problem is not None and len(ids) != expected - 1:  # a partial last block may have no id
            raise entry.fail(problem)
        named = namer.renamed(self._scope, ids) + namer.unshared((expected - len(ids)) * namer.block_size)
        return Request(time, length, output or 1, named, self._name, after, delay)


def in_order(requests: list[Request], name: str) -> list[Request]:
    """Sort by arrival and let times begin at 0; those that wait for others stay behind them.

    Raises:
        WorkloadError: there is no request.
    """
    if not requests:
        raise WorkloadError(f"{name}: holds no request")
    starts: list[float] = []
    for request in requests:  # which comes no earlier than what it waits for
        starts.append(max([request.arrival_s, *(starts[parent] for parent in request.after)]))
    first = min(starts)
    order = sorted(range(len(requests)), key=lambda number: (starts[number], number))
    places = {number: place for place, number in enumerate(order)}
    return [
        msgspec.structs.replace(
            requests[number],
            arrival_s=starts[number] - first,
            after=tuple(places[parent] for parent in requests[number].after),
        )
        for number in order
    ]


def _ids(row: Row, length: int, size: int) -> tuple[int, ...]:
    """Return a row's ids, one for each block."""
    ids = row.ids("hash_ids")
    if (problem := wrong_count(length, ids, size)) is not None:
        raise row.fail(f"{problem} (is --trace-block-size right?)")
    return ids
