"""The clients of a rehearsal: each request over HTTP, and what came of it."""

import ast
import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any

import httptools
import msgspec

from dynabench.live.events import AnswerError, AnswerReader
from dynabench.rehearsal.virtual_time.tcp import PORT

DONE = b"data: [DONE]"
"""The last event of a stream."""
MESSAGE = re.compile(r"""["']message["']: ?("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')""")
"""The message of an error, in JSON or as Python prints it."""


class Question(msgspec.Struct, frozen=True):
    """A request that is sent."""

    number: int
    at_s: float
    """When (s)."""
    prompt: list[int]
    max_tokens: int
    leaves_after: int | None = None
    """The client hangs up after so many tokens; None: it stays."""
    reads_slowly_s: float = 0.0
    """The client reads nothing for so long after the first bytes (s)."""
    model: str = "mock"
    """The model that is asked for."""
    is_chat: bool = False
    """Whether the prompt is the text of a message, one character for each token."""
    is_too_long: bool = False
    """Whether it does not fit the model, which must refuse it (HTTP 400)."""

    @property
    def id(self) -> str:
        """Its id, as engines know it, too."""
        return f"question-{self.number}"

    @property
    def path(self) -> str:
        """Where it is posted."""
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    @property
    def body(self) -> bytes:
        """What is posted."""
        text = "".join(map(chr, self.prompt)) if self.is_chat else ""
        chat = {
            "messages": [{"role": "user", "content": text}],
            "user": self.id,
        }  # engines of whole requests know no id
        prompt = chat if self.is_chat else {"prompt": self.prompt}
        return json.dumps(
            {
                "model": self.model,
                **prompt,
                "max_tokens": self.max_tokens,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()


class Answer(asyncio.Protocol):
    """What came of a request; httptools calls some of the `on_` methods by name."""

    def __init__(self, question: Question) -> None:
        """Nothing came yet."""
        self.question = question
        self.frontend = ""
        """To which it was sent."""
        self.status = 0
        self.error = ""
        """Why it failed, as the server or the connection says."""
        self.num_ends = 0
        """How often it ended: by its last event, by an error, or by the connection that broke."""
        self.asked_s = self.first_s = self.ended_s = 0.0
        self.has_left = False
        self._body = b""
        self._parser: Any = None
        self._transport: Any = None
        self._reader = AnswerReader(question.max_tokens, keeps_message=True)
        self._over = asyncio.Event()

    @property
    def text(self) -> str:
        """The text."""
        message = self._reader.message
        return str(message["content"] or "") if message is not None else ""

    @property
    def num_tokens(self) -> int:
        """The number of tokens that came."""
        return self._reader.num_tokens

    @property
    def usage(self) -> tuple[int | None, int | None] | None:
        """The numbers of tokens of the prompt and of the answer that the server states; None where it states none."""
        usage = self._reader.usage
        return None if usage is None else (usage.prompt_tokens, usage.completion_tokens)

    @property
    def is_right(self) -> bool:
        """Whether it came whole."""
        return self.status == 200 and not self.error and not self.has_left

    async def ask(self, frontend: str) -> None:
        """Send the request to a frontend, and return once it is over."""
        loop = asyncio.get_running_loop()
        self.frontend, self.asked_s = frontend, loop.time()
        body = self.question.body
        head = f"POST {self.question.path} HTTP/1.1\r\nhost: {frontend}\r\nx-request-id: {self.question.id}\r\n"
        try:
            await loop.create_connection(lambda: self, frontend, PORT)
        except OSError as error:
            self._end(f"cannot connect: {error}")
            return
        self._transport.write(
            f"{head}content-type: application/json\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await self._over.wait()

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        self._transport = transport
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self.has_left:
            return
        loop = asyncio.get_running_loop()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"not HTTP: {error}")
            return
        if not self.first_s:
            self.first_s = loop.time()
            if self.question.reads_slowly_s:
                self._transport.pause_reading()
                loop.call_later(self.question.reads_slowly_s, self._transport.resume_reading)
        leaves = self.question.leaves_after
        if leaves is not None and self._reader.num_tokens >= leaves and not self._over.is_set():
            self.has_left = True
            self._transport.close()
            self._end("")

    def on_body(self, data: bytes) -> None:
        """Read a part of the answer."""
        self._body += data
        if self.status != 200:
            return
        try:
            self._reader.take(data)
        except AnswerError as error:
            self._end(plain(str(error)))

    def on_headers_complete(self) -> None:
        """Note the status."""
        self.status = self._parser.get_status_code()

    def on_message_complete(self) -> None:
        """Check that the answer has an end, unless it ended with an error."""
        if self.error:
            return
        if self.status != 200:
            self._end(f"HTTP {self.status}: {plain(self._body.decode(errors='replace'))}")
            return
        try:
            self._reader.end()
        except AnswerError as error:
            self._end(str(error))
            return
        self._end("")
        self.num_ends = self._body.count(DONE)

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        if not self._over.is_set():
            self._end("the connection was lost")

    def _end(self, error: str) -> None:
        self.num_ends += 1
        self.error = self.error or error
        self.ended_s = asyncio.get_running_loop().time()
        self._over.set()


def plain(said: str) -> str:
    """Return what an error says without the JSON around its message, or all of it if there is none."""
    found = MESSAGE.search(said)
    return f"{said.partition('{')[0]}{ast.literal_eval(found[1])}" if found else said


async def ask_all(questions: Sequence[Question], frontends: Sequence[str], answers: list[Answer]) -> None:
    """Send each request at its time, to the frontends in turn, until all are over; `answers` has what came of them so far."""
    loop = asyncio.get_running_loop()
    start_s, asking = loop.time(), []
    for question in sorted(questions, key=lambda question: question.at_s):
        await asyncio.sleep(max(start_s + question.at_s - loop.time(), 0.0))
        answer = Answer(question)
        answers.append(answer)
        asking.append(asyncio.create_task(answer.ask(frontends[question.number % len(frontends)])))
    await asyncio.gather(*asking)
