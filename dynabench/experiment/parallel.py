"""Run many independent simulations at once: on the cores of this machine, or on a Ray or Dask cluster."""

import multiprocessing.resource_tracker
import os
import platform
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import joblib
from joblib.externals.loky.backend import resource_tracker
from joblib.externals.loky.process_executor import TerminatedWorkerError

from dynabench.experiment.clusters import DaskCluster, RayCluster, cluster_of, host_named
from dynabench.experiment.settings import Backend
from dynabench.interrupt import ASKING, Flag, Interrupt, InterruptError, held_back, noted
from foundation.errors import UserError
from foundation.processes import end_with_parent, num_cores

Call = tuple[Callable[..., Any], tuple[Any, ...]]
Carried = tuple[int, Any, bool]
"""A call's place and result, and whether it ended."""


def in_parallel(
    calls: Sequence[Call],
    jobs: int = 0,
    *,
    interrupt: Interrupt,
    backend: Backend = "local",
    address: str | None = None,
) -> Iterator[tuple[int, Any]]:
    """Carry out calls and yield (place, result) as they end.

    After an interrupt or a failed call, no more calls begin, and those in progress end: a call that asks the flag may
    still give a result.

    Args:
        calls: functions with their arguments; both are sent to other processes.
        jobs: how many run at once (0: one for each core).
        interrupt: ends the calls early.
        backend: where the calls run.
        address: address of the cluster (default: a local one of that kind).

    Raises:
        UserError: the cluster's package is not installed, the cluster does not answer, or a process was killed.
        Exception: the exception of a failed call, once the others have ended, because killing them would leave
            resources behind.
    """
    if backend == "local" and address is not None:
        raise UserError(f"the address {address} needs a kind of cluster; name it with --backend ray or --backend dask")
    interrupt.shares.begin(len(calls))
    with noted():  # only calls are torn apart, not what is done with results
        if backend != "local":
            yield from _kept(_on_cluster(calls, jobs, interrupt, cluster_of(backend, address, jobs)), interrupt)
        elif joblib.effective_n_jobs(jobs or -1) == 1:
            yield from _in_turn(calls, interrupt)
        else:
            with joblib.parallel_config(
                "loky", n_jobs=jobs or -1, initializer=end_with_parent, initargs=(os.getpid(),)
            ):
                yield from _kept(_in_processes(calls, jobs, interrupt), interrupt)


def num_at_once(jobs: int, backend: Backend, address: str | None) -> int:
    """Return how many calls run at once."""
    return jobs or (num_cores() if backend == "local" else cluster_of(backend, address, jobs).num_cores)


def _in_turn(calls: Sequence[Call], interrupt: Interrupt) -> Iterator[tuple[int, Any]]:
    """Carry out calls in this process."""
    for place, (call, args) in enumerate(calls):
        flag = interrupt.flag._replace(place=place)
        if flag.is_raised():
            return
        try:
            with interrupt.obeyed():
                result = call(*_with(flag, args))
        except InterruptError:
            return
        flag.progress.note(1.0)
        yield place, result


def _in_processes(calls: Sequence[Call], jobs: int, interrupt: Interrupt) -> Iterator[Carried]:
    """Carry out calls in other processes of this machine."""
    # A process that idled too long (five minutes) may end just as calls come; loky starts another, and nothing is lost.
    warnings.filterwarnings("ignore", "A worker stopped while some jobs were given to the executor", UserWarning)
    parallel = joblib.Parallel(n_jobs=jobs or -1, return_as="generator_unordered", batch_size=1)
    # Starting one of these trackers unblocks signals that are held back, so they start first.
    multiprocessing.resource_tracker.ensure_running()
    resource_tracker.ensure_running()
    with held_back():
        results = parallel(
            joblib.delayed(_carry_out)(function, args, interrupt.flag._replace(place=place))
            for place, (function, args) in enumerate(calls)
        )
    try:
        yield from results
    except TerminatedWorkerError as error:  # its message has several lines and only guesses at the cause
        raise UserError("a simulation process was killed; if memory ran out, use fewer --jobs") from error
    finally:
        results.close()


def _on_cluster(
    calls: Sequence[Call], jobs: int, interrupt: Interrupt, cluster: RayCluster | DaskCluster
) -> Iterator[Carried]:
    """Carry out calls on a cluster."""
    flagged = [
        (_carry_out_there, (interrupt.flag._replace(place=place), function, *args))
        for place, (function, args) in enumerate(calls)
    ]
    yield from cluster.results(flagged, jobs or cluster.num_cores)


def _kept(results: Iterator[Carried], interrupt: Interrupt) -> Iterator[tuple[int, Any]]:
    """Yield the results of calls that have ended, and raise the first failure once the others have ended."""
    failure: Exception | None = None
    for place, result, has_ended in results:
        if has_ended:
            interrupt.flag._replace(place=place).progress.note(1.0)
        if isinstance(result, _Failure):
            failure = failure or result.error
            interrupt.flag.raise_()  # the call may have failed on another host
        elif has_ended and failure is None:
            yield place, result
    if failure is not None:
        raise failure


class _Failure(NamedTuple):
    """The exception that a call raised."""

    error: Exception


def _carry_out(call: Callable[..., Any], args: tuple[Any, ...], flag: Flag) -> Carried:
    """Carry out a call in its own process, unless the flag is raised; return its place and result, and whether it ended."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)  # on a cluster, this process was not started by us
    if flag.is_raised():
        return flag.place, None, False
    try:
        with flag.obeyed():
            return flag.place, call(*_with(flag, args)), True
    except InterruptError:
        return flag.place, None, False
    except Exception as error:
        flag.raise_()  # immediately, before this process gets another call
        error.add_note(traceback.format_exc())  # the traceback is not sent automatically
        return flag.place, _Failure(error), True


def _carry_out_there(flag: Flag, call: Callable[..., Any], *args: Any) -> Carried:
    """Carry out a call on a host of a cluster; its arguments stand alone, so that the cluster fills in what was sent once."""
    place, result, has_ended = _carry_out(call, args, flag)
    if isinstance(result, _Failure) and not isinstance(result.error, UserError):
        host_named(result.error)
    elif isinstance(result, _Failure) and platform.node() != flag.host:
        result = _Failure(UserError(f"{result.error} (on {platform.node()}, a host of the cluster)"))
    return place, result, has_ended


def _with(flag: Flag, args: tuple[Any, ...]) -> Iterator[Any]:
    """Yield a call's arguments; a flag among them gets the call's place, so that it can report progress."""
    return (flag if isinstance(arg, Flag) else arg for arg in args)
