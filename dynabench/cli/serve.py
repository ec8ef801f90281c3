"""`dynabench serve`."""

from dataclasses import replace

from dynabench.cli.groups import (
    DeploymentFile,
    Engine,
    Frontend,
    Pool,
    Router,
    Runtime,
    Timing,
    plain_errors,
    refuse_beside,
)
from dynabench.deployment.description import Deployment
from dynabench.deployment.file import read
from dynabench.deployment.flags import PoolConfig, simulated_pool
from dynabench.deployment.serve import serve as serve_deployment
from mocker import EngineConfig
from mocker.timing.config import TimingConfig
from serving.frontend.config import FrontendConfig
from serving.router import RouterConfig
from serving.worker.config import WorkerConfig


def serve(
    *,
    deployment: DeploymentFile = None,
    pool: Pool | None = None,
    frontend: Frontend | None = None,
    router: Router | None = None,
    runtime: Runtime | None = None,
    engine: Engine | None = None,
    timing: Timing | None = None,
    model_path: str = "",
    model_name: str = "",
    standalone_router: bool = False,
) -> None:
    """Serve a deployment: a frontend, the router and workers as one supervised group, until Ctrl-C.

    Args:
        deployment: the deployment (YAML) to serve, instead of what the flags say; see docs/deployment.md.
        pool: how many workers.
        frontend: settings of the frontend.
        router: settings of the router.
        runtime: how the processes find and reach each other.
        engine: settings of each engine's scheduler.
        timing: how long the engines' steps take.
        model_path: folder or Hugging Face id with the tokenizer (none: tokens are bytes of UTF-8).
        model_name: name that clients ask for (default: the folder's or repository's, or mock).
        standalone_router: put the router into a process of its own.
    """
    if deployment is not None:
        refuse_beside(deployment, pool, frontend, router, runtime, engine, timing)
        serve_deployment(read(deployment))
        return
    frontend = frontend or FrontendConfig()
    worker = WorkerConfig(model_path=model_path, model_name=model_name, migration_limit=3)
    with plain_errors():
        workers = simulated_pool(pool or PoolConfig(workers=2), engine or EngineConfig(), timing or TimingConfig())
        described = Deployment(
            pools=(replace(workers, worker=worker),),
            router_mode=frontend.router_mode,
            router=router or RouterConfig(),
            standalone_router=standalone_router,
            frontend=frontend,
            runtime=runtime,
        )
    serve_deployment(described)
