"""Run many independent simulations at once: on the cores of this machine, or on a Ray or Dask cluster."""

from collections.abc import Iterator, Sequence
from typing import Any

from dynabench.experiment.settings import Backend
from dynabench.interrupt import Call as Call
from dynabench.interrupt import Interrupt, InterruptError, noted
from foundation.errors import UserError
from foundation.processes import num_cores


def in_parallel(
    calls: Sequence[Call],
    jobs: int = 0,
    *,
    interrupt: Interrupt,
    backend: Backend = "local",
    address: str | None = None,
    is_apart: bool = False,
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
        is_apart: whether even one call at a time runs in another process, which a second signal kills.

    Raises:
        UserError: the cluster's package is not installed, the cluster does not answer, or a process was killed.
        Exception: the exception of a failed call, once the others have ended, because killing them would leave
            resources behind.
    """
    if backend == "local" and address is not None:
        raise UserError(f"the address {address} needs a kind of cluster; name it with --backend ray or --backend dask")
    interrupt.shares.begin(len(calls))
    with noted():  # only calls are torn apart, not what is done with results
        num_processes = min(jobs or num_cores(), len(calls))
        if backend == "local" and num_processes <= 1 and not is_apart:
            yield from _in_turn(calls, interrupt)
            return
        from dynabench.experiment.processes import in_forks, on_cluster, succeeded  # slow to load

        if backend == "local":
            ended = in_forks(calls, num_processes, interrupt)
        else:
            ended = on_cluster(calls, jobs, interrupt, backend, address)
        yield from succeeded(ended, interrupt)


def num_at_once(jobs: int, backend: Backend, address: str | None) -> int:
    """Return how many calls run at once."""
    if jobs or backend == "local":
        return jobs or num_cores()
    from dynabench.experiment.clusters import cluster_of  # slow to load

    return cluster_of(backend, address, jobs).num_cores


def _in_turn(calls: Sequence[Call], interrupt: Interrupt) -> Iterator[tuple[int, Any]]:
    """Carry out calls in this process."""
    for place, (call, args) in enumerate(calls):
        flag = interrupt.flag._replace(place=place)
        if flag.is_raised():
            return
        try:
            with interrupt.obeyed():
                result = call(*flag.among(args))
        except InterruptError:
            return
        flag.progress.note(1.0)
        yield place, result
