"""The program of a preparer: `python -m serving.frontend.preparing.process`, started by `Preparer`."""

import logging
import os
import resource
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import msgspec

from foundation.processes import end_with_parent
from serving.frontend.preparing.messages import (
    LENGTH,
    NUM_JOBS,
    JobResult,
    PreparerModel,
    PreparerReady,
    PreparingJob,
    framed,
)
from serving.frontend.preparing.work import FAILED, load, outcome_of
from serving.frontend.text_model import TextModel
from serving.model.errors import ModelError

log = logging.getLogger(__name__)

MEMORY_BYTES = 3 << 30
"""Memory for the model and the jobs."""


def main() -> None:
    """Prepare the requests on standard input until it ends."""
    end_with_parent(os.getppid())  # a template that keeps the interpreter busy would not notice that input has ended
    answers = _Answers()
    messages = _messages(sys.stdin.buffer)
    model = _load(msgspec.msgpack.decode(next(messages), type=PreparerModel), answers)
    if model is None:
        return
    decode = msgspec.msgpack.Decoder(PreparingJob).decode
    with ThreadPoolExecutor(NUM_JOBS) as threads:
        for message in messages:
            job = decode(message)
            threads.submit(_work, job, sys.stdin.buffer.read(job.num_bytes), model, answers)
        os._exit(0)  # a job may never end


class _Answers:
    """Standard output, only for answers: what libraries print must not mix with them."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self._lock = threading.Lock()

    def send(self, message: msgspec.Struct) -> None:
        data = framed(message)
        with self._lock:
            self._file.write(data)
            self._file.flush()


def _load(message: PreparerModel, answers: _Answers) -> TextModel | None:
    """Load the model within a memory limit, and report whether that worked."""
    _limit_memory()
    try:
        model = load(message)
    except ModelError as error:
        answers.send(PreparerReady(str(error)))
        return None
    answers.send(PreparerReady())
    return model


def _work(job: PreparingJob, body: bytes, model: TextModel, answers: _Answers) -> None:
    outcome = outcome_of(job, body, model)
    try:
        answers.send(JobResult(job.id, outcome))
    except Exception:  # without any answer, its client would wait and others would pay for it
        log.exception("the result of a request could not be sent")
        answers.send(JobResult(job.id, FAILED))


def _messages(source: IO[bytes]) -> Iterator[bytes]:
    while len(head := source.read(LENGTH.size)) == LENGTH.size:
        (length,) = LENGTH.unpack(head)
        yield source.read(length)


def _limit_memory() -> None:
    """Limit the address space to `MEMORY_BYTES` more than we use now."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        limit = used + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


if __name__ == "__main__":
    main()
