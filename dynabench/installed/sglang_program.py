"""A program that the Python of another environment runs: the schedulers of its SGLang, asked over two pipes.

    PYTHON sglang_program.py READ_FD WRITE_FD

Messages are those of `vllm_program.py`. A process can have one scheduler of SGLang's in its life, so each engine has a fork
of this one. That environment need not have this project: its files are appended to the path.

SGLang finds prefixes by their tokens. So tokens are made up as names of blocks are met for the first time: numbers that no
other block has, nor any answer.
"""

import multiprocessing
import os
import sys
import tempfile
import warnings
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[2]))

from dynabench.fidelity.sglang.real import EOS, RealScheduler, environment, prepare_to_fork, sglang
from dynabench.installed.vllm_program import serve

NUM_TOKENS = 1 << 31
"""SGLang hashes tokens as 32-bit numbers."""
DIGITS = 12
"""Of each request's name, so that none begins as another does, and ties that SGLang breaks by names are broken by numbers."""


class Tokens:
    """The tokens of named blocks, and of requests that share them with nobody: ranges of numbers."""

    def __init__(self) -> None:
        self._starts = [EOS + 1]  # the last one is that of the next range
        self._names: list[int | None] = []  # of each range
        self._ranges: dict[int, int] = {}

    def named(self, name: int, count: int) -> int:
        """Return the first token of a name, which stands for this many."""
        if name not in self._ranges:
            self._ranges[name] = self._new(name, count)
        return self._ranges[name]

    def own(self, count: int) -> int:
        """Return the first of this many tokens that no name stands for."""
        return self._new(None, count)

    def _new(self, name: int | None, count: int) -> int:
        start = self._starts[-1]
        if start + count > NUM_TOKENS:
            raise ValueError(
                f"the requests have more than {NUM_TOKENS:,} different tokens, which SGLang cannot tell apart"
            )
        self._starts.append(start + count)
        self._names.append(name)
        return start

    def place(self, token: int) -> tuple[int, int] | None:
        """Return the name that stands for a token, and its place among the tokens of that; None: no name does."""
        index = bisect_right(self._starts, token) - 1
        name = self._names[index]
        return None if name is None else (name, token - self._starts[index])


class Engine(RealScheduler):
    """One engine's scheduler."""

    def __init__(self, folder: Path, given: dict[str, Any]) -> None:
        """Make one within `environment`; see `mocker/installed/settings.py` for what is given."""
        settings = dict(given)
        self._has_events = settings.pop("kv_events")
        super().__init__(folder, settings)
        real = self.scheduler
        real.model_config.vocab_size = NUM_TOKENS
        held = {
            "page_size": real.page_size,
            "max_total_tokens": real.max_total_num_tokens,
            "chunked_prefill_size": real.chunked_prefill_size or -1,
            "max_running_requests": real.max_running_requests,
        }
        for name, value in held.items():
            if given[name] != value:
                raise ValueError(f"{name} is {given[name]}, of which SGLang makes {value}")
        self._tokens = Tokens()
        self._answers: dict[
            str, tuple[int, int | None]
        ] = {}  # by request: the first token, and where it ends by a stop
        self._flights: deque[bool] = deque()  # batches; False: nobody is in it, and somebody was preempted
        self._computing: set[str] = set()
        self._aborting: set[str] = set()
        self._blocks: dict[int, tuple[int, int] | None] = {}  # what a hash stands for

    # What is asked

    def ask_add(self, asked: list[Any]) -> int:
        """Queue a request."""
        number, num_prompt, max_tokens, stop_after, priority, _, _, names, num_named, per_name, ignores_eos = asked
        page = self.scheduler.page_size
        prompt: list[int] = []
        for place, name in enumerate(names):
            start = self._tokens.named(name, per_name * page)
            prompt += range(start, start + min(per_name, num_named - place * per_name) * page)
        own = self._tokens.own(num_prompt - len(prompt) + max_tokens + 1)
        num_own = num_prompt - len(prompt)
        prompt += range(own, own + num_own)
        id = f"{number:0{DIGITS}}"
        self._answers[id] = own + num_own, stop_after
        action = {"id": id, "prompt": prompt, "max_new_tokens": max_tokens, "ignore_eos": ignores_eos}
        if self.scheduler.enable_priority_scheduling:
            action["priority"] = priority
        return self.add(action)

    def ask_abort(self, number: int) -> int:
        """Abort a request: at once if it waits, else it ends when its next token is known."""
        id = f"{number:0{DIGITS}}"
        self.abort(id)
        if id in self.aborted:
            self.aborted.remove(id)
            self._forget(id)
        else:
            self._aborting.add(id)
        self._rest()
        return self._num_free()

    def ask_schedule(self, _: None) -> list[Any]:
        """Close a batch. A turn of its loop that only counts down to the next prompts is followed by another."""
        real = self.scheduler
        while True:
            was_deferring = real._prefill_decode_interval_remaining > 0  # noqa: SLF001 (it reports it nowhere)
            batch = self.schedule()
            if batch is not None or self._flights or self.requeued or not was_deferring:
                break
            real.on_idle()
        if batch is None:
            real.last_batch = None
            if not (self._flights or self.requeued):
                real.on_idle()
        ended = self._take_aborted()
        preempted = [int(request.rid) for request in self.requeued if not request.finished()]
        self._computing -= {request.rid for request in self.requeued}
        tokens, started = self._described(batch)
        if batch is not None:
            self._launch(batch)
        elif preempted:
            self._flights.append(False)
        return [tokens, started, preempted, [], self._num_free(), batch is not None or bool(preempted), ended]

    def ask_update(self, _: list[Any]) -> list[Any]:
        """End the oldest batch."""
        real = self.scheduler
        if not self._flights.popleft():  # nothing was computed
            return [[], [], [], self._num_free()]
        batch, result = real.result_queue.popleft()
        known = [(request, len(request.output_ids)) for request in batch.reqs]
        real.kv_events_publisher.was_asked = False
        real.process_batch_result(batch, result)
        spoken = [request for request, count in known if len(request.output_ids) > count]
        finished = [request.rid for request in spoken if request.finished()]
        for id in finished:
            self._forget(id)
        sends = real.kv_events_publisher.was_asked
        self._rest()
        events = self._events() if sends or not self._answers else []
        tokens = [(int(request.rid), 1) for request in spoken]
        return [tokens, [int(id) for id in finished], events, self._num_free()]

    def ask_reset(self, _: None) -> bool:
        """Forget all cached blocks, unless any is in use."""
        return self.flush()

    # Its loop

    def token(self, id: str, place: int) -> int:
        """Return the token that the model makes at a place of a request's output."""
        if id not in self._answers:  # it has ended, and a batch was closed ahead
            return EOS + 1
        first, stop = self._answers[id]
        return EOS if stop == place + 1 else first + place

    def _launch(self, batch: Any) -> None:
        real = self.scheduler
        result = real.run_batch(batch)
        real.result_queue.append((batch.copy() if real.enable_overlap else batch, result))
        real.last_batch = batch
        self._flights.append(True)

    def _rest(self) -> None:
        """Let its loop turn while there is nothing to do; the first turn ends the last batch."""
        if self._answers or self._flights:
            return
        for _ in range(2):
            assert self.schedule() is None, "nothing is left"
            self.scheduler.last_batch = None
            self.scheduler.on_idle()

    def _described(self, batch: Any) -> tuple[list[Any], list[Any]]:
        """Return the tokens of each request in a batch, and the requests that begin in it."""
        if batch is None:
            return [], []
        if not batch.forward_mode.is_extend():
            return [(int(request.rid), 1, False) for request in batch.reqs], []
        tokens, started, chunked = [], [], self.scheduler.chunked_req
        for request, before, count in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            number = int(request.rid)
            tokens.append((number, int(count), request is chunked))
            if request.rid not in self._computing:
                self._computing.add(request.rid)
                started.append((number, int(before)))
        return tokens, started

    def _take_aborted(self) -> list[int]:
        """Return the requests that have ended without another token, as was asked."""
        aborted, self.aborted[:] = list(self.aborted), []
        for id in aborted:
            if id not in self._aborting:
                raise ValueError(f"SGLang gives up request {int(id)}: it refused it, or has no room for its next token")
            self._forget(id)
        return [int(id) for id in aborted]

    def _forget(self, id: str) -> None:
        del self._answers[id]
        self._computing.discard(id)
        self._aborting.discard(id)

    def _num_free(self) -> int:
        real = self.scheduler
        tokens = real.token_to_kv_pool_allocator.available_size() + real.tree_cache.evictable_size()
        return int(tokens) // int(real.page_size)

    def _events(self) -> list[tuple[str, list[tuple[int, int]]]]:
        """Return what happened to blocks, without those that only one request has."""
        happened = self.scheduler.tree_cache.take_events()
        if not self._has_events:
            return []
        found = []
        for event in happened:
            kind = {"BlockStored": "stored", "BlockRemoved": "removed", "AllBlocksCleared": "cleared"}[
                type(event).__name__
            ]
            if kind == "stored":
                self._note(event)
            blocks = [block for each in getattr(event, "block_hashes", ()) if (block := self._blocks[each]) is not None]
            if blocks or kind == "cleared":
                found.append((kind, blocks))
        return found

    def _note(self, event: Any) -> None:
        """Note what the hashes of an event stand for."""
        page = self.scheduler.page_size
        for index, each in enumerate(event.block_hashes):
            place = self._tokens.place(event.token_ids[index * page])
            self._blocks[each] = None if place is None else (place[0], place[1] // page)


class Fork(NamedTuple):
    """The process of one engine."""

    process: Any
    connection: Connection
    folder: tempfile.TemporaryDirectory[str]
    """It is ours, because a process that is terminated leaves its own behind."""

    def end(self) -> None:
        """End it, and remove its folder."""
        self.connection.close()
        self.process.terminate()
        self.process.join()
        self.folder.cleanup()


class Schedulers:
    """The processes of all engines."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("fork")
        self._is_prepared = False
        self._engines: list[Fork] = []

    def __call__(self, name: str, engine: int, argument: Any) -> Any:
        """Answer a message."""
        if name == "version":
            return version()
        if name == "forget":
            return self.forget()
        if name == "new":
            return self._new(argument)
        return self._asked(self._engines[engine].connection, (name, argument))

    def _new(self, given: dict[str, Any]) -> int:
        if not self._is_prepared:
            prepare_to_fork()
            self._is_prepared = True
        folder = tempfile.TemporaryDirectory()
        ours, theirs = self._context.Pipe()
        arguments = (given, Path(folder.name), theirs, ours.close)
        fork = Fork(self._context.Process(target=run_engine, args=arguments, daemon=True), ours, folder)
        fork.process.start()
        theirs.close()
        try:
            self._asked(ours, None)
        except BaseException:
            fork.end()
            raise
        self._engines.append(fork)
        return len(self._engines) - 1

    @staticmethod
    def _asked(connection: Connection, message: Any) -> Any:
        if message is not None:
            connection.send(message)
        try:
            is_good, answer = connection.recv()
        except EOFError as error:
            raise RuntimeError("the process of a scheduler ended") from error
        if not is_good:
            raise RuntimeError(answer)
        return answer

    def forget(self) -> bool:
        """End all engines."""
        for fork in self._engines:
            fork.end()
        self._engines.clear()
        return True


def run_engine(given: dict[str, Any], folder: Path, asked: Connection, close_other: Callable[[], None]) -> None:
    """Be one engine until the pipe is closed: first report whether it could be made, then answer."""
    close_other()
    tempfile.tempdir = str(folder)  # SGLang leaves files there
    engine: Engine | None = None
    with environment(given):
        while True:
            try:
                if engine is None:
                    engine, answer = Engine(folder, given), None
                else:
                    name, argument = asked.recv()
                    answer = getattr(engine, f"ask_{name}")(argument)
            except EOFError:
                return
            except Exception as error:  # reported to who asked
                import traceback

                traceback.print_exc()
                asked.send((False, f"{type(error).__name__}: {error}"))
                if engine is None:
                    return
            else:
                asked.send((True, answer))


def version() -> list[str]:
    """Return the release of SGLang, and a digest of the files that schedule.

    Raises:
        RecordingError: it is another one than that whose loop is repeated here.
    """
    from hashlib import sha256

    package = sglang()
    srt = Path(package.__file__).parent / "srt"
    digest = sha256()
    for file in sorted([*srt.glob("managers/**/*.py"), *srt.glob("mem_cache/**/*.py")]):
        digest.update(file.read_bytes())
    return [package.__version__, digest.hexdigest()[:16]]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # it computes next to nothing, and forks
    warnings.filterwarnings("ignore")
    schedulers = Schedulers()
    try:
        serve(int(sys.argv[1]), int(sys.argv[2]), schedulers)
    finally:
        schedulers.forget()
