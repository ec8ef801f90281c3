"""`dynabench serve`."""

import os
from dataclasses import dataclass, replace
from typing import Annotated

from dynabench.cli.groups import (
    Answers,
    DeploymentFile,
    Disaggregation,
    Engine,
    Formats,
    Frontend,
    KvStore,
    KvTransfer,
    Planner,
    Pool,
    Router,
    Runtime,
    Timing,
    plain_errors,
    refuse_beside,
    refuse_without_roles,
)
from dynabench.deployment.description import Deployment
from dynabench.deployment.file import read
from dynabench.deployment.flags import PoolConfig, simulated_pools
from dynabench.deployment.kv_store import KvStoreConfig
from dynabench.live.serve import serve as serve_deployment
from foundation.settings import changed
from mocker import EngineConfig
from mocker.timing.config import TimingConfig
from serving.cli.command_line import Verbosity, flat
from serving.engines.mock.config import AnswerConfig
from serving.frontend.config import FrontendConfig
from serving.life import DisaggregationConfig
from serving.planner import PlannerConfig
from serving.router import RouterConfig
from serving.supervision.logs import variable_of
from serving.transfer.config import TransferRunConfig
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


def serve(
    deployment: DeploymentFile = None,
    *,
    pool: Pool | None = None,
    frontend: Frontend | None = None,
    router: Router | None = None,
    runtime: Runtime | None = None,
    engine: Engine | None = None,
    timing: Timing | None = None,
    answers: Answers | None = None,
    formats: Formats | None = None,
    disaggregation: Disaggregation | None = None,
    kv_transfer: KvTransfer | None = None,
    kv_store: KvStore | None = None,
    planner: Planner | None = None,
    served: Annotated[ServedConfig, flat("Model", 4)] | None = None,
    verbose: Verbosity = 0,
) -> None:
    """Serve a deployment: a frontend, the router and workers as one supervised group, until Ctrl-C.

    Args:
        deployment: YAML file that describes the deployment, instead of flags: pools, and their settings by name.
        pool: How many workers there are, and whether some only prefill and some only decode.
        frontend: Settings of the frontend.
        router: Settings of the router.
        runtime: How the processes find and reach each other.
        engine: Settings of each engine's scheduler.
        timing: How long the engines' steps take.
        answers: What the engines answer.
        formats: How they write calls of tools and reasoning.
        disaggregation: How a request is handed from prefill to decode workers.
        kv_transfer: How KV gets from prefill to decode workers, and where it is stored.
        kv_store: A store of KV that all workers share.
        planner: What decides how many workers each pool has.
        served: The model, and where the router runs.
        verbose: How much the processes log.
    """
    with plain_errors():
        os.environ |= variable_of(verbose)
    if deployment is not None:
        refuse_beside(
            deployment,
            pool,
            frontend,
            router,
            runtime,
            engine,
            timing,
            answers,
            formats,
            disaggregation,
            kv_transfer,
            kv_store,
            planner,
            served,
        )
        serve_deployment(read(deployment))
        return
    frontend, served, pool = frontend or FrontendConfig(), served or ServedConfig(), pool or PoolConfig()
    worker = WorkerConfig(
        model_path=served.model_path,
        model_name=served.model_name,
        migration_limit=3,
        **changed(formats or ModelConfig()),
    )
    with plain_errors():
        pools = simulated_pools(pool, engine or EngineConfig(), timing or TimingConfig(), default_workers=2)
        described = Deployment(
            pools=tuple(replace(each, worker=worker, answers=answers or AnswerConfig()) for each in pools),
            gpus=pool.gpus,
            router_mode=frontend.router_mode,
            router=router or RouterConfig(),
            standalone_router=served.standalone_router,
            frontend=frontend,
            runtime=runtime,
            disaggregation=disaggregation or DisaggregationConfig(),
            kv_transfer=kv_transfer or TransferRunConfig(),
            kv_store=kv_store or KvStoreConfig(),
            planner=planner or PlannerConfig(),
        )
        if frontend.namespace:
            described = replace(described, name=frontend.namespace)
        refuse_without_roles(described)
    serve_deployment(described)
