"""The groups of flags that several commands share."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from dynabench.deployment.flags import LivePoolConfig, MeasuredFrontendConfig, MeasuredRouterConfig, PoolConfig
from dynabench.deployment.overhead import OverheadConfig
from dynabench.experiment.settings import ExperimentConfig
from dynabench.plan import ClientConfig
from foundation.errors import UserError
from foundation.settings import changed
from mocker import EngineConfig
from mocker.timing.config import TimingConfig
from serving.cli.command_line import flat
from serving.frontend.config import FrontendConfig
from serving.router import RouterConfig
from serving.runtime.config import RuntimeConfig
from workloads.pacing import LoadConfig
from workloads.shape import ShapeConfig

Experiment = Annotated[ExperimentConfig, flat("Experiment", 1)]
Shape = Annotated[ShapeConfig, flat("Workload", 2)]
Load = Annotated[LoadConfig, flat("Load", 3)]
Client = Annotated[ClientConfig, flat("Client", 4)]
Pool = Annotated[PoolConfig, flat("Workers", 5)]
LivePool = Annotated[LivePoolConfig, flat("Workers", 5)]
Engine = Annotated[EngineConfig, flat("Simulated engine", 6)]
Timing = Annotated[TimingConfig, flat("Simulated engine", 6)]
Overheads = Annotated[OverheadConfig, flat("Between client and engine", 7)]
Router = Annotated[RouterConfig, flat("Router", 8)]
MeasuredRouter = Annotated[MeasuredRouterConfig, flat("Router", 8)]
Frontend = Annotated[FrontendConfig, flat("Frontend", 9)]
MeasuredFrontend = Annotated[MeasuredFrontendConfig, flat("Frontend", 9)]
Runtime = Annotated[RuntimeConfig, flat("Runtime", 10)]
DeploymentFile = Annotated[Path | None, Parameter(name=["--deployment", "-f"])]


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Turn a setting that is refused once they are combined into one line."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


def refuse_beside(file: Path, *groups: Any, hint: str = "") -> None:
    """Refuse flags that say what is deployed where a file does.

    Raises:
        UserError: a group holds any.
    """
    given = [group for group in groups if group is not None]
    if given:
        flags = [f"--{name.replace('_', '-')}" for group in given for name in changed(group)]
        what = ", ".join(flags) or "a flag that describes a deployment"
        raise UserError(f"{what} cannot be used with --deployment {file}: put the setting into the file{hint}")


VARY = ", or vary it, as with --vary pools.NAME.num_gpu_blocks=1024,2048"
