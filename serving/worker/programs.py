"""The programs of workers: the module that `python -m` runs, its settings, and the GPUs that it may use."""

import functools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from serving.runtime.config import RuntimeConfig
from serving.supervision.group import Program
from serving.worker.config import WorkerConfig
from serving.worker.devices import Allotment, allot, describe_devices, this_host
from serving.worker.registry import EngineChoice


class LightEngine(NamedTuple):
    """An engine that needs no GPU: the mocker, or an echo engine."""

    module: str
    """The module to run with `python -m`."""
    words: tuple[str, ...] = ()
    """The words of its command line."""
    settings: tuple[Any, ...] = ()
    """The engine's own settings."""


@dataclass(frozen=True)
class WorkerGroup:
    """Identical workers, each in its own process."""

    name: str
    """The processes are called NAME-0, NAME-1, ..."""
    count: int
    engine: EngineChoice | LightEngine
    worker: WorkerConfig


def worker_programs(wanted: Iterable[WorkerGroup], runtime: RuntimeConfig) -> list[Program]:
    """Return the processes of workers, in order; this host's GPUs are divided among those that run models.

    The share of the memory that each gets is printed on standard error.

    Raises:
        ValueError: an engine does not accept its settings, or there are too few GPUs.
    """
    wanted = list(wanted)
    models = [
        (each.engine, each.worker)
        for each in wanted
        if isinstance(each.engine, EngineChoice)
        for _ in range(each.count)
    ]
    allotments = allot(models, this_host())
    for line in describe_devices(allotments):
        _say_once(line)
    left = iter(allotments)
    return [program for workers in wanted for program in _programs(workers, runtime, left)]


def program_of(workers: WorkerGroup, name: str, runtime: RuntimeConfig) -> Program:
    """Return one process like those of the given workers, which may use every GPU that it sees."""
    worker, engine = workers.worker, workers.engine
    if isinstance(engine, EngineChoice):
        return Program(name, ["-m", engine.module], (worker, engine.run, runtime, list(engine.arguments)))
    return Program(name, ["-m", engine.module, *engine.words], (worker, *engine.settings, runtime))


def _programs(workers: WorkerGroup, runtime: RuntimeConfig, allotments: Iterator[Allotment]) -> Iterator[Program]:
    """Yield the processes of the given workers, each with the next allotment if it needs one."""
    for number in range(workers.count):
        name = f"{workers.name}-{number}"
        if isinstance(workers.engine, EngineChoice):
            choice, environment, *_ = next(allotments)
            program = program_of(replace(workers, engine=choice), name, runtime)
            yield replace(program, environment=environment)
        else:
            yield program_of(workers, name, runtime)


@functools.cache
def _say_once(line: str) -> None:
    """Print a line once, though every arm of an experiment would print it."""
    print(line, file=sys.stderr)
