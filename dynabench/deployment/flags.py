"""The flags that make a deployment of one pool, and how they differ in a deployment that is measured."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from msgspec import Meta

from dynabench.deployment.description import Pool
from foundation.errors import UserError
from foundation.settings import Count, NotNegative, check
from mocker import EngineConfig
from mocker.timing.config import TimingConfig
from serving.frontend.config import FrontendConfig, Port
from serving.model.card import Migrations
from serving.router import RouterConfig
from serving.worker.config import ModelRunConfig, WorkerConfig

DECIDED = Parameter(parse=False)
"""Marks a setting that the experiment decides, so that it is no flag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """The workers."""

    workers: Annotated[int, Meta(ge=1, le=10_000)] = 4
    """Workers behind the router."""

    def __post_init__(self) -> None:
        """Refuse settings without a meaning."""
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePoolConfig(PoolConfig):
    """The workers of a stack on this host."""

    engine: Literal["mocker", "mistralrs", "llamacpp", "vllm", "sglang", "trtllm"] = "mocker"
    """Engine of our own stack; all but the mocker run the model that --model names: a folder, GGUF file or Hugging Face id."""

    context_length: Count | None = None
    """Tokens a sequence may reach in an --engine other than the mocker (default: the model's)."""

    extra_engine_args: Path | None = None
    """JSON or YAML file with arguments of an --engine other than the mocker."""

    def __post_init__(self) -> None:
        """Refuse settings without a meaning."""
        check(self)
        for name in ("context_length", "extra_engine_args"):
            if self.engine == "mocker" and getattr(self, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} is for an --engine other than the mocker")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRouterConfig(RouterConfig):
    """Settings of a router that is measured: it takes all that is offered, as it does in virtual time."""

    max_queue_depth: NotNegative | None = None
    """Live: queue limit as a multiple of what a worker runs at once; when every worker is over it, new requests get 429 (none: no limit)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredFrontendConfig(FrontendConfig):
    """Settings of the frontend of a stack that is measured."""

    http_port: Port = 0
    """Port of our own frontend on 127.0.0.1 (0: any that is free)."""

    migration_limit: Migrations | None = 3
    """How often a request may go on at another worker when its own is lost."""

    router_mode: Annotated[str, DECIDED] = "round-robin"
    namespace: Annotated[str, DECIDED] = ""
    seed: Annotated[int, DECIDED] = 0


def simulated_pool(pool: PoolConfig, engine: EngineConfig, timing: TimingConfig) -> Pool:
    """Return simulated workers."""
    return Pool(replicas=pool.workers, mocker=engine, timing=timing)


def running_pool(pool: LivePoolConfig, model: str | None) -> Pool:
    """Return workers with an engine that runs a model.

    Raises:
        UserError: the model is not named.
    """
    if model is None:
        raise UserError(f"--engine {pool.engine} needs --model: a folder, a GGUF file or a Hugging Face id")
    worker = WorkerConfig(model_path=model, context_length=pool.context_length)
    run = ModelRunConfig(extra_engine_args=pool.extra_engine_args)
    return Pool(replicas=pool.workers, engine=pool.engine, worker=worker, run=run)


def live_pool(pool: LivePoolConfig, engine: EngineConfig, timing: TimingConfig) -> Pool:
    """Return the workers of a stack on this host, simulated or not.

    Raises:
        UserError: the model is not named, or step times are given for an engine that runs one.
    """
    if pool.engine == "mocker":
        return simulated_pool(pool, engine, timing)
    if timing.timing_name != "polynomial":
        raise UserError(f"--gpu, --timing and --timing-file are for simulated engines, not for --engine {pool.engine}")
    return running_pool(pool, timing.model)
