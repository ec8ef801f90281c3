"""Formats with text: ShareGPT, OpenAI batches, aiperf, vLLM, SGLang, Dynamo (STUDY-measurement 2.2)."""

from collections.abc import Iterator
from typing import IO, Any

import msgspec

from workloads.blocks import Encode
from workloads.request import Request, Workload, WorkloadError
from workloads.source import MAX_TOKENS, Row, Source

Requests = Iterator[Request]
LENGTHS = ("output_length", "output_tokens", "output_len", "max_tokens", "max_completion_tokens", "max_output_tokens")

ANSWERS = ("gpt", "assistant", "chatgpt", "bard", "bing", "function_call")
"""Who speaks for the model in ShareGPT's conversations."""


class TextReader:
    """Turns texts into requests: counts tokens, names blocks, supplies the answer's length where it is not given."""

    def __init__(self, source: Source, encode: Encode, default_osl: int) -> None:
        self._source = source
        self._encode = encode
        self._default_osl = default_osl

    def request(
        self,
        row: Row,
        content: Any,
        *,
        output: int | None = None,
        history: str = "",
        arrival_s: float = 0.0,
        session: str = "",
        after: tuple[int, ...] = (),
        delay_s: float = 0.0,
    ) -> Request:
        """Make a request of a text or of chat messages."""
        tokens = self._encode(history + (content if isinstance(content, str) else flatten(content)))
        if not tokens:
            raise row.fail("the prompt is empty")
        length = output or row.count(*LENGTHS, default=self._default_osl)
        return Request(
            arrival_s, len(tokens), length, self._source.namer.named(tokens), session, after, delay_s, content
        )

    def count(self, text: str) -> int:
        """Count the tokens of a text, at least one."""
        return max(len(self._encode(text)), 1)

    def sharegpt(self) -> Requests:
        """ShareGPT: each answer of a conversation is a request whose prompt is all that was said before."""
        number = 0
        for conversation in self._source.objects():
            messages: list[dict[str, str]] = []
            after: tuple[int, ...] = ()
            name = conversation.text("id", f"conversation {number}")
            for turn in conversation.items("conversations"):
                text = turn.text("value") if "value" in turn.values else turn.text("content")
                role = (
                    turn.values.get("from") or turn.values.get("role") or ("assistant" if len(messages) % 2 else "user")
                )
                if role in ANSWERS and messages:
                    yield self.request(turn, list(messages), output=self.count(text), session=name, after=after)
                    after = (number,)
                    number += 1
                    messages.append({"role": "assistant", "content": text})
                else:
                    messages.append({"role": "system" if role == "system" else "user", "content": text})

    def openai_batch(self) -> Requests:
        """OpenAI's batch files: `{"custom_id", "method", "url", "body"}`."""
        for row in self._source.objects():
            body = row.values.get("body")
            if not isinstance(body, dict):
                raise row.fail("body must be an object")
            yield self._body(Row(body, f"{row.place}, body"))

    def openai_messages(self) -> Requests:
        """SGLang's openai form: `{"messages", "max_tokens"}`, a request body a line."""
        for row in self._source.objects():
            yield self._body(row)

    def prompts(self) -> Requests:
        """`{"prompt"}` (vLLM's custom dataset) or `{"text"}` (Dynamo's batches)."""
        for row in self._source.objects():
            yield self.request(row, row.text("prompt" if "prompt" in row.values else "text"))

    def aiperf_single(self) -> Requests:
        """Aiperf's single_turn: text with a timestamp or a delay in ms; rows of a session follow each other."""
        last: dict[str, int] = {}
        for number, row in enumerate(self._source.objects()):
            session = row.text("session_id", "")
            yield self._turn(row, "", session, last.get(session) if session else None)
            last[session] = number

    def aiperf_multi(self) -> Requests:
        """Aiperf's multi_turn: a turn's prompt holds the turns before it, and answers as long as they were asked for."""
        number = 0
        for conversation in self._source.objects():
            session, history = conversation.text("session_id", f"session {number}"), ""
            before: int | None = None
            for turn in conversation.items("turns"):
                request = self._turn(turn, history, session, before)
                yield request
                if len(history) + 3 * request.output_length > MAX_TOKENS:
                    raise turn.fail(f"the conversation has grown to more than {MAX_TOKENS:,} characters")
                answer = " ".join(f"a{number}" for _ in range(request.output_length))
                history += f"{_text(turn)}\n{answer}\n"
                before = number
                number += 1

    def _turn(self, row: Row, history: str, session: str, before: int | None) -> Request:
        arrival_s, after, delay_s = row.timing(before)
        return self.request(
            row, _text(row), history=history, arrival_s=arrival_s, session=session, after=after, delay_s=delay_s
        )

    def _body(self, row: Row) -> Request:
        if "messages" in row.values:
            return self.request(row, [item.values for item in row.items("messages")])
        if "prompt" in row.values:
            return self.request(row, row.text("prompt"))
        raise row.fail("messages or prompt is missing")


def write_openai_batch(workload: Workload, file: IO[bytes]) -> None:
    """Write request bodies."""
    for place, request in enumerate(workload):
        is_chat = not isinstance(request.content, str)
        body = {"model": "", "messages" if is_chat else "prompt": request.content, "max_tokens": request.output_length}
        url = "/v1/chat/completions" if is_chat else "/v1/completions"
        file.write(msgspec.json.encode({"custom_id": str(place), "method": "POST", "url": url, "body": body}) + b"\n")


def write_prompts(workload: Workload, file: IO[bytes]) -> None:
    """Write texts and lengths of answers."""
    for request in workload:
        if not isinstance(request.content, str):
            raise WorkloadError("vllm-custom has one text a prompt, not chat messages; convert to openai-batch")
        row = {"prompt": request.content, "output_tokens": request.output_length}
        file.write(msgspec.json.encode(row) + b"\n")


def flatten(messages: list[dict[str, Any]]) -> str:
    """Spell chat messages as one text, as a plain chat template would."""
    parts = []
    for message in messages:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        parts.append(f"<{message.get('role', 'user')}>\n{content}\n")
    return "".join(parts)


def _text(row: Row) -> str:
    texts = row.values.get("texts")
    if not isinstance(texts, list):
        return row.text("text")
    parts: list[Any] = []
    for text in texts:
        contents = text.get("contents", []) if isinstance(text, dict) else [text]
        parts += contents if isinstance(contents, list) else [contents]
    if not all(isinstance(part, str) for part in parts):
        raise row.fail("texts must be a list of texts, or of objects with contents")
    return "".join(parts)
