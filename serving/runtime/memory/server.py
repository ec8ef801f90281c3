"""A server on a memory network, and a node's line to it."""

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, TypeVar

from serving.runtime.memory.node import Link, Node

ANSWER_S = 5.0
"""How long a question may take."""

Answer = TypeVar("Answer")


class RefusedError(Exception):
    """A server does not do what it was asked."""


UNREACHABLE = (OSError, RefusedError)
"""Errors of a question that a server refused or did not answer in time (`TimeoutError` is an `OSError`)."""


def reason(error: Exception) -> str:
    """Describe an error of a question."""
    return str(error) or "it is silent"


class Server:
    """While it is away, its machine refuses; while its node is paused or cut off, it is silent."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.is_away = False

    def go_away(self) -> None:
        """Stop serving."""
        self.is_away = True

    def come_back(self) -> None:
        """Serve again."""
        self.is_away = False
        self.node.network.wake()


class Line:
    """A node's connection to a server; it keeps questions in order, and answers."""

    def __init__(self, node: Node, server: Server) -> None:
        """Connect; what the server sends is received in the current context."""
        self.back = Link(server.node, node, copy_context())
        self._there = Link(node, server.node)
        self._server = server

    async def ask(self, question: Callable[..., Answer], *arguments: Any) -> Answer:
        """Return what a method of the server returns.

        Raises:
            OSError: the server is away, or silent for `ANSWER_S`.
            RefusedError: it does not do that.
        """
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def settle(result: Answer) -> None:
            if not answer.done():
                answer.set_result(result)

        def fail(error: Exception) -> None:
            if not answer.done():
                answer.set_exception(error)

        def serve() -> None:
            if self._server.is_away:
                self.back.send(fail, ConnectionRefusedError(f"no server answers on {self._server.node.name}"))
                return
            try:
                result = question(*arguments)
            except RefusedError as error:
                self.back.send(fail, error)
            else:
                self.back.send(settle, result)

        self._there.send(serve)
        async with asyncio.timeout(ANSWER_S):
            return await answer

    def report(self, notice: Callable[..., object], *arguments: Any) -> None:
        """Make a call at the server, if it is there, without an answer."""
        self._there.send(lambda: None if self._server.is_away else notice(*arguments))
