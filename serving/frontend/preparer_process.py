"""What a preparer runs: `python -m serving.frontend.preparer_process`, started by `Preparer`."""

import ctypes
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import msgspec

from serving.frontend import openai
from serving.frontend.openai import ApiError
from serving.frontend.preparer import (
    KINDS,
    LENGTH,
    NUM_JOBS,
    Answer,
    Elsewhere,
    Job,
    Model,
    Outcome,
    Ready,
    Refusal,
    framed,
)
from serving.frontend.preprocess import Prepared, TextModel, take
from serving.model.errors import ModelError
from serving.model.files import ModelFiles

log = logging.getLogger(__name__)

MEMORY_BYTES = 3 << 30
"""What the model and the jobs may take."""

FAILED = Refusal(500, "the frontend failed on this request; its log says why", None, None)
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Prepare what comes on standard input until it ends."""
    _end_with_parent()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print must not get between the answers
    messages = _messages(sys.stdin.buffer)
    lock = threading.Lock()

    def say(message: msgspec.Struct) -> None:
        data = framed(message)
        with lock:
            answers.write(data)
            answers.flush()

    first = msgspec.msgpack.decode(next(messages), type=Model)
    _limit_memory()
    try:
        model = TextModel(first.card, ModelFiles(first.files), is_preparer=True)
    except ModelError as error:
        say(Ready(str(error)))
        return
    except Exception as error:  # a template is compiled here, and may take all memory
        say(Ready(f"its tokenizer or chat template cannot be loaded: {type(error).__name__}"))
        return
    say(Ready())

    def work(job: Job, body: bytes) -> None:
        outcome = _outcome(job, body, model)
        try:
            say(Answer(job.id, outcome))
        except Exception:  # whatever cannot be sent: without an answer, its client would wait and others pay for it
            log.exception("what became of a request cannot be sent")
            say(Answer(job.id, FAILED))

    decode = msgspec.msgpack.Decoder(Job).decode
    with ThreadPoolExecutor(NUM_JOBS) as threads:
        for message in messages:
            job = decode(message)
            threads.submit(work, job, sys.stdin.buffer.read(job.num_bytes))
        os._exit(0)  # a job may never end


def _messages(source: IO[bytes]) -> Iterator[bytes]:
    while len(head := source.read(LENGTH.size)) == LENGTH.size:
        (length,) = LENGTH.unpack(head)
        yield source.read(length)


def _outcome(job: Job, body: bytes, model: TextModel) -> Outcome:
    try:
        asked = openai.parse(body, KINDS[job.kind])
        if asked.model != model.card.name and not (asked.model is None and job.is_only):
            return Elsewhere(asked.model)
        outcome = take(asked, body, model)
    except ApiError as error:
        return Refusal(error.status, error.message, error.code, error.param)
    except MemoryError:
        return Refusal(413, "the request is too large to be prepared", None, None)
    except BaseException:  # tokenizers panic with one that is no `Exception`
        log.exception("a request could not be prepared")
        return FAILED
    if isinstance(outcome, Prepared):  # without what has become tokens, or has no effect and may be large
        options = msgspec.convert(outcome.options, openai.Request, from_attributes=True)
        outcome.options = msgspec.structs.replace(options, metadata=None, prediction=None)
    return outcome


def _end_with_parent() -> None:
    """Have Linux end us with the frontend: a template that keeps the interpreter busy would not notice by itself."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _limit_memory() -> None:
    """Take no more than so much more address space than we have now."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        limit = used + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


if __name__ == "__main__":
    main()
