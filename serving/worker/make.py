"""Make an engine by its name; each is loaded only when used."""

import importlib
import importlib.util
from collections.abc import Sequence

from foundation.extras import install
from serving.worker.config import ModelRunConfig, WorkerConfig, flags_to_arguments
from serving.worker.engine import Engine, EngineError
from serving.worker.registry import ENGINES


def make_engine(name: str, worker: WorkerConfig, run: ModelRunConfig, arguments: Sequence[str] = ()) -> Engine:
    """Make one of `ENGINES`; nothing is loaded yet.

    Raises:
        ValueError: the settings do not fit the engine.
    """
    entry = ENGINES[name]
    if not entry.hands_over:
        refuse_role(worker, name)
    module, _, adapter = entry.adapter.rpartition(".")
    made = getattr(importlib.import_module(f"serving.engines.{module}"), adapter)
    engine: Engine = made(worker, run, flags_to_arguments(arguments))
    return engine


def refuse_role(worker: WorkerConfig, engine: str) -> None:
    """Reject a role of prefill or decode for engines that cannot hand KV over."""
    if worker.role != "aggregated":
        able = ", ".join(("mocker", *(name for name, entry in ENGINES.items() if entry.hands_over)))
        raise ValueError(f"role is {worker.role!r}; expected 'aggregated' with {engine}: only {able} hand KV over")


def check_installed(name: str) -> None:
    """Check that an engine's package is installed, before anything is downloaded for it.

    Raises:
        EngineError: it is not installed.
    """
    if importlib.util.find_spec(ENGINES[name].package) is None:
        raise not_installed(name)


def not_installed(name: str) -> EngineError:
    """Return the error for an engine of `ENGINES` whose package is not installed."""
    package = ENGINES[name].package
    return EngineError(f"{name} needs the Python package {package}, which is not installed: {install(name)}")
