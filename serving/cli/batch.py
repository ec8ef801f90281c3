"""`in=batch:FILE`: ask every prompt of a jsonl file, many at a time, and write the answers to output.jsonl next to it.

An interrupted run continues where it stopped: prompts that output.jsonl already answers are not asked again. Beside it,
output.settings.json says which engine, model and settings the answers are from.
"""

import asyncio
import contextlib
import fcntl
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from foundation.exit_codes import INTERRUPTED
from foundation.files import secure
from foundation.identity import Identity
from serving.cli.chat_client import AskError, ChatAnswer, ChatClient
from serving.runtime.stopping import until_stopped
from serving.runtime.world import world

OUTPUT = "output.jsonl"
SETTINGS = "output.settings.json"


class BatchError(ValueError):
    """The input or the output cannot be used."""


@dataclass
class BatchPrompts:
    """The prompts of a file."""

    texts: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Why a line holds no prompt, for each line that does not."""


@dataclass
class BatchTotals:
    """What a run has done."""

    num_answered: int = 0
    num_failed: int = 0
    tokens_in: int = 0
    tokens_out: int = 0


def read_prompts(path: Path) -> BatchPrompts:
    """Read a file of `{"text": ...}` lines.

    Raises:
        BatchError: it cannot be read.
    """
    if not path.is_file():
        raise BatchError(f"in=batch:{path}: no such file; expected a JSON Lines file")
    prompts = BatchPrompts()
    try:
        lines = path.read_text().split("\n")  # JSON may hold the other ends of lines
    except (OSError, UnicodeDecodeError) as error:
        raise BatchError(f"in=batch:{path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            text = entry["text"] if isinstance(entry, dict) else None
        except (ValueError, KeyError):
            text = None
        if isinstance(text, str) and text:
            prompts.texts.append(text)
        else:
            prompts.problems.append(f'{path}:{number}: expected {{"text": "..."}}, not {line.strip()[:80]!r}')
    return prompts


def is_answered(path: Path, identity: Identity) -> bool:
    """Return whether an earlier run has answered everything, so that no engine is needed.

    Raises:
        BatchError: the input cannot be read, or the output cannot be written, is of other prompts, or was made otherwise.
    """
    prompts = read_prompts(path)
    with _output(path.with_name(OUTPUT)) as file:
        if _missing(prompts.texts, _answered(file, prompts.texts, identity)):
            return False
    print(f"{path.with_name(OUTPUT)} already has every answer", file=sys.stderr)
    return True


async def run_batch(
    client: ChatClient,
    path: Path,
    identity: Identity,
    stopping: asyncio.Event,
    *,
    model: str = "",
    options: dict[str, Any],
    concurrency: int,
    count: Callable[[str, str], int],
) -> int:
    """Ask every prompt that has no answer yet; return the process's exit code.

    Args:
        client: Asks the frontend.
        path: The prompts.
        identity: What the answers depend on.
        stopping: Is set when the process is to end.
        model: The model to ask (default: the first one that is served).
        options: The options of each request.
        concurrency: The number of requests in progress at a time.
        count: Returns the number of tokens of a text for a model, without a template.

    Raises:
        BatchError: the input cannot be read, or the output cannot be written, is of other prompts, or was made otherwise.
    """
    prompts = read_prompts(path)
    for problem in prompts.problems:
        print(problem, file=sys.stderr)
    with _output(path.with_name(OUTPUT)) as file:
        answered = _answered(file, prompts.texts, identity)
        if not answered:
            _note(path.with_name(SETTINGS), identity)
        _cut_half_a_line(file)
        missing = _missing(prompts.texts, answered)
        if done := len(prompts.texts) - len(missing):
            print(f"{file.name} already has {done} of {len(prompts.texts)} answers", file=sys.stderr)
        started = world().now()
        run = _Run(client, file, options, asyncio.Semaphore(concurrency), count)
        is_done = await until_stopped(stopping, run.ask_all(missing, model))
    if not is_done:
        print(
            f"interrupted after {run.totals.num_answered} more answers; run the same command to continue",
            file=sys.stderr,
        )
        return INTERRUPTED
    print(_summary(run.totals, world().now() - started))
    failed = run.totals.num_failed + len(prompts.problems)
    if failed:
        print(f"{failed} of {len(prompts.texts) + len(prompts.problems)} lines have no answer", file=sys.stderr)
    return 1 if failed else 0


@dataclass
class _Run:
    """The requests in progress, and the file for their answers."""

    client: ChatClient
    file: IO[str]
    options: dict[str, Any]
    places: asyncio.Semaphore
    count: Callable[[str, str], int]
    totals: BatchTotals = field(default_factory=BatchTotals)

    async def ask_all(self, texts: list[str], wanted: str) -> None:
        model = await self.client.model(wanted)
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            bar = progress.add_task(model, total=len(texts))

            def done(task: asyncio.Task[None]) -> None:
                self.places.release()
                progress.advance(bar)

            async with asyncio.TaskGroup() as group:
                for text in texts:
                    await self.places.acquire()
                    task = group.create_task(self._ask(text, model, console))
                    task.add_done_callback(done)

    async def _ask(self, text: str, model: str, console: Console) -> None:
        answer = ChatAnswer()
        try:
            async for _ in self.client.ask(answer, [{"role": "user", "content": text}], model=model, **self.options):
                pass
        except AskError as error:
            self.totals.num_failed += 1
            console.print(f"no answer to {text[:60]!r}: {error}", highlight=False, soft_wrap=True)
            return
        self._keep(text, model, answer)

    def _keep(self, text: str, model: str, answer: ChatAnswer) -> None:
        """Write an answer to the file, and count it."""
        tokens_in = self.count(model, text)
        tokens_out = answer.num_tokens if answer.num_tokens is not None else self.count(model, answer.text)
        record = {
            "text": text,
            "response": answer.text,
            "tokens_in": tokens_in,
            "tokens_out": tokens_out,
            "elapsed_ms": round((world().now() - answer.started) * 1000),
            "finish_reason": answer.finish_reason,
        }
        self.file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self.file.flush()
        self.totals.num_answered += 1
        self.totals.tokens_in += tokens_in
        self.totals.tokens_out += tokens_out


@contextlib.contextmanager
def _output(path: Path) -> Iterator[IO[str]]:
    """Open the output, for this run only; at the end, its answers are on the disk.

    A sync of each answer would cost more than to ask again for those of the last seconds before a power cut.
    """
    try:
        file = path.open("a+")
    except OSError as error:
        raise BatchError(f"{path} cannot be written: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BatchError(f"{path} is being written by another run") from error
        try:
            yield file
        finally:
            _secure(file, path)


def _secure(file: IO[str], path: Path) -> None:
    try:
        file.flush()
        secure(path)
    except OSError as error:
        raise BatchError(f"{path} cannot be written: {error.strerror}") from error


def _answered(file: IO[str], texts: list[str], identity: Identity) -> Counter[str]:
    """Return how often an earlier run answered each prompt.

    Raises:
        BatchError: the output is of something else or of other prompts, or it was made otherwise.
    """
    answered = Counter[str]()
    for number, line in enumerate(_whole_lines(file).split("\n")[:-1], 1):
        try:
            answered[json.loads(line)["text"]] += 1
        except (ValueError, KeyError, TypeError) as error:
            raise BatchError(
                f"{file.name}:{number} is not an answer from an earlier run; move the file away"
            ) from error
    if answered - Counter(texts):
        raise BatchError(f"{file.name} has answers to prompts that are not in the input; move the file away")
    if answered:
        _check_same(Path(file.name), identity)
    return answered


def _whole_lines(file: IO[str]) -> str:
    """Return the content of a file without a line that a killed run left half-written."""
    file.seek(0)
    content = file.read()
    return content[: content.rfind("\n") + 1]


def _cut_half_a_line(file: IO[str]) -> None:
    file.truncate(len(_whole_lines(file).encode()))


def _check_same(path: Path, identity: Identity) -> None:
    """Refuse answers that another engine, another model or other settings gave.

    Raises:
        BatchError: they did, or nothing says what did.
    """
    noted = path.with_name(SETTINGS)
    if not noted.exists():
        raise BatchError(f"{path} has answers, but no {SETTINGS} says what they are from; move the file away")
    try:
        earlier = Identity.read(noted)
    except OSError as error:
        raise BatchError(f"{noted}: {error.strerror}") from error
    if earlier != identity:
        difference = identity.difference(earlier)
        raise BatchError(f"{path} has answers that were made otherwise: {difference}; move the file away")


def _note(path: Path, identity: Identity) -> None:
    """Write what the answers will depend on.

    Raises:
        BatchError: it cannot be written.
    """
    try:
        identity.write(path)
    except OSError as error:
        raise BatchError(f"{path}: {error.strerror}") from error


def _missing(texts: list[str], answered: Counter[str]) -> list[str]:
    """Return the prompts that have no answer yet."""
    left = answered.copy()
    missing = []
    for text in texts:
        if left[text]:
            left[text] -= 1
        else:
            missing.append(text)
    return missing


def _summary(totals: BatchTotals, seconds: float) -> str:
    def rate(tokens: int) -> str:
        return f"{tokens} ({tokens / max(seconds, 1e-9):.0f}/s)"

    return (
        f"Ran {totals.num_answered} prompts in {seconds:.2f} s. "
        f"Tokens in: {rate(totals.tokens_in)}. Tokens out: {rate(totals.tokens_out)}"
    )
