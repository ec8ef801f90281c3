"""The flags that make a deployment of one pool, or of one prefill and one decode pool.

Some have other defaults if the deployment is measured.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, default_name_transform
from msgspec import Meta

from dynabench.deployment.description import ModelEngineName, Pool
from dynabench.deployment.paths import change_pool, settings_of_pool
from foundation.settings import Count, NotNegative, changed, check_settings
from mocker.config import SimulatedConfig
from serving.engines.mock.config import AnswerConfig
from serving.frontend.config import FrontendConfig, Port
from serving.model.card import Migrations, Role
from serving.router import RouterConfig
from serving.worker.config import ModelConfig, ModelRunConfig, WorkerConfig

DECIDED = Parameter(parse=False)
"""Marks a setting that the experiment decides, so that it has no flag."""


DEFAULT_WORKERS = 4

NumWorkers = Annotated[int, Meta(ge=1, le=10_000)]


def prefixed(prefix: str) -> Parameter:
    """Turn the fields of a dataclass into options with a common prefix."""
    return Parameter(name="*", name_transform=lambda name: f"{prefix}-{default_name_transform(name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleConfig:
    """Workers that do one part of each request, and in what they differ from those of the other part."""

    workers: NumWorkers | None = None
    """Workers that only prefill, or only decode; the other part of a request needs workers too."""

    router_mode: str | None = None
    """--router-mode among these workers."""

    gpu: str | None = None
    """--gpu of these workers."""

    tensor_parallel_size: Count | None = None
    """--tensor-parallel-size of these workers."""

    dp_size: Count | None = None
    """--dp-size of these workers."""

    max_num_batched_tokens: Count | None = None
    """--max-num-batched-tokens of these workers."""

    max_num_seqs: Count | None = None
    """--max-num-seqs of these workers."""

    num_gpu_blocks: Count | None = None
    """--num-gpu-blocks of these workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """The workers."""

    workers: NumWorkers | None = None
    """Workers behind the router (default: 4; of dynabench serve, 2)."""

    gpus: Count | None = None
    """GPUs available; workers that need more are refused. If --vary names prefill_workers, decode workers get the rest
    (default: not checked)."""

    prefill: Annotated[RoleConfig, prefixed("prefill")] = RoleConfig()
    decode: Annotated[RoleConfig, prefixed("decode")] = RoleConfig()

    def __post_init__(self) -> None:
        """Refuse invalid settings; messages about one role name it."""
        check_settings(self)
        for role, part in self.roles.items():
            try:
                check_settings(part)
            except ValueError as error:
                raise ValueError(f"{role}_{error}") from None

    @property
    def roles(self) -> dict[Role, RoleConfig]:
        """The flags given for workers of one role."""
        return {"prefill": self.prefill, "decode": self.decode}

    @property
    def names_roles(self) -> bool:
        """Whether any was given."""
        return any(changed(part) for part in self.roles.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePoolConfig(PoolConfig):
    """The workers of a stack on this host."""

    engine: ModelEngineName = "mocker"
    """Engine of the workers; all except the mocker run the model that --model names: a folder, GGUF file or Hugging
    Face id."""

    context_length: Count | None = None
    """Tokens a sequence may reach in an --engine other than the mocker (default: the model's)."""

    extra_engine_args: Path | None = None
    """JSON or YAML file with arguments of an --engine other than the mocker."""

    def __post_init__(self) -> None:
        """Refuse invalid settings."""
        PoolConfig.__post_init__(self)
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
    """Port of the frontend on 127.0.0.1 (0: any free one)."""

    migration_limit: Migrations | None = 3
    """How often a request may continue on another worker after losing its own."""

    router_mode: Annotated[str, DECIDED] = "round-robin"
    namespace: Annotated[str, DECIDED] = ""
    seed: Annotated[int, DECIDED] = 0


SPLIT = frozenset({"prefill_workers", "pools.prefill.replicas"})
"""Names of the axis that divides --gpus between prefill and decode workers."""


def simulated_pool(engine: SimulatedConfig, varied: Collection[str] = ()) -> Pool:
    """Return a worker with a simulated engine.

    Raises:
        ValueError: a setting is given of an engine whose scheduler it does not have, and which no axis gives it.
    """
    if "engine_type" not in varied:
        engine.refuse_idle()
    return Pool(
        engine_type=engine.type.engine_type,
        mocker=engine.vllm,
        sglang=engine.sglang,
        trtllm=engine.trtllm,
        timing=engine.timing,
    )


def simulated_pools(
    config: PoolConfig, pool: Pool, varied: Collection[str] = (), *, default_workers: int = DEFAULT_WORKERS
) -> tuple[Pool, ...]:
    """Return simulated workers like one: one pool, or, if flags or axes name roles, one prefill and one decode pool.

    A role has the number of workers that its flag sets. Without a flag an axis sets the number, which is 1 until then.

    Raises:
        ValueError: workers of only one role are named, or two flags contradict each other.
    """
    return _divided(config, replace(pool, replicas=default_workers), varied)


def _divided(config: PoolConfig, pool: Pool, varied: Collection[str]) -> tuple[Pool, ...]:
    """Return a pool with the number of workers that the flags set, or such a pool for each role."""
    if not config.names_roles and SPLIT.isdisjoint(varied):
        return (replace(pool, replicas=config.workers or pool.replicas),)
    _check_counts(config, varied)
    return tuple(_pool_of_role(pool, role, own) for role, own in config.roles.items())


def _check_counts(config: PoolConfig, varied: Collection[str]) -> None:
    """Refuse numbers of workers that are missing, or set twice."""
    refuse_counts(config)
    is_divided = config.gpus is not None and not SPLIT.isdisjoint(varied)
    if is_divided and config.decode.workers is not None:
        raise ValueError(
            f"--decode-workers {config.decode.workers} cannot be used with --gpus {config.gpus} and --vary prefill_workers: "
            "decode workers get the remaining GPUs"
        )
    for role, own in config.roles.items():
        is_varied = not {f"{role}_workers", f"pools.{role}.replicas"}.isdisjoint(varied)
        is_left = role == "decode" and is_divided
        if own.workers is None and not (is_varied or is_left):
            raise ValueError(
                f"--{role}-workers is missing; expected it together with "
                f"--{'decode' if role == 'prefill' else 'prefill'}-workers, or "
                "--gpus with --vary prefill_workers=1,2"
            )


def refuse_counts(config: PoolConfig) -> None:
    """Refuse a number of aggregated workers beside workers of one role.

    Raises:
        ValueError: there is one.
    """
    if config.workers is not None:
        raise ValueError(
            f"--workers {config.workers} counts aggregated workers; leave it out with --prefill-workers and "
            "--decode-workers"
        )


def _pool_of_role(pool: Pool, role: Role, own: RoleConfig) -> Pool:
    """Return workers like those of a pool, but with one role."""
    settings = changed(own)
    for name in settings.keys() - {"workers", *settings_of_pool(pool.engine)}:
        raise ValueError(f"--{role}-{name.replace('_', '-')} is for simulated engines, not for --engine {pool.engine}")
    pool = replace(pool, name=role, role=role, replicas=settings.pop("workers", 1))
    try:
        for name, value in settings.items():
            pool = change_pool(pool, name, value)
    except ValueError as error:
        raise ValueError(f"pools.{role}: {error}") from error
    return pool


def running_pools(pool: LivePoolConfig, model: str | None, varied: Collection[str] = ()) -> tuple[Pool, ...]:
    """Return workers with an engine that runs a model, all aggregated or of both roles.

    Raises:
        ValueError: the model is not named, or as for `simulated_pools`.
    """
    if model is None:
        raise ValueError(f"--engine {pool.engine} needs --model: a folder, a GGUF file or a Hugging Face id")
    worker = WorkerConfig(model_path=model, context_length=pool.context_length)
    run = ModelRunConfig(extra_engine_args=pool.extra_engine_args)
    return _divided(pool, Pool(replicas=DEFAULT_WORKERS, engine=pool.engine, worker=worker, run=run), varied)


def live_pools(
    pool: LivePoolConfig,
    engine: Pool,
    varied: Collection[str] = (),
    *,
    answers: AnswerConfig = AnswerConfig(),  # noqa: B008 (frozen)
    formats: ModelConfig = ModelConfig(),  # noqa: B008
) -> tuple[Pool, ...]:
    """Return the workers of a stack on this host, simulated like `engine` or not.

    Raises:
        ValueError: step times or answers are given for an engine that runs a model, or as for `running_pools`.
    """
    if pool.engine == "mocker":
        simulated = simulated_pools(pool, engine, varied)
        return tuple(replace(each, answers=answers, worker=_with(each.worker, formats)) for each in simulated)
    for name in (*changed(answers), *_changed_engine(engine)):
        raise ValueError(f"--{name.replace('_', '-')} is for simulated engines, not for --engine {pool.engine}")
    if engine.timing.timing_name != "polynomial":
        raise ValueError(f"--gpu, --timing and --timing-file are for simulated engines, not for --engine {pool.engine}")
    running = running_pools(pool, engine.timing.model, varied)
    return tuple(replace(each, worker=_with(each.worker, formats)) for each in running)


def _changed_engine(pool: Pool) -> Iterator[str]:
    """Yield the settings of a simulated engine that are given."""
    if pool.engine_type != "vllm":
        yield "engine_type"
    for config in pool.simulated.configs.values():
        yield from changed(config)


def _with(worker: WorkerConfig, formats: ModelConfig) -> WorkerConfig:
    """Return a worker whose model writes its answers in these formats."""
    return replace(worker, **changed(formats))
