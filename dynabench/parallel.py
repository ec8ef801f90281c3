"""Many independent simulations at once: on the cores of this machine, or on a Ray or Dask cluster."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import joblib

from dynabench.errors import UserError

Backend = Literal["local", "ray", "dask"]
Call = tuple[Callable[..., Any], tuple[Any, ...]]


def in_parallel(
    calls: Sequence[Call], jobs: int = 0, *, backend: Backend = "local", address: str | None = None
) -> Iterator[tuple[int, Any]]:
    """Carry out calls and yield (place, result) as they end; Ctrl-C ends the iteration early.

    Args:
        calls: functions with their arguments; both travel to other processes.
        jobs: how many at once (0: as many as there are cores).
        backend: where.
        address: of the cluster (default: a local one of that kind).

    Raises:
        UserError: the cluster's package is not installed, or the cluster does not answer.
    """
    with _backend(backend, jobs or -1, address):
        parallel = joblib.Parallel(n_jobs=jobs or -1, return_as="generator_unordered", batch_size=1)
        results = parallel(joblib.delayed(_numbered)(place, call, args) for place, (call, args) in enumerate(calls))
        try:
            yield from results
        except KeyboardInterrupt:
            results.close()


def _numbered(place: int, call: Callable[..., Any], args: tuple[Any, ...]) -> tuple[int, Any]:
    return place, call(*args)


def _backend(backend: Backend, jobs: int, address: str | None) -> Any:
    if backend == "local":
        if address is not None:
            raise UserError(
                f"the address {address} is of a cluster; name its kind with --backend ray or --backend dask"
            )
        return joblib.parallel_config("loky", n_jobs=jobs)
    try:
        if backend == "ray":
            import ray
            from ray.util.joblib import register_ray

            ray.init(address=address, log_to_driver=False)
            register_ray()
        else:
            from distributed import Client

            start: Any = Client
            start(address) if address else start()
    except ImportError as error:
        raise UserError(
            f"--backend {backend} needs a package that is not installed; pip install 'dynabench[{backend}]'"
        ) from error
    except (OSError, ConnectionError, RuntimeError) as error:
        raise UserError(f"the {backend} cluster at {address or 'a local address'} does not answer: {error}") from error
    return joblib.parallel_config(backend, n_jobs=jobs)
