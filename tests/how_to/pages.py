"""Pages that can be run: their files are written, their commands are run, and what they print is compared.

```python title="my_mode.py"     a file
```console                       `$ command`, and what it prints; `...` stands for anything, and a page may wrap lines where it likes

python -m tests.how_to.pages docs/how-to/*.md    puts what the commands print now into the pages
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support import warm
from tests.support.commands import ONE_AT_A_TIME, inherited

PATIENCE_S = 240.0
START_S = 60.0
WIDTH = 110
BLOCK = re.compile(r"^```(\w+)(?: title=\"([\w./-]+)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CHANGING = (
    (re.compile(r"\b\d{8}-\d{6}\b"), "20260101-120000"),
    (re.compile(r"\b(sweep|plan)-[0-9a-f]{16}\b"), r"\1-0123456789abcdef"),
    (re.compile(r"\b\d\d:\d\d:\d\d\.\d{3}\b"), "12:00:00.000"),
)
"""What differs from run to run: names of results folders, times in logs."""


class Run(NamedTuple):
    """A command of a page."""

    command: str
    shown: str
    """What it prints, as the page says."""
    printed: str
    """What it printed."""
    code: int


def files(page: str) -> dict[str, str]:
    """Return the files that a page shows, by name."""
    return {title: text for _, title, text in BLOCK.findall(page) if title}


def commands(page: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a page, and what it prints."""
    for kind, title, text in BLOCK.findall(page):
        if kind == "console" and not title:
            for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                lines = part.split("\n")
                count = next(place for place, line in enumerate(lines, 1) if not line.endswith("\\"))
                yield "\n".join(lines[:count]), "\n".join(lines[count:]).rstrip("\n")


def run(page: str, folder: Path) -> Iterator[Run]:
    """Do what a page says in a folder; what it starts in the background ends with it."""
    for name, text in files(page).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {
        **inherited(),
        **ONE_AT_A_TIME,
        "PATH": path,
        "TERM": "dumb",
        "DYN_DISCOVERY_DIR": str(folder / ".discovery"),
    }
    started: list[subprocess.Popen[str]] = []
    try:
        for command, shown in commands(page):
            if command.endswith(" &"):
                log = folder / f".log{len(started)}"
                with log.open("w") as file:
                    started.append(_start(command.removesuffix(" &"), folder, environment, file))
                yield _logged(command, shown, log)
                continue
            process = _start(command, folder, environment, subprocess.PIPE)
            try:
                printed, errors = process.communicate(timeout=PATIENCE_S)
            finally:
                _end(process)
            # Progress goes to stderr, every few seconds: how many lines of it there are depends on the machine.
            yield Run(command, shown, printed + errors * bool(process.returncode), process.returncode)
    finally:
        for process in started:
            _end(process)


def _logged(command, shown, log):
    """Wait until what runs in the background has printed what the page says."""
    end = time.monotonic() + START_S
    while not is_as_shown(done := Run(command, shown, log.read_text(), 0)) and time.monotonic() < end:
        time.sleep(0.05)
    return done


def _start(command, folder, environment, output):
    options = {
        "cwd": folder,
        "env": environment,
        "stdin": subprocess.DEVNULL,
        "stdout": output,
        "stderr": output if output is subprocess.PIPE else subprocess.STDOUT,
        "text": True,
        "start_new_session": True,
    }
    words = _words_of_one(command)
    if words[:1] == ["dynabench"]:
        return warm.start([warm.BIN / "dynabench", *words[1:]], **options)
    return subprocess.Popen(["bash", "-c", f"exec {command}" if output is not subprocess.PIPE else command], **options)


def _words_of_one(command: str) -> list[str]:
    """Return the words of a single command; none of a line of which a shell makes more than words."""
    if set(command) & set("$`*?[]{}~#!"):
        return []
    words = shlex.shlex(command.replace("\\\n", " "), posix=True, punctuation_chars=True)
    words.whitespace_split = True
    found = list(words)
    return [] if any(set(word) <= set("();<>|&") for word in found) else found


def _end(process):
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def is_as_shown(done: Run) -> bool:
    """Tell whether a command printed what its page says."""
    parts = re.split(r"^\.\.\.$", done.shown, flags=re.MULTILINE)
    return re.fullmatch(" ?.* ?".join(re.escape(_words(part)) for part in parts), _words(done.printed)) is not None


def _words(text: str) -> str:
    for pattern, instead in CHANGING:
        text = pattern.sub(instead, text)
    return " ".join(text.split())


def renewed(page: str, folder: Path) -> str:
    """Return a page with what its commands print now; what stands with `...` stays as it is."""
    for done in run(page, folder):
        if "..." not in done.shown.split("\n") and not done.command.endswith(" &"):
            printed = "\n".join(_wrapped(line) for line in done.printed.rstrip("\n").split("\n"))
            for pattern, instead in CHANGING:
                printed = pattern.sub(instead, printed)
            old = f"$ {done.command}\n{done.shown}\n" if done.shown else f"$ {done.command}\n"
            page = page.replace(old, f"$ {done.command}\n{printed}\n" if printed else f"$ {done.command}\n", 1)
        elif not is_as_shown(done):
            print(f"{done.command}\n  printed:\n{done.printed}")
    return page


def _wrapped(line: str) -> str:
    return line if len(line) <= WIDTH else "\n".join(textwrap.wrap(line, WIDTH, break_on_hyphens=False))


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        with tempfile.TemporaryDirectory() as made:
            path.write_text(renewed(path.read_text(), Path(made)))
