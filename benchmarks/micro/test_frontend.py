"""What the frontend does for each request, and for each frame of tokens."""

import json
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from serving.frontend.api.kinds import KINDS, KindName, parse_request
from serving.frontend.api.sse import ChoiceFormat, CompletionFormat
from serving.frontend.generation.text import ChoiceText
from serving.model.tokenizer import ByteTokenizer

TEXT = "The quick brown fox jumps over the lazy dog, and then the dog wakes. "
BODIES: dict[str, tuple[KindName, dict[str, Any]]] = {
    "64-token-ids": ("completion", {"prompt": list(range(64)), "max_tokens": 64, "stream": True}),
    "8192-token-ids": ("completion", {"prompt": list(range(8192)), "max_tokens": 64, "stream": True}),
    "chat-of-10-turns": (
        "chat",
        {"messages": [{"role": "user" if turn % 2 else "assistant", "content": TEXT * 8} for turn in range(10)]},
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_request_is_parsed(benchmark: BenchmarkFixture, name: str) -> None:
    kind, fields = BODIES[name]
    benchmark(parse_request, json.dumps({"model": "mock", **fields}).encode(), KINDS[kind].type)


@pytest.mark.parametrize("num_tokens", [1, 64])
@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_the_events_of_a_frame_are_written(benchmark: BenchmarkFixture, kind: str, num_tokens: int) -> None:
    choice = ChoiceFormat(CompletionFormat("1", "mock", is_chat=kind == "chat"), 0)
    benchmark(choice.tokens, [b" word"] * num_tokens)


@pytest.mark.parametrize("stops", [None, ["never", "in this text"]], ids=["no-stops", "two-stops"])
def test_64_tokens_become_text(benchmark: BenchmarkFixture, stops: list[str] | None) -> None:
    text = ChoiceText(ByteTokenizer().detokenizer(), stops=stops)
    benchmark(text.push, list(TEXT.encode()[:64]))


def test_64_tokens_become_text_beyond_ascii(benchmark: BenchmarkFixture) -> None:
    """Each character has three bytes, so tokens wait for each other."""
    text = ChoiceText(ByteTokenizer().detokenizer())
    benchmark(text.push, list("日本語".encode() * 8)[:63])
