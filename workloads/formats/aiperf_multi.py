"""aiperf's multi_turn: a turn's prompt includes the earlier turns, and their answers at the requested lengths."""

from collections.abc import Iterator

from workloads.formats import turns
from workloads.formats.format import Format, has_list
from workloads.request import Request
from workloads.row import MAX_TOKENS
from workloads.source import Source


def _read(source: Source) -> Iterator[Request]:
    number = 0
    for conversation in source.objects():
        session, history = conversation.text("session_id", f"session {number}"), ""
        before: int | None = None
        for turn in conversation.items("turns"):
            request = turns.request(source, turn, history=history, session=session, before=before)
            yield request
            if len(history) + 3 * request.output_length > MAX_TOKENS:
                raise turn.fail(f"the conversation has grown to more than {MAX_TOKENS:,} characters")
            answer = " ".join(f"a{number}" for _ in range(request.output_length))
            history += f"{turns.text(turn)}\n{answer}\n"
            before = number
            number += 1


FORMAT = Format(
    name="aiperf-multi",
    description="aiperf multi_turn JSONL: session_id, turns of text, delay (ms)",
    tried="tried on examples in ai-dynamo/aiperf: aiperf/dataset/loader/multi_turn.py",
    is_like=has_list("turns"),
    read=_read,
    block_size=16,
    time_unit="ms",
)
