"""What an engine's processes print while it starts: passed on at once, and searched for the cause if it fails.

Engines start their own processes. Why one of those failed is only in the log, in the first of many tracebacks: the engine
itself only raises that something below it has failed.
"""

import contextlib
import os
import re
import select
import threading
from collections.abc import Iterator

from foundation.text import one_line
from serving.engines.package import ADVICE

TAIL_BYTES = 256 * 1024
CHUNK_BYTES = 64 * 1024
MAX_LINES = 4
MAX_CHARACTERS = 600
STANDARD_ERROR = 2

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
PREFIX = re.compile(
    r"^(?P<process>\([^()]* pid=\d+\) )?(?:(?:ERROR|CRITICAL|WARNING) \d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \[[^\]]*\] ?)?"
)
EXCEPTION = re.compile(r"^(?P<type>(?:\w+\.)*(?:[A-Z]\w*)?(?:Error|Exception))(?:: (?P<message>.*))?$")
CONSEQUENCE = re.compile(
    r"root cause|initialization failed|failed to start|background process|is dead|died during|worker returned error",
    re.IGNORECASE,
)
"""In errors that are raised because something else failed."""

SPEAKING = ("ValueError", "RuntimeError", "Exception")
"""Types that add nothing to their messages."""

BROKEN = re.compile(r"ImportError|ModuleNotFoundError|cannot open shared object file")
TOO_LITTLE = re.compile(r"less than desired|less than requested|out of ?memory|not enough memory", re.IGNORECASE)
TOO_SMALL = re.compile(r"no available memory for the cache|max seq len", re.IGNORECASE)


class EngineLog:
    """Standard error, once caught: a thread passes it on and keeps the last of it."""

    def __init__(self) -> None:
        self._tail = b""
        self._is_kept = True
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Catch what this process prints, and also, even afterwards, what the processes that it starts meanwhile print."""
        reading, writing = os.pipe()
        terminal = os.dup(STANDARD_ERROR)
        os.dup2(writing, STANDARD_ERROR)
        os.close(writing)
        self._thread = threading.Thread(target=self._pass_on, args=(reading, terminal), name="messages", daemon=True)
        self._thread.start()
        try:
            yield
            self._is_kept, self._tail = False, b""  # the engine runs: nobody will ask for its cause
        finally:
            os.dup2(terminal, STANDARD_ERROR)

    def last(self, timeout_s: float = 1.0) -> str:
        """Return the last messages, once all processes have closed their standard error or the timeout has passed."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._tail.decode(errors="replace")

    def _pass_on(self, reading: int, terminal: int) -> None:
        while data := os.read(reading, CHUNK_BYTES):
            if self._is_kept:
                self._tail = (self._tail + data)[-TAIL_BYTES:]
            with contextlib.suppress(OSError):  # nobody reads this any more; the engine must not notice
                while data:
                    try:
                        data = data[os.write(terminal, data) :]
                    except BlockingIOError:
                        select.select([], [terminal], [])
        os.close(reading)
        os.close(terminal)


def cause_of(error: BaseException, messages: str) -> str:
    """Return in one line why an engine failed: what it raised, or what its processes printed if that was the cause."""
    own = _named(type(error).__name__, str(error))
    if not str(error) or CONSEQUENCE.search(str(error)):
        return root_cause(messages) or own
    return own


def root_cause(messages: str) -> str | None:
    """Return the last exception in a log that is not a consequence of another."""
    lines = [_without_prefix(line) for line in COLOUR.sub("", messages).splitlines()]
    for place in reversed(range(len(lines))):
        process, line = lines[place]
        found = EXCEPTION.match(line)
        if found is None:
            continue
        message = [found["message"] or ""]
        for other, more in lines[place + 1 : place + MAX_LINES]:
            if other != process or not more.strip() or more.startswith(("Traceback", "The above", "During handling")):
                break
            message.append(more)
        text = " ".join(message)
        if not CONSEQUENCE.search(text):
            return _named(found["type"].rpartition(".")[2], text)
    return None


def remedy(cause: str, memory_argument: str) -> str:
    """Return advice to append to the cause if a package is broken or memory is short, else an empty string."""
    if BROKEN.search(cause):
        return f"; {ADVICE}"
    if not memory_argument:
        return ""
    where = f"{memory_argument} (after --, or in --extra-engine-args)"
    if TOO_SMALL.search(cause):
        return f"; set {where} higher or --context-length lower"
    if TOO_LITTLE.search(cause):
        return f"; set {where} lower or start fewer workers"
    return ""


def _without_prefix(line: str) -> tuple[str | None, str]:
    """Return the process named at the start of a line, and the rest of the line."""
    match = PREFIX.match(line)
    assert match is not None  # it also matches an empty string
    return match["process"], line[match.end() :]


def _named(kind: str, message: str) -> str:
    """Return a message in one line, preceded by its type if that adds something."""
    text = one_line(message, MAX_CHARACTERS)
    return text if text and kind in SPEAKING else f"{kind}: {text}" if text else kind
