"""The workload of an experiment: read once, and reshaped for each arm that needs another shape."""

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, cast
from weakref import WeakValueDictionary

from dynabench.experiment.settings import ExperimentConfig
from dynabench.experiment.workload_file import read_workload
from workloads import Workload
from workloads.formats import DEFAULT, write
from workloads.shape import ShapeConfig, shape

Source = Callable[[ShapeConfig], Workload]
"""Returns the workload in a given shape."""
Given = tuple[Path, ...] | Workload
"""What a workload is given as: its files (none: the bundled one), or what was read or made already."""


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


@dataclass(frozen=True)
class WorkloadFiles:
    """The source of a workload in files."""

    files: tuple[Path, ...]
    trace_block_size: int | None
    seed: int
    format: str | None
    columns: str | None

    def __call__(self, config: ShapeConfig) -> Workload:
        """Return the workload in a given shape."""
        return load_workload(self.files, self.trace_block_size, config, self.seed, self.format, self.columns)

    def read(self) -> "ReadWorkload":
        """Return the same source without the files."""
        size = self.trace_block_size
        return ReadWorkload(_read(self.files, format=self.format, columns=self.columns, block_size=size), self.seed)


@dataclass
class ReadWorkload:
    """A workload that was read, for processes that do not have its files."""

    workload: Workload
    seed: int
    _shaped: dict[ShapeConfig, Workload] = field(default_factory=dict, repr=False)

    def __call__(self, config: ShapeConfig) -> Workload:
        """Return the workload in a given shape."""
        if config not in self._shaped:
            self._shaped = {config: shape(self.workload, config, seed=self.seed)}
        return self._shaped[config]


_HELD = WeakValueDictionary[int, "HeldWorkload"]()


@dataclass(eq=False)
class HeldWorkload(ReadWorkload):
    """A workload that exists in this process. Its forks have it from the start, so only a number travels to them."""

    def __post_init__(self) -> None:
        """Let forks find it."""
        _HELD[id(self)] = self

    def __reduce__(self) -> Any:
        return _held, (id(self),)

    def read(self) -> ReadWorkload:
        """Return the same source for other hosts."""
        return ReadWorkload(self.workload, self.seed)


def _held(number: int) -> HeldWorkload:
    return _HELD[number]


def source_of(given: Given, experiment: ExperimentConfig) -> WorkloadFiles | HeldWorkload:
    """Return what returns the experiment's workload in a given shape."""
    if isinstance(given, Workload):
        return HeldWorkload(given, experiment.seed)
    return WorkloadFiles(given, experiment.trace_block_size, experiment.seed, experiment.format, experiment.columns)


def named(given: Given) -> str:
    """Say where a workload is from."""
    return "in memory" if isinstance(given, Workload) else " ".join(map(str, given)) or "bundled"


def digest_of(workload: Workload) -> str:
    """Return what distinguishes a workload from others with the same name."""
    digest = hashlib.sha256()
    write(workload, DEFAULT, cast("IO[bytes]", SimpleNamespace(write=digest.update)))
    return digest.hexdigest()
