"""Weka's agentic conversations: one object each, with local ids of 64 tokens and calls in order with think times."""

import itertools
from collections.abc import Generator, Iterator

from workloads.blocks import wrong_count
from workloads.formats.format import Format, has_list
from workloads.request import Request
from workloads.row import Row
from workloads.source import Source


def _read(source: Source) -> Iterator[Request]:
    numbers = itertools.count()
    for conversation in source.objects():
        size = conversation.count("block_size", default=64)
        if size != source.namer.block_size:
            raise conversation.fail(
                f"block_size is {size}, not {source.namer.block_size}; set it with --trace-block-size"
            )
        yield from _Conversation(conversation, source, numbers).requests()


class _Conversation:
    """Calls of an agent and its sub-agents, which all name blocks in the same scope.

        call ──┬── sub-agent: call, call ──┬── call
               └── sub-agent: call ────────┘

    Sub-agents start when the call before them has ended, and the next call waits for all of them. A recorded `t` is
    when a call started; for a sub-agent with a `duration_ms`, it is when it ended. One without was not waited for.
    """

    def __init__(self, row: Row, source: Source, numbers: Iterator[int]) -> None:
        self._row = row
        self._name = row.text("id")
        self._scope = self._name if row.values.get("hash_id_scope", "local") == "local" else ""
        self._source = source
        self._numbers = numbers

    def requests(self) -> Iterator[Request]:
        """Yield its calls, each after those it waits for."""
        yield from self._calls(self._row.items("requests"), 0.0, None, 0.0)

    def _calls(
        self, entries: list[Row], start: float, before: int | None, before_end: float
    ) -> Generator[Request, None, int | None]:
        """Yield a chain of calls with times counted from `start`, after the call `before`; return its last."""
        results: list[int] = []
        results_end = 0.0
        is_first = True
        for entry in entries:
            time = start + entry.seconds("t", unit="s", default=0.0)
            if entry.values.get("type") == "subagent":
                duration = entry.seconds("duration_ms", default=-1000.0)
                began = max(time - max(duration, 0.0), 0.0)
                last = yield from self._calls(entry.items("requests"), began, before, before_end)
                if duration >= 0 and last is not None and last != before:
                    results.append(last)
                    results_end = max(results_end, time)
                continue
            delay = time - max(before_end, results_end)
            if not results and not is_first:
                delay = entry.seconds("think_time", unit="s", default=max(delay, 0.0))
            after = tuple(results) or (() if before is None else (before,))
            yield self._call(entry, time, after, max(delay, 0.0) if after else 0.0)
            before, before_end = next(self._numbers), time + entry.seconds("api_time", unit="s", default=0.0)
            results, is_first = [], False
        return before

    def _call(self, entry: Row, time: float, after: tuple[int, ...], delay: float) -> Request:
        namer, length = self._source.namer, entry.count("in")
        ids, expected = entry.ids("hash_ids"), -(-length // namer.block_size)
        problem = wrong_count(length, ids, namer.block_size)
        if problem is not None and len(ids) != expected - 1:  # a partial last block may have no id
            raise entry.fail(problem)
        named = namer.renamed(self._scope, ids) + namer.unshared((expected - len(ids)) * namer.block_size)
        return Request(time, length, self._source.output(entry, "out"), named, self._name, after, delay)


FORMAT = Format(
    name="weka",
    description="Weka / kv-cache-tester: a JSON object per conversation, 64-token ids local to it, think times, sub-agents",
    tried="tried on callanjfox/kv-cache-tester: 710 of the 739 files of traces/",
    is_like=has_list("requests"),
    read=_read,
    block_size=64,
)
