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
    return shape(_read(files, trace_block_size, format, columns), config, seed=seed)


@functools.lru_cache(maxsize=1)
def _read(files: tuple[Path, ...], block_size: int | None, format: str | None, columns: str | None) -> Workload:
    return read_workload(files, format=format, columns=columns, block_size=block_size)


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
