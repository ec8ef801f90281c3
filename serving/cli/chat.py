"""`in=text`: a conversation in the terminal."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from foundation.text import printable
from serving.cli.chat_client import AskError, ChatAnswer, ChatClient
from serving.runtime.stopping import until_stopped
from serving.runtime.threads import in_thread

HELP = """\
/help            show this list
/system TEXT     start over, with a system message
/clear           start over
/retry           ask the last question again
/quit            leave (also Ctrl-D, or Ctrl-C twice)
Enter sends, Alt-Enter starts a new line, the arrow keys recall earlier questions. Ctrl-C stops an answer.\
"""


class TerminalConversation:
    """The messages so far."""

    def __init__(self) -> None:
        self.messages: list[dict[str, str]] = []

    def clear(self, system: str = "") -> None:
        """Start over."""
        self.messages = [{"role": "system", "content": system}] if system else []

    def ask(self, text: str) -> None:
        """Add a question."""
        self.messages.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """Add an answer; if it has no text, remove its question."""
        if text:
            self.messages.append({"role": "assistant", "content": text})
        else:
            self.messages.pop()

    def take_back(self) -> str:
        """Remove the last question and everything after it; return the question."""
        while self.messages:
            last = self.messages.pop()
            if last["role"] == "user":
                return last["content"]
        return ""


async def chat(client: ChatClient, stopping: asyncio.Event, *, model: str = "", options: dict[str, Any]) -> None:
    """Talk until the user leaves or the process is asked to end.

    Args:
        client: Asks the frontend.
        stopping: Is set when the process is to end.
        model: The model to talk to (default: the first one that is served).
        options: The options of each request: temperature, max_tokens, ...
    """
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    await until_stopped(stopping, _find_and_talk(client, model, options, is_terminal))


async def ask_once(client: ChatClient, text: str, *, model: str = "", options: dict[str, Any]) -> None:
    """Print the answer to one question (`in=stdin`).

    Raises:
        AskError: there is none.
    """
    answer = ChatAnswer()
    name = await client.model(model)
    async for piece in client.ask(answer, [{"role": "user", "content": text}], model=name, **options):
        print(printable(piece), end="", flush=True)
    print()


async def _find_and_talk(client: ChatClient, model: str, options: dict[str, Any], is_terminal: bool) -> None:
    name = await client.model(model)
    if is_terminal:
        print(f"{name}: type /help for commands.")
    await _talk(client, name, options, is_terminal)


async def _talk(client: ChatClient, model: str, options: dict[str, Any], is_terminal: bool) -> None:
    conversation = TerminalConversation()
    async for line in _terminal_lines() if is_terminal else _piped_lines():
        text = line.strip()
        if text.startswith("/"):
            text = _obey(text, conversation)
            if text == "/quit":
                return
        if text:
            conversation.ask(text)
            answered = await _answer(client, model, conversation, options, is_terminal)
            conversation.answer(answered)


def _obey(text: str, conversation: TerminalConversation) -> str:
    """Carry out a command; return a question to ask, /quit to leave, or nothing."""
    command, _, rest = text.partition(" ")
    match command:
        case "/quit" | "/exit":
            return "/quit"
        case "/clear":
            conversation.clear()
        case "/system":
            conversation.clear(rest.strip())
        case "/retry":
            if question := conversation.take_back():
                return question
            print("There is no question to ask again.")
        case "/help":
            print(HELP)
        case _:
            print(f"unknown command {command}; type /help for the list, or put a space before it to send it.")
    return ""


async def _answer(
    client: ChatClient, model: str, conversation: TerminalConversation, options: dict[str, Any], is_terminal: bool
) -> str:
    """Print an answer as it arrives, until it ends or Ctrl-C stops it; return its text."""
    answer = ChatAnswer()
    task = asyncio.create_task(_print(client, answer, conversation.messages, model, options))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    note = ""
    try:
        await task
    except asyncio.CancelledError:
        if not task.cancelled():
            raise
        note = "stopped"
    except AskError as error:
        print(f"\n{error}", file=sys.stderr)
        return answer.text
    finally:
        loop.add_signal_handler(signal.SIGINT, lambda: None)
    print()
    if is_terminal:
        print(f"\x1b[2m{_figures(answer, note)}\x1b[0m")
    return answer.text


async def _print(
    client: ChatClient, answer: ChatAnswer, messages: list[dict[str, str]], model: str, options: dict[str, Any]
) -> None:
    async for piece in client.ask(answer, messages, model=model, **options):
        print(printable(piece), end="", flush=True)


def _figures(answer: ChatAnswer, note: str) -> str:
    parts = [note] if note else []
    if answer.first is not None and answer.last is not None:
        if answer.num_tokens is not None:
            parts.append(f"{answer.num_tokens} tokens")
        parts.append(f"TTFT {(answer.first - answer.started) * 1000:.0f} ms")
        if answer.num_tokens and answer.num_tokens > 1 and answer.last > answer.first:
            parts.append(f"{(answer.num_tokens - 1) / (answer.last - answer.first):.0f} tokens/s")
    if answer.finish_reason == "length":
        parts.append("stopped at the length limit")
    return ", ".join(parts)


async def _piped_lines() -> AsyncIterator[str]:
    while line := await in_thread(sys.stdin.readline):
        yield line


async def _terminal_lines() -> AsyncIterator[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.formatted_text import HTML
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        HTML("<b>User</b> › "), history=FileHistory(_history_path()), key_bindings=keys, multiline=True
    )
    is_leaving = False
    while True:
        try:
            # We handle SIGINT only while an answer is printed; at the prompt, Ctrl-C is a key.
            line = await session.prompt_async(handle_sigint=False)
        except EOFError:
            return
        except KeyboardInterrupt:
            # The first may be meant for the answer that has just ended.
            if is_leaving and not session.default_buffer.text:
                return
            is_leaving = not session.default_buffer.text
            if is_leaving:
                print("Press Ctrl-C again or Ctrl-D to leave.")
        else:
            is_leaving = False
            yield line


def _history_path() -> Path:
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    folder = state / "dynabench"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "history"
    path.touch(mode=0o600)
    return path
