"""`dynabench serve`."""

import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from dynabench.cli.flags import ProcessFlags, sections
from dynabench.cli.groups import FLAT, DeploymentFile, plain_errors
from dynabench.deployment.description import Deployment
from dynabench.deployment.engines import refuse_encoders
from dynabench.deployment.flags import PoolConfig, simulated_pools
from dynabench.live.serve import serve_deployment
from foundation.settings import changed
from serving.cli.command_line import Verbosity, flat
from serving.engines.mock.config import AnswerConfig
from serving.frontend.config import FrontendConfig
from serving.supervision.logs import variable_of
from serving.worker.config import ModelConfig, WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedConfig:
    """How simulated workers are served."""

    model_path: str = ""
    """Folder or Hugging Face id with the tokenizer (none: tokens are bytes of UTF-8)."""

    model_name: str = ""
    """Model name that clients use (default: the folder's or repository's name, or mock)."""

    standalone_router: bool = False
    """Run the router in its own process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedFlags(ProcessFlags):
    """Flags of a deployment that is served."""

    is_measured: ClassVar[bool] = False

    served: Annotated[ServedConfig, flat("Model", 4)] | None = None

    def described(self, varied: Collection[str] = ()) -> Deployment:
        """Return the deployment with simulated engines."""
        pool, served = self.pool or PoolConfig(), self.served or ServedConfig()
        frontend = self.frontend or FrontendConfig()
        worker = WorkerConfig(
            model_path=served.model_path,
            model_name=served.model_name,
            migration_limit=3,
            **changed(self.formats or ModelConfig()),
        )
        answers = self.answers or AnswerConfig()
        pools = simulated_pools(pool, self.worker(), default_workers=2)
        deployment = Deployment(
            pools=tuple(replace(each, worker=worker, answers=answers) for each in pools),
            gpus=pool.gpus,
            router_mode=frontend.router_mode,
            standalone_router=served.standalone_router,
            **sections(self),
        )
        return replace(deployment, name=frontend.namespace) if frontend.namespace else deployment


def serve(
    deployment: DeploymentFile = None,
    *,
    flags: Annotated[ServedFlags, FLAT] = ServedFlags(),
    verbose: Verbosity = 0,
) -> None:
    """Serve a deployment: a frontend, the router and workers as one supervised group, until Ctrl-C.

    Args:
        deployment: YAML file that describes the deployment, instead of flags: pools, and their settings by name.
        flags: What describes the deployment, and its model.
        verbose: How much the processes log.
    """
    with plain_errors():
        os.environ |= variable_of(verbose)
        described = flags.deployment(deployment)
        refuse_encoders(described)
    serve_deployment(described)
