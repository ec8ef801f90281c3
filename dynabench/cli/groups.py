"""The groups of flags that several commands share."""

import contextlib
from collections.abc import Iterator
from typing import Annotated

from dynabench.cli.workload import flat
from dynabench.errors import UserError
from dynabench.experiment.settings import ExperimentConfig, ExperimentRouterConfig, LiveConfig, OverheadConfig
from mocker import EngineConfig
from mocker.timing.config import TimingConfig
from serving.router import RouterConfig
from workloads.pacing import LoadConfig
from workloads.shape import ShapeConfig

Experiment = Annotated[ExperimentConfig, flat("Experiment", 1)]
Shape = Annotated[ShapeConfig, flat("Workload", 2)]
Load = Annotated[LoadConfig, flat("Load", 3)]
RouterSettings = Annotated[RouterConfig, flat("Router", 4)]
ExperimentRouter = Annotated[ExperimentRouterConfig, flat("Router", 4)]
Live = Annotated[LiveConfig, flat("Live stack", 5)]
Overheads = Annotated[OverheadConfig, flat("Between client and engine", 7)]
EngineSettings = Annotated[EngineConfig, flat("Simulated engine", 6)]
TimingSettings = Annotated[TimingConfig, flat("Simulated engine", 6)]


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Turn a setting that is refused once they are combined into one line."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error
