"""A deployment: pools of identical workers behind one frontend. The same value is simulated, measured and served.

It is frozen, so that the arms of an experiment can share common parts.
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dynabench.deployment.core import CoreConfig
from dynabench.deployment.fleet import FleetConfig
from dynabench.deployment.flows import linked_as, shared_as
from dynabench.deployment.kv_store import KvStoreConfig
from dynabench.deployment.overhead import OverheadConfig
from foundation.own_code import shown
from foundation.settings import Count, check_settings
from foundation.text import one_line
from mocker import EngineConfig, SglangConfig, TrtllmConfig
from mocker.config import EngineType, EngineTypeConfig, FamilyConfig, SimulatedConfig, in_role, timed_as
from mocker.models.catalog import find_model
from mocker.models.layout import refusal
from mocker.network.config import TransferConfig
from mocker.timing.config import TimingConfig
from mocker.timing.sglang_defaults import with_sglang_defaults
from serving.engines.mock.config import AnswerConfig
from serving.frontend.config import FrontendConfig
from serving.life import DisaggregationConfig
from serving.model.hub import model_name
from serving.planner import PlannerConfig
from serving.role import KV_ROLES, Role
from serving.router import Mode, RouterConfig
from serving.runtime.config import RuntimeConfig
from serving.transfer.config import TransferRunConfig
from serving.worker.config import ModelRunConfig, OwnEngineConfig, WorkerConfig
from serving.worker.registry import ENGINES

ECHOES = ("echo_core", "echo_full")
OWN = ("pytok", "pystr")
"""Engines that the user wrote: on token ids, and on whole chat requests."""
if TYPE_CHECKING:
    EngineName = str
    ModelEngineName = str
else:  # a Literal of the names in the registry
    EngineName = Literal["mocker", *ECHOES, *ENGINES, *OWN]
    ModelEngineName = Literal["mocker", *ENGINES]
HAND_OVER = ("mocker", *(name for name, entry in ENGINES.items() if entry.hands_over))
"""Engines that can hand KV over to one another."""

Replicas = Annotated[int, Meta(ge=0, le=10_000)]
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def _check_name(name: str) -> None:
    """Refuse a name that cannot be part of a path or an address."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"name {name!r} cannot be used; expected a letter followed by letters, digits, - or _")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Workers that are alike."""

    name: str = "worker"
    """Name by which paths and messages call it."""

    role: Role = "aggregated"
    """What its workers do with a request: all of it (aggregated), compute its prompt (prefill), or generate its answer (decode)."""

    router_mode: str | None = None
    """Roles prefill and decode: how requests are spread over the workers of that role (none: as the deployment says)."""

    replicas: Replicas = 1
    """Number of workers."""

    engine: EngineName = "mocker"
    """Engine that each worker runs."""

    engine_type: EngineType = "vllm"
    """Whose scheduler a simulated engine has."""

    mocker: EngineConfig = EngineConfig()  # noqa: RUF009 (frozen)
    """The scheduler of a simulated engine, if it is vLLM's."""

    sglang: SglangConfig = SglangConfig()  # noqa: RUF009
    """The scheduler of a simulated engine, if it is SGLang's."""

    trtllm: TrtllmConfig = TrtllmConfig()  # noqa: RUF009
    """The scheduler of a simulated engine, if it is TensorRT-LLM's."""

    timing: TimingConfig = TimingConfig()  # noqa: RUF009
    """Step times of a simulated engine."""

    answers: AnswerConfig = AnswerConfig()  # noqa: RUF009
    """What a simulated engine answers over HTTP."""

    run: ModelRunConfig = ModelRunConfig()  # noqa: RUF009
    """How an engine runs a model."""

    own: OwnEngineConfig = OwnEngineConfig()  # noqa: RUF009
    """The user's own engine."""

    worker: WorkerConfig = WorkerConfig(migration_limit=3)  # noqa: RUF009
    """What a worker registers, and how it drains."""

    engine_args: dict[str, Any] = field(default_factory=dict)
    """Engines that run a model: any further arguments of the engine, by their names."""

    def __post_init__(self) -> None:
        """Refuse an invalid pool."""
        check_settings(self)
        _check_name(self.name)
        self._check_role()
        object.__setattr__(self, "timing", timed_as(self.engine_type, self.timing))
        if self.engine == "vllm":
            self._check_division()
        if self.engine_args and not self.runs_model:
            raise ValueError(
                f"engine_args is only for engines that run a model; engine {self.engine} has its own named settings"
            )
        try:
            _ = self.arguments
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"engine_args cannot be written as JSON ({one_line(error)})") from error

    def _check_role(self) -> None:
        """Refuse settings that its role excludes."""
        if self.role != "aggregated" and self.engine not in HAND_OVER:
            raise ValueError(
                f"role is {self.role!r}; expected 'aggregated' with engine {self.engine}: only {', '.join(HAND_OVER)} hand "
                "KV over"
            )
        if self.engine_type != "vllm" and self.engine != "mocker":
            raise ValueError(
                f"engine_type is {self.engine_type!r}; expected 'vllm' with engine {self.engine}: other engines have schedulers "
                "of their own"
            )
        if self.mocker.kv_role is not None:
            raise ValueError(f"kv_role is {self.mocker.kv_role!r}; expected no kv_role: the pool's role determines it")
        mode = self.sglang.disaggregation_mode
        if mode != "null":
            raise ValueError(f"disaggregation_mode is {mode!r}; expected none: the pool's role determines it")
        role = self.trtllm.server_role
        if role is not None:
            raise ValueError(f"server_role is {role!r}; expected none: the pool's role determines it")
        if self.router_mode is not None:
            Mode.parse(self.router_mode)
            if self.role == "aggregated":
                raise ValueError(
                    f"router_mode is {self.router_mode!r}; expected none with role 'aggregated': the deployment's "
                    "mode applies to all "
                    "aggregated workers"
                )

    def _check_division(self) -> None:
        """Refuse a model that vLLM cannot divide over a worker's GPUs; one that is not known here, vLLM itself checks."""
        try:
            shape = find_model(self.model)
        except ValueError:
            return
        is_expert_parallel = bool(self.engine_args.get("enable_expert_parallel"))
        n = self.tensor_parallel_size
        if reason := refusal(shape, tensor_parallel_size=n, enable_expert_parallel=is_expert_parallel):
            raise ValueError(f"model {self.model}: {reason}")

    @property
    def simulated(self) -> SimulatedConfig:
        """Its simulated engines."""
        kind = EngineTypeConfig(engine_type=self.engine_type)
        return SimulatedConfig(kind, self.mocker, self.sglang, self.trtllm, self.timing)

    @property
    def engine_config(self) -> FamilyConfig:
        """Settings of its simulated engines, with the part in disaggregation that follows from its role."""
        return in_role(self.simulated.config, KV_ROLES[self.role])

    @property
    def chunk_size(self) -> int | None:
        """Most prompt tokens in a step of its simulated engines, if prompts are cut."""
        engine = self.engine_config
        if isinstance(engine, SglangConfig):
            engine = with_sglang_defaults(engine, self.timing)
        return engine.chunk_size

    @property
    def dp_size(self) -> int:
        """Ranks of each of its simulated engines, each of which has requests of its own."""
        return self.mocker.dp_size if self.engine == "mocker" and self.engine_type == "vllm" else 1

    @property
    def num_attention_ranks(self) -> int:
        """Ranks with attention of their own, among which the GPUs of a simulated SGLang or TensorRT-LLM are divided."""
        match self.engine, self.engine_type:
            case "mocker", "sglang":
                return self.sglang.attn_dp_size
            case "mocker", "trtllm":
                return self.tensor_parallel_size if self.trtllm.enable_attention_dp else 1
            case _:
                return 1

    @property
    def runs_model(self) -> bool:
        """Whether its engine runs a model, with its own package."""
        return self.engine in ENGINES

    @property
    def engine_name(self) -> str:
        """The name of its engine; of one of the user's own, that of its file or object."""
        return Path(shown(self.own.engine_file or "")).name if self.engine in OWN else self.engine

    @property
    def model(self) -> str:
        """The model that is simulated or run: a Hugging Face id or a path; empty if none is named."""
        return self.timing.model or "" if self.engine == "mocker" else self.worker.model_path

    @property
    def served_name(self) -> str:
        """The model name that clients send."""
        path = self.worker.model_path
        return self.worker.model_name or (model_name(path) if path else self.timing.model or "mock")

    @property
    def tensor_parallel_size(self) -> int:
        """GPUs that share each layer of the model."""
        return (self.timing if self.engine == "mocker" else self.run).tensor_parallel_size

    @property
    def pipeline_parallel_size(self) -> int:
        """Stages that the model's layers are divided into."""
        return self.timing.pipeline_parallel_size if self.engine == "mocker" else 1

    @property
    def gpus_per_worker(self) -> int:
        """GPUs that each of its workers uses."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.dp_size

    @property
    def num_gpus(self) -> int:
        """GPUs that all its workers use together."""
        return self.replicas * self.gpus_per_worker

    @property
    def arguments(self) -> tuple[str, ...]:
        """`engine_args` as flags of the engine."""
        return tuple(f"--{name}={msgspec.json.encode(value).decode()}" for name, value in self.engine_args.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Pools behind one frontend."""

    name: str = "dynamo"
    """Namespace in which its processes find each other."""

    pools: tuple[Pool, ...] = (Pool(),)
    """Pools of workers; pools with one model name serve that model together."""

    gpus: Count | None = None
    """GPUs available; more than the pools need is fine (default: not checked)."""

    router_mode: str = "round-robin"
    """How requests are spread over the workers of a model."""

    router: RouterConfig = RouterConfig()  # noqa: RUF009
    """Settings of the router."""

    standalone_router: bool = False
    """Put the router into a process of its own."""

    frontend: FrontendConfig = field(default_factory=FrontendConfig)
    """Settings of the frontend."""

    runtime: RuntimeConfig | None = None
    """How its processes find each other (default: in a folder of their own)."""

    overhead: OverheadConfig = OverheadConfig()  # noqa: RUF009
    """The delays between a client and the engines."""

    core: CoreConfig = CoreConfig()  # noqa: RUF009
    """Whose scheduler decides in simulated engines."""

    transfer: TransferConfig = TransferConfig()  # noqa: RUF009
    """What carries KV between simulated workers, and between them and the store."""

    kv_transfer: TransferRunConfig = TransferRunConfig()  # noqa: RUF009
    """What carries KV between processes."""

    kv_store: KvStoreConfig = KvStoreConfig()  # noqa: RUF009
    """A store of KV that all workers share."""

    disaggregation: DisaggregationConfig = DisaggregationConfig()  # noqa: RUF009
    """How prefill and decode workers share a request."""

    fleet: FleetConfig = FleetConfig()  # noqa: RUF009
    """How workers start and leave."""

    planner: PlannerConfig = PlannerConfig()  # noqa: RUF009
    """Who decides how many workers each pool has."""

    def __post_init__(self) -> None:
        """Refuse an invalid deployment; messages start with the path of the wrong setting."""
        check_settings(self)
        _check_name(self.name)
        Mode.parse(self.router_mode)
        if not self.pools:
            raise ValueError("pools is empty; expected at least one pool")
        names = [pool.name for pool in self.pools]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"pools.{sorted(twice)[0]} is defined twice; expected each pool to have a different name")
        for pool in self.pools:
            if pool.name in ("prefill", "decode") and pool.role == "aggregated":
                raise ValueError(
                    f"pools.{pool.name}.role is 'aggregated', so its workers serve whole requests; expected role: {pool.name}, or "
                    "another name for the pool"
                )
        if not self.num_workers:
            raise ValueError("pools have 0 replicas in total; expected at least one worker")
        needed = sum(pool.num_gpus for pool in self.pools)
        if self.gpus is not None and needed > self.gpus:
            parts = ", ".join(f"{pool.name} {pool.num_gpus}" for pool in self.pools)
            raise ValueError(
                f"gpus is {self.gpus}; expected at least {needed}, the number that the pools need ({parts})"
            )
        for model in self.models.values():
            _check_alike(model)
            _check_roles(model, self.pools)
        judge = self.core.engine_core
        if judge != "mocker" and (
            other := next((one.engine_type for one in self.pools if one.engine_type != judge), None)
        ):
            raise ValueError(f"core.engine_core is {judge!r}; expected mocker, or {other!r} as engine_type")
        _ = self.links
        if self.fleet.drain_policy == "hand-over" and self.engine_type != "vllm":
            raise ValueError(
                f"fleet.drain_policy is 'hand-over'; expected 'wait' or 'bounded' with engine_type {self.engine_type}: only "
                "vLLM's decode workers are simulated to read the KV of answers that have begun"
            )
        if self.standalone_router and self.is_disaggregated:
            raise ValueError(
                "standalone_router is true; expected false with prefill and decode workers: a router process serves "
                "one endpoint"
            )
        if self.standalone_router and len(self.models) > 1:
            raise ValueError(
                f"standalone_router is true; expected one model, not {', '.join(self.models)}: a router process serves one"
            )

    @property
    def models(self) -> dict[str, tuple[Pool, ...]]:
        """The pools of each model, by the name that clients ask for."""
        found: dict[str, tuple[Pool, ...]] = {}
        for pool in self.pools:
            found[pool.served_name] = (*found.get(pool.served_name, ()), pool)
        return found

    @property
    def num_workers(self) -> int:
        """Worker processes of all pools."""
        return sum(pool.replicas for pool in self.pools)

    @property
    def is_disaggregated(self) -> bool:
        """Whether it has workers that only prefill or only decode."""
        return any(pool.role != "aggregated" for pool in self.pools)

    @property
    def engine_type(self) -> EngineType:
        """Whose schedulers its simulated engines have: one family's, where they share requests."""
        return self.pools[0].engine_type

    @property
    def sharing(self) -> DisaggregationConfig:
        """How its prefill and decode workers share a request, with what their engines determine."""
        config, kind = self.disaggregation, self.engine_type
        return shared_as(config, kind if self.is_disaggregated else "vllm")

    @property
    def links(self) -> TransferConfig:
        """What carries KV between its simulated workers, with what their engines determine."""
        return linked_as(self.transfer, self.sharing.flow, self.engine_type)

    @property
    def has_links(self) -> bool:
        """Whether KV travels between its workers, or between them and a store."""
        hands_over = self.fleet.drain_policy == "hand-over"
        return self.is_disaggregated or self.kv_store.kv_store_size > 0 or hands_over

    @property
    def worker_pools(self) -> tuple[Pool, ...]:
        """The pool of each worker, in the order of the workers."""
        return tuple(pool for pool in self.pools for _ in range(pool.replicas))

    def mode_of(self, role: Role) -> str:
        """Return the router mode for the workers of a role."""
        given = (pool.router_mode for pool in self.pools if pool.role == role)
        return next(given, None) or self.router_mode

    def pool(self, name: str) -> Pool:
        """Return a pool by its name.

        Raises:
            ValueError: there is no such pool.
        """
        for pool in self.pools:
            if pool.name == name:
                return pool
        known = ", ".join(pool.name for pool in self.pools)
        raise ValueError(f"pools.{name} is unknown; expected one of {known}")


def _check_alike(pools: tuple[Pool, ...]) -> None:
    """Refuse pools that cannot serve a model together, because one router requires equal KV block sizes."""
    first = pools[0]
    for pool in pools[1:]:
        for path, value, expected in _shared(first, pool):
            if value != expected:
                raise ValueError(
                    f"pools.{pool.name}.{path} is {value!r}; expected {expected!r}, as in pools.{first.name}: "
                    f"both serve {first.served_name}"
                )


def _shared(first: Pool, other: Pool) -> Iterator[tuple[str, Any, Any]]:
    """Yield (setting, value, expected value) of the settings that must be equal in pools that serve one model."""
    yield "engine", other.engine, first.engine
    if first.engine == "mocker":
        yield "engine_type", other.engine_type, first.engine_type
        yield "block_size", other.engine_config.block_size, first.engine_config.block_size
    if first.role != "aggregated" and other.role != "aggregated":  # KV travels from one to the other
        yield "model", other.timing.model, first.timing.model
        yield "kv_cache_dtype", other.timing.kv_cache_dtype, first.timing.kv_cache_dtype
    yield "kv_cache_block_size", other.run.kv_cache_block_size, first.run.kv_cache_block_size
    yield "model_path", other.worker.model_path, first.worker.model_path
    if first.role == other.role:  # each stage has its own router
        yield "kv_events", other.worker.kv_events, first.worker.kv_events


def _check_roles(pools: tuple[Pool, ...], everywhere: tuple[Pool, ...]) -> None:
    """Refuse prefill pools without decode pools for the same model, and vice versa."""
    aggregated, prefill, decode = ([pool for pool in pools if pool.role == role] for role in KV_ROLES)
    if not (prefill or decode):
        return
    some, model = (prefill or decode)[0], pools[0].served_name
    if aggregated:
        raise ValueError(
            f"pools.{aggregated[0].name}.role is 'aggregated'; expected 'prefill' or 'decode', as pools.{some.name} has "
            f"{some.role!r}: both serve {model}"
        )
    for role, found, other in (("prefill", prefill, decode), ("decode", decode, prefill)):
        if not any(pool.replicas for pool in found):
            one = (other or found)[0]
            raise ValueError(
                f"pools.{one.name}.role is {one.role!r}; expected workers with role {role!r} as well that serve {model}"
                f"{_instead(role, everywhere)}"
            )
    _check_one_mode(prefill)
    _check_one_mode(decode)
    for sender, receiver in itertools.product(prefill, decode):
        _check_layouts(sender, receiver)


def _instead(role: str, pools: tuple[Pool, ...]) -> str:
    """Describe which pools have a role, and why they do not count."""
    found = [pool for pool in pools if pool.role == role]
    said = (
        f"pools.{pool.name} {f'serves {pool.served_name}' if pool.replicas else 'has 0 replicas'}" for pool in found
    )
    return "; " + ", ".join(said) if found else ""


def _check_one_mode(pools: list[Pool]) -> None:
    """Refuse different router modes in pools of one role."""
    for pool in pools[1:]:
        if pool.router_mode != pools[0].router_mode:
            raise ValueError(
                f"pools.{pool.name}.router_mode is {pool.router_mode!r}; expected {pools[0].router_mode!r}, as in "
                f"pools.{pools[0].name}: requests are spread over both pools together"
            )


def _check_layouts(sender: Pool, receiver: Pool) -> None:
    """Refuse pools whose ranks do not match: each rank of the larger side is paired with one of the smaller side."""
    few, many = sorted((sender.tensor_parallel_size, receiver.tensor_parallel_size))
    if many % few:
        raise ValueError(
            f"pools.{sender.name}.tensor_parallel_size is {sender.tensor_parallel_size} and "
            f"pools.{receiver.name}.tensor_parallel_size is {receiver.tensor_parallel_size}; expected one to be a multiple of "
            "the other, so that KV can be handed over rank by rank"
        )
