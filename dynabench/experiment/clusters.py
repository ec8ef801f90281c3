"""Carry out calls on a Ray or Dask cluster, each with the interface of that package.

The workload is read here and sent once, so that no other host needs its files. What a call returns comes back; it is small
if the call makes it so. A call whose process dies is carried out again elsewhere, a few times. If the head of the cluster
dies, what has come back is kept, and the rest raises an error.
"""

import functools
import platform
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from dynabench.experiment.source import HeldWorkload, WorkloadFiles
from foundation.errors import UserError
from foundation.extras import install

Kind = Literal["ray", "dask"]
Job = tuple[Callable[..., Any], tuple[Any, ...]]
RETRIES = 3
"""How often a call is carried out again after its process died."""
TIMEOUT_S = 30.0
"""How long to wait for a cluster to answer."""
RESUME = "what was finished is saved: run the same command again"


class ClusterError(UserError):
    """A cluster cannot be used, or fails."""


def cluster_of(kind: Kind, address: str | None, jobs: int) -> "RayCluster | DaskCluster":
    """Connect to a cluster, or start one on this machine if no address is given; equal calls share the connection.

    Raises:
        ClusterError: its package is not installed, or it does not answer.
    """
    try:
        return RayCluster.connected(address, jobs) if kind == "ray" else DaskCluster.connected(address, jobs)
    except ImportError as error:
        raise ClusterError(f"--backend {kind} needs a package that is not installed; run {install(kind)}") from error
    except (OSError, ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(f"the {kind} cluster at {address or 'a local address'} does not respond: {error}") from error


class DaskCluster:
    """A Dask cluster."""

    def __init__(self, client: Any) -> None:
        self._client = client

    @classmethod
    @functools.lru_cache(maxsize=1)  # starting a cluster takes seconds, and a plan has many rounds
    def connected(cls, address: str | None, jobs: int) -> "DaskCluster":
        """Connect to a cluster, or start one process for each job."""
        from distributed import Client

        start: Any = Client
        here = {"n_workers": jobs or None, "threads_per_worker": 1, "dashboard_address": None}
        return cls(start(address, timeout=TIMEOUT_S) if address else start(**here))

    def close(self) -> None:
        """Leave the cluster."""
        self._client.close()

    @property
    def num_cores(self) -> int:
        """Calls that run at once."""
        return max(sum(map(int, self._client.nthreads().values())), 1)

    def results(self, jobs: Sequence[Job], at_once: int) -> Iterator[Any]:
        """Carry out calls, so many at once, and yield their results as they end.

        Raises:
            ClusterError: a call's processes died several times, or the cluster is gone.
        """
        from distributed import as_completed

        wait: Any = as_completed
        waiting, sent = deque(jobs), _Sent(lambda value: self._client.scatter(value, broadcast=True, hash=False))
        running: Any = wait([self._submit(waiting.popleft(), sent) for _ in range(min(at_once, len(waiting)))])
        for future in running:
            result = self._result(future)
            if waiting:
                running.add(self._submit(waiting.popleft(), sent))
            yield result

    def _submit(self, job: Job, sent: "_Sent") -> Any:
        call, args = job
        return self._client.submit(call, *sent.instead_of(args), pure=False, retries=0)

    def _result(self, future: Any) -> Any:
        from distributed.scheduler import KilledWorker

        if future.cancelled() or future.status in ("lost", "cancelled"):
            raise ClusterError(f"the dask scheduler is gone; {RESUME}")
        try:
            return future.result(timeout=TIMEOUT_S)
        except KilledWorker as error:
            raise _killed("dask", error) from error
        except (OSError, TimeoutError) as error:
            raise ClusterError(f"the dask scheduler is gone ({error}); {RESUME}") from error


class RayCluster:
    """A Ray cluster."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray

    @classmethod
    @functools.lru_cache(maxsize=1)
    def connected(cls, address: str | None, jobs: int) -> "RayCluster":
        """Connect to a cluster, or start one on this machine."""
        import ray

        here = {"num_cpus": jobs or None, "include_dashboard": False} if address is None else {}
        ray.init(address=address or "local", log_to_driver=False, logging_level="ERROR", **here)
        return cls(ray)

    def close(self) -> None:
        """Leave the cluster."""
        self._ray.shutdown()

    @property
    def num_cores(self) -> int:
        """Calls that run at once."""
        return max(int(self._ray.cluster_resources().get("CPU", 1)), 1)

    def results(self, jobs: Sequence[Job], at_once: int) -> Iterator[Any]:
        """Carry out calls, so many at once, and yield their results as they end.

        Raises:
            ClusterError: a call's processes died several times, or the cluster is gone.
        """
        waiting, sent = deque(jobs), _Sent(self._ray.put)
        running = [self._submit(waiting.popleft(), sent) for _ in range(min(at_once, len(waiting)))]
        while running:
            [ended], running = self._ray.wait(running)
            result = self._result(ended)
            if waiting:
                running.append(self._submit(waiting.popleft(), sent))
            yield result

    def _submit(self, job: Job, sent: "_Sent") -> Any:
        call, args = job
        return self._ray.remote(call).options(max_retries=RETRIES).remote(*sent.instead_of(args))

    def _result(self, reference: Any) -> Any:
        lost = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except (lost.WorkerCrashedError, lost.NodeDiedError, lost.OutOfMemoryError) as error:
            raise _killed("ray", error) from error
        except lost.RayTaskError:
            raise  # from the call, or from what it needs to begin
        except lost.RayError as error:
            raise ClusterError(f"the ray cluster is gone ({type(error).__name__}); {RESUME}") from error


class _Sent:
    """What was sent to a cluster once, and is named in the arguments of many calls."""

    def __init__(self, send: Callable[[Any], Any]) -> None:
        self._send = send
        self._known: dict[WorkloadFiles | HeldWorkload, Any] = {}

    def instead_of(self, args: tuple[Any, ...]) -> list[Any]:
        """Return arguments in which each workload file is replaced by what was sent.

        Ray and Dask replace it where the call begins, but only among the arguments themselves.
        """
        return [self._of(arg) if isinstance(arg, (WorkloadFiles, HeldWorkload)) else arg for arg in args]

    def _of(self, files: WorkloadFiles | HeldWorkload) -> Any:
        if files not in self._known:
            self._known[files] = self._send(files.read())
        return self._known[files]


def host_named(error: Exception) -> Exception:
    """Say on which host a call failed: what it lacked may exist here."""
    error.add_note(f"on the cluster's host {platform.node()}")
    return error


def _killed(kind: Kind, error: Exception) -> ClusterError:
    return ClusterError(
        f"processes of the {kind} cluster were killed several times during one simulation ({type(error).__name__}); if memory ran "
        f"out, use fewer --jobs; {RESUME}"
    )
