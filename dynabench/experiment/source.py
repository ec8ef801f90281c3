"""The workload of an experiment: read once, and reshaped for each arm that needs another shape."""

import functools
from collections.abc import Callable
from pathlib import Path

from dynabench.experiment.settings import ExperimentConfig
from dynabench.experiment.workload_file import read_workload
from workloads import Workload
from workloads.shape import ShapeConfig, shape

Source = Callable[[ShapeConfig], Workload]
"""Returns the workload in a given shape."""


@functools.lru_cache(maxsize=4)
def load_workload(
    files: tuple[Path, ...],
    trace_block_size: int | None,
    config: ShapeConfig,
    seed: int,
    format: str | None = None,
    columns: str | None = None,
) -> Workload:
    """Read a workload (none: the bundled one) and reshape it.

    Raises:
        WorkloadError: it cannot be read, or no requests are left.
    """
    workload = _read(files, format=format, columns=columns, block_size=trace_block_size)
    return shape(workload, config, seed=seed)


_read = functools.lru_cache(maxsize=2)(read_workload)
"""Reads a workload once, however many shapes of it are wanted; forks have what was read before."""


def source_of(files: tuple[Path, ...], experiment: ExperimentConfig) -> Source:
    """Return a function that returns the experiment's workload in a given shape."""
    return functools.partial(
        load_workload,
        files,
        experiment.trace_block_size,
        seed=experiment.seed,
        format=experiment.format,
        columns=experiment.columns,
    )
