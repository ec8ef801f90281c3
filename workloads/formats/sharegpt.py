"""ShareGPT: each answer of a conversation is a request whose prompt is everything said before it."""

from collections.abc import Iterator
from typing import Any

from workloads import texts
from workloads.formats.format import Format, has_list
from workloads.request import Request
from workloads.row import Row
from workloads.source import Source

ANSWERS = ("gpt", "assistant", "chatgpt", "bard", "bing", "function_call")
"""Names of the role of the model."""


def _read(source: Source) -> Iterator[Request]:
    number = 0
    for conversation in source.objects():
        messages: list[dict[str, str]] = []
        after: tuple[int, ...] = ()
        name, before = conversation.text("id", f"conversation {number}"), number
        for turn in conversation.items("conversations"):
            text = turn.text("value") if "value" in turn.values else turn.text("content")
            role = _role(turn, len(messages))
            if role in ANSWERS and messages:
                length = texts.num_tokens(source, text)
                yield texts.request(source, turn, list(messages), output=length, session=name, after=after)
                after = (number,)
                number += 1
                messages.append({"role": "assistant", "content": text})
            else:
                messages.append({"role": "system" if role == "system" else "user", "content": text})
        if number == before:
            source.count("conversations without an answer to anything left out")


def _role(turn: Row, num_before: int) -> Any:
    """Return who speaks; if a turn does not say, user and model alternate."""
    return turn.values.get("from") or turn.values.get("role") or ("assistant" if num_before % 2 else "user")


FORMAT = Format(
    name="sharegpt",
    description="ShareGPT JSON (an array) or JSONL of conversations (SGLang's custom form): from / role, value / content",
    tried="tried on lm-sys/FastChat: data/dummy_conversation.json; hiyouga/LLaMA-Factory: data/glaive_toolcall_en_demo.json; rows of "
    "sgl-project/sglang: benchmark/stress_suite/data/synthetic_trace.jsonl",
    is_like=has_list("conversations"),
    read=_read,
    block_size=16,
)
