"""Calls that are carried out in other processes: in forks of this one, or on a Ray or Dask cluster."""

import gc
import itertools
import os
import pickle
import platform
import signal
import sys
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from dynabench.experiment.clusters import Kind, cluster_of, host_named
from dynabench.interrupt import ASKING, Call, Flag, Interrupt, InterruptError, held_back
from foundation.errors import UserError
from foundation.processes import end_with_parent


class KilledError(UserError):
    """A process that carried out a call ended."""


class Ended(NamedTuple):
    """What became of a call."""

    place: int
    result: Any = None
    is_done: bool = True
    """Whether it ended by itself; an interrupted one did not."""


class Failure(NamedTuple):
    """The exception that a call raised."""

    error: Exception


def succeeded(results: Generator[Ended, None, None], interrupt: Interrupt) -> Iterator[tuple[int, Any]]:
    """Yield the results of calls; after a failed one, wait for those under way and raise its exception."""
    failure: Exception | None = None
    with closing(results):
        for place, result, is_done in results:
            if is_done:
                interrupt.flag._replace(place=place).progress.note(1.0)
            if isinstance(result, Failure):
                failure = failure or result.error
                interrupt.flag.raise_()  # the call may have failed on another host
            elif is_done and failure is None:
                yield place, result
    if failure is not None:
        raise failure


def in_forks(calls: Sequence[Call], num_processes: int, interrupt: Interrupt) -> Generator[Ended, None, None]:
    """Carry out calls in forks of this process, which have its modules and workloads from the start."""
    pool = ProcessPoolExecutor(num_processes, get_context("fork"), _begin, (os.getpid(),))
    waiting = iter(enumerate(calls))

    def begin(count: int) -> set[Future[Ended]]:
        return {
            pool.submit(_carry_out, call, args, interrupt.flag._replace(place=place))
            for place, (call, args) in itertools.islice(waiting, count)
        }

    running: set[Future[Ended]] = set()
    gc.freeze()  # so that forks need not copy what they never change
    try:
        with held_back():  # all processes start with the first call
            running = begin(num_processes)
        while running:
            with _killed_if_interrupted(pool):
                ended, running = wait(running, return_when=FIRST_COMPLETED)
            running |= begin(len(ended))
            yield from (future.result() for future in ended)
    except OSError as error:
        raise UserError(f"no process can be started for simulations ({error}); use fewer --jobs") from error
    except BrokenProcessPool as error:  # its message does not say what would help
        raise KilledError("a simulation process was killed; if memory ran out, use fewer --jobs") from error
    finally:
        if running:  # who wanted the results has failed
            interrupt.flag.raise_()
        with _killed_if_interrupted(pool):
            pool.shutdown()
        gc.unfreeze()


@contextmanager
def _killed_if_interrupted(pool: ProcessPoolExecutor) -> Iterator[None]:
    """Kill a pool's processes if a second signal ends this block: they may never end."""
    processes = list((pool._processes or {}).values())  # noqa: SLF001 (`shutdown` forgets them)
    try:
        yield
    except KeyboardInterrupt:
        for process in processes:
            process.kill()
        raise


def on_cluster(
    calls: Sequence[Call], jobs: int, interrupt: Interrupt, kind: Kind, address: str | None
) -> Generator[Ended, None, None]:
    """Carry out calls on a Ray or Dask cluster."""
    cluster = cluster_of(kind, address, jobs)
    flagged = [
        (_carry_out_there, (interrupt.flag._replace(place=place), call, *args))
        for place, (call, args) in enumerate(calls)
    ]
    yield from cluster.results(flagged, jobs or cluster.num_cores)


def _carry_out(call: Callable[..., Any], args: tuple[Any, ...], flag: Flag) -> Ended:
    """Carry out a call in another process, unless the flag is raised."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)  # on a cluster, this process was not started by us
    if flag.is_raised():
        return Ended(flag.place, is_done=False)
    try:
        with flag.obeyed():
            return Ended(flag.place, call(*flag.among(args)))
    except InterruptError:
        return Ended(flag.place, is_done=False)
    except Exception as error:
        flag.raise_()  # immediately, before this process gets another call
        error.add_note(traceback.format_exc())  # the traceback is not sent automatically
        return Ended(flag.place, Failure(_sendable(error)))


def _begin(parent: int) -> None:
    """Begin as a fork: end with the parent, and write to streams of our own.

    A thread of the parent may have been writing at the fork. Nobody releases its lock here, and a process that ends
    flushes its streams.
    """
    end_with_parent(parent)
    sys.stdout, sys.stderr = _stream(1), _stream(2)


def _stream(number: int) -> TextIO:
    try:
        return open(number, "w", buffering=1, closefd=False)
    except OSError:  # it is closed, so nobody reads it
        return Path(os.devnull).open("w")


def _sendable(error: Exception) -> Exception:
    """Return an exception, or what it says if it does not survive the way to another process."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 (our own)
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return error


def _carry_out_there(flag: Flag, call: Callable[..., Any], *args: Any) -> Ended:
    """Carry out a call on a host of a cluster; its arguments stand alone, so that the cluster fills in what was sent once."""
    ended = _carry_out(call, args, flag)
    if not isinstance(ended.result, Failure):
        return ended
    error = ended.result.error
    if not isinstance(error, UserError):
        host_named(error)
    elif platform.node() != flag.host:
        return ended._replace(result=Failure(UserError(f"{error} (on {platform.node()}, a host of the cluster)")))
    return ended
