"""aiperf's single_turn: text with a timestamp or a delay in ms; rows of a session follow each other."""

from collections.abc import Iterator

from workloads.formats import turns
from workloads.formats.format import Format
from workloads.request import Request
from workloads.source import Source


def _read(source: Source) -> Iterator[Request]:
    last: dict[str, int] = {}
    for number, row in enumerate(source.objects()):
        session = row.text("session_id", "")
        yield turns.request(source, row, session=session, before=last.get(session) if session else None)
        last[session] = number


FORMAT = Format(
    name="aiperf-single",
    description="aiperf single_turn JSONL: text or texts, timestamp or delay (ms), output_length",
    tried="tried on examples in ai-dynamo/aiperf: aiperf/dataset/loader/single_turn.py",
    is_like=lambda first, _: first is not None and ("text" in first or "texts" in first),
    read=_read,
    block_size=16,
    time_unit="ms",
)
