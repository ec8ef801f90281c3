"""Formats of lengths and ids: Mooncake's sessions, Bailian, BurstGPT, Azure, Weka (STUDY-measurement 2.2)."""

import datetime
from collections.abc import Iterator
from pathlib import Path

import msgspec

from workloads.blocks import BlockNamer
from workloads.request import Request, WorkloadError
from workloads.source import csv_rows, objects

Requests = Iterator[Request]


def read_mooncake_sessions(path: Path, namer: BlockNamer) -> Requests:
    """Mooncake's rows with `session_id` and `delay` (ms) instead of a timestamp: a turn follows the one before it.

    A row may hold the whole prompt, or with `"delta": true` only what it adds to the session's last prompt and answer.
    """
    last: dict[str, tuple[int, int, tuple[int, ...]]] = {}  # session -> number, tokens with the answer, ids
    for number, row in enumerate(objects(path)):
        session = row.text("session_id")
        before = last.get(session)
        length, ids = row.count("input_length"), row.ids("hash_ids")
        if row.values.get("delta") and before is not None:
            ids = before[2][: before[1] // namer.block_size] + ids
            length += before[1]
        expected = -(-length // namer.block_size)
        if len(ids) != expected:
            raise row.fail(f"{length} tokens in blocks of {namer.block_size} need {expected} hash_ids, not {len(ids)}")
        output = row.count("output_length")
        delay = row.number("delay", least=0, default=0) / 1000
        start = row.number("timestamp", least=0, default=0) / 1000
        after = (before[0],) if before is not None else ()
        yield Request(start, length, output, ids, session, after, delay if after else 0.0)
        last[session] = (number, length + output, ids)


def read_bailian(path: Path, namer: BlockNamer) -> Requests:
    """Alibaba's Qwen-Bailian: timestamps in s, 16-token ids, chats linked by `parent_chat_id`."""
    roots: dict[str, str] = {}
    for row in objects(path):
        chat, parent = row.text("chat_id"), row.text("parent_chat_id", "-1")
        roots[chat] = session = roots.get(parent, chat) if parent != "-1" else chat
        length, ids = row.count("input_length"), row.ids("hash_ids")
        expected = -(-length // namer.block_size)
        if len(ids) != expected:
            raise row.fail(f"{length} tokens in blocks of {namer.block_size} need {expected} hash_ids, not {len(ids)}")
        yield Request(row.number("timestamp", least=0), length, row.count("output_length"), ids, session)


def read_burstgpt(path: Path, namer: BlockNamer) -> Requests:
    """BurstGPT's CSV; rows without response tokens are failures of the service recorded and are left out."""
    for row in csv_rows(path):
        length, output = row.count("Request tokens", least=0), row.count("Response tokens", least=0)
        if length and output:
            session = row.values.get("Session ID") or ""
            yield Request(row.number("Timestamp", least=0), length, output, namer.unshared(length), str(session))


def read_azure(path: Path, namer: BlockNamer) -> Requests:
    """Azure's LLM inference traces of 2023 and 2024: UTC times with seven decimals."""
    for row in csv_rows(path):
        text = row.text("TIMESTAMP")
        try:
            whole, _, fraction = text.partition(".")
            digits = "".join(filter(str.isdigit, fraction.split("+")[0]))
            time = datetime.datetime.fromisoformat(whole.strip().removesuffix("Z")).replace(tzinfo=datetime.UTC)
        except ValueError:
            raise row.fail(f"TIMESTAMP must be a time such as 2023-11-16 18:15:46.6805900, not {text!r}") from None
        length = row.count("ContextTokens")
        seconds = time.timestamp() + (float(f"0.{digits}") if digits else 0.0)
        yield Request(seconds, length, row.count("GeneratedTokens"), namer.unshared(length))


def read_weka(path: Path, namer: BlockNamer) -> Requests:
    """Weka's agentic conversations: one object each, 64-token ids local to it, calls in order with think times.

    A sub-agent's call (`type: subagent`) starts with the call before it and the next call waits for both.
    """
    number = 0
    for conversation in objects(path):
        name = conversation.text("id")
        size = conversation.count("block_size", default=64)
        if size != namer.block_size:
            raise conversation.fail(f"block_size is {size}, not {namer.block_size}; name it with --trace-block-size")
        is_local = conversation.values.get("hash_id_scope", "local") == "local"
        open_: list[int] = []
        before: tuple[int, ...] = ()
        ended = 0.0
        for call in conversation.items("requests"):
            length, start = call.count("in"), call.number("t", least=0, default=0.0)
            ids = call.ids("hash_ids")
            expected = -(-length // size)
            if not expected - 1 <= len(ids) <= expected:  # a partial last block may have no id
                raise call.fail(f"{length} tokens in blocks of {size} need {expected} hash_ids, not {len(ids)}")
            ids = namer.renamed(name if is_local else "", ids)
            ids += namer.unshared((expected - len(ids)) * size)
            is_side = call.values.get("type") == "subagent"
            delay = call.number("think_time", least=0, default=max(start - ended, 0.0) if open_ else 0.0)
            after = before if is_side else tuple(open_)
            yield Request(start, length, call.count("out"), ids, name, after, delay if after else 0.0)
            if not is_side:
                before, open_ = after, []
            open_.append(number)
            ended = max(ended, start + call.number("api_time", least=0, default=0.0))
            number += 1


def in_order(requests: list[Request], path: Path) -> list[Request]:
    """Sort by arrival and let times begin at 0; those that wait for others stay behind them.

    Raises:
        WorkloadError: there is no request.
    """
    if not requests:
        raise WorkloadError(f"{path}: holds no request")
    first = min(request.arrival_s for request in requests)
    order = sorted(range(len(requests)), key=lambda number: (requests[number].arrival_s, number))
    latest: dict[int, float] = {}
    if any(request.after for request in requests):  # a request may not come before what it waits for
        for number, request in enumerate(requests):
            latest[number] = max([request.arrival_s, *(latest[parent] for parent in request.after)])
        order = sorted(range(len(requests)), key=lambda number: (latest[number], number))
    places = {number: place for place, number in enumerate(order)}
    return [
        msgspec.structs.replace(
            requests[number],
            arrival_s=latest.get(number, requests[number].arrival_s) - first,
            after=tuple(places[parent] for parent in requests[number].after),
        )
        for number in order
    ]
