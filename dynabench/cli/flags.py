"""Flags that describe a deployment, and the deployment that they describe."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar

from dynabench.cli.groups import (
    Answers,
    Core,
    Disaggregation,
    Engine,
    Fleet,
    Formats,
    Frontend,
    KvStore,
    KvTransfer,
    LivePool,
    MeasuredFrontend,
    MeasuredRouter,
    Overheads,
    Planner,
    Pool,
    Router,
    Runtime,
    Scheduler,
    Sglang,
    Timing,
    Transfers,
    Trtllm,
)
from dynabench.deployment import description, paths
from dynabench.deployment.description import Deployment
from dynabench.deployment.file import read_deployment
from dynabench.deployment.flags import (
    LivePoolConfig,
    MeasuredFrontendConfig,
    MeasuredRouterConfig,
    PoolConfig,
    live_pools,
    simulated_pool,
    simulated_pools,
)
from foundation.errors import UserError
from foundation.settings import changed
from mocker import EngineConfig, SglangConfig, TrtllmConfig
from mocker.config import EngineTypeConfig, SimulatedConfig
from mocker.network.config import TransferConfig
from mocker.timing.config import TimingConfig
from serving.engines.mock.config import AnswerConfig
from serving.transfer.config import OF_TIERS
from serving.worker.config import ModelConfig

SECTIONS = frozenset(section.name for section in fields(Deployment))

OF_OUR_STACK = frozenset(
    {"frontend", "router", "answers", "formats", "disaggregation", "kv_transfer", "kv_store", "planner"}
)
"""Groups that say nothing about another server; those of the engine and its step times also simulate it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags(ABC):
    """Groups of flags that describe a deployment; a group is None if none of its flags is given.

    The help and messages list the groups in the order of the fields.
    """

    is_measured: ClassVar[bool] = True
    """Whether an experiment runs the deployment, so that its settings can be varied."""

    def deployment(self, file: Path | None, varied: Collection[str] = ()) -> Deployment:
        """Return the deployment that a file describes, or these flags.

        Raises:
            UserError: both do, or flags are about prefill and decode workers and there are none.
        """
        if file is not None:
            self._refuse_beside(file)
            return read_deployment(file, is_measured=self.is_measured, varied=varied)
        described = self.described(varied)
        refuse_without_roles(described)
        return described

    @abstractmethod
    def described(self, varied: Collection[str] = ()) -> Deployment:
        """Return the deployment that these flags describe, whose settings in `varied` an experiment sets."""

    def _refuse_beside(self, file: Path) -> None:
        if groups := given(self).values():
            settings = dict(setting for group in groups for setting in settings_of(group))
            what = ", ".join(settings) or "a flag that describes a deployment"
            hint = varied_instead(read_deployment(file, is_measured=True), settings) if self.is_measured else ""
            raise UserError(f"{what} cannot be used with --deployment {file}; put the setting in the file{hint}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """Flags of simulated engines."""

    scheduler: Scheduler | None = None
    engine: Engine | None = None
    sglang: Sglang | None = None
    trtllm: Trtllm | None = None
    timing: Timing | None = None

    def worker(self, varied: Collection[str] = ()) -> description.Pool:
        """Return a worker with the engine that they describe."""
        given = SimulatedConfig(
            self.scheduler or EngineTypeConfig(),
            self.engine or EngineConfig(),
            self.sglang or SglangConfig(),
            self.trtllm or TrtllmConfig(),
            self.timing or TimingConfig(),
        )
        return simulated_pool(given, varied)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFlags(EngineFlags, Flags):
    """Flags of simulated workers that share nothing."""

    pool: Pool | None = None
    router: MeasuredRouter | None = None
    overhead: Overheads | None = None

    def described(self, varied: Collection[str] = ()) -> Deployment:
        """Return the simulated deployment."""
        pool = self.pool or PoolConfig()
        pools = simulated_pools(pool, self.worker(varied), varied)
        return Deployment(pools=pools, gpus=pool.gpus, **{"router": MeasuredRouterConfig()} | sections(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualFlags(AuditFlags):
    """Flags of a deployment that is measured in virtual time."""

    core: Core | None = None
    disaggregation: Disaggregation | None = None
    transfer: Transfers | None = None
    kv_store: KvStore | None = None
    fleet: Fleet | None = None
    planner: Planner | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFlags(EngineFlags, Flags):
    """Flags of a deployment whose processes run on this host."""

    pool: Pool | None = None
    router: Router | None = None
    frontend: Frontend | None = None
    runtime: Runtime | None = None
    answers: Answers | None = None
    formats: Formats | None = None
    disaggregation: Disaggregation | None = None
    kv_transfer: KvTransfer | None = None
    kv_store: KvStore | None = None
    planner: Planner | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFlags(ProcessFlags):
    """Flags of a deployment that is measured over HTTP."""

    pool: LivePool | None = None
    router: MeasuredRouter | None = None
    frontend: MeasuredFrontend | None = None

    def described(self, varied: Collection[str] = ()) -> Deployment:
        """Return the deployment on this host."""
        pool = self.pool or LivePoolConfig()
        pools = live_pools(
            pool,
            self.worker(varied),
            varied,
            answers=self.answers or AnswerConfig(),
            formats=self.formats or ModelConfig(),
        )
        others: dict[str, Any] = {"frontend": MeasuredFrontendConfig(), "router": MeasuredRouterConfig()} | sections(
            self
        )
        return Deployment(pools=pools, gpus=pool.gpus, **others)

    def refuse_with_url(self, router_modes: Collection[str]) -> None:
        """Refuse flags that describe our own stack, if another server is measured.

        Raises:
            UserError: there is one.
        """
        pool = self.pool or LivePoolConfig()
        named = [flag for name, group in given(self).items() if name in OF_OUR_STACK for flag in flags_of(group)]
        if router_modes:
            named.insert(0, "--router-mode")
        if pool.names_roles:
            named.insert(0, "--prefill-workers and --decode-workers")
        elif changed(pool):
            named.insert(0, f"--engine {pool.engine}" if pool.engine != "mocker" else next(flags_of(pool)))
        if named:
            verb = "apply" if " and " in named[0] else "applies"
            hint = "; its key is that of --api-key-file or OPENAI_API_KEY" * (named[0] == "--api-key")
            raise UserError(f"{named[0]} {verb} to dynabench's own stack, but --url measures another server{hint}")


def given(groups: Any) -> dict[str, Any]:
    """Return the groups of which a flag is given, by name."""
    return {each.name: group for each in fields(groups) if (group := getattr(groups, each.name)) is not None}


def sections(groups: Any) -> dict[str, Any]:
    """Return the given groups that are sections of a deployment; they have the names of those sections."""
    return {name: group for name, group in given(groups).items() if name in SECTIONS}


def flags_of(group: Any) -> Iterator[str]:
    """Yield the flags of the settings that differ from their defaults."""
    yield from dict(settings_of(group))


def settings_of(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings that differ from their defaults: the flag of each, and its value."""
    if isinstance(group, TransferConfig):
        prefix = "transfer-"
    for name, value in changed(group).items():
        if is_dataclass(value):
            yield from settings_of(value, f"{name}-")
        else:
            yield f"--{prefix}{name.replace('_', '-')}", value


def varied_instead(deployment: Deployment, settings: Mapping[str, Any]) -> str:
    """Say with which --vary an experiment sets settings in a deployment from a file: of one pool, if they are of pools."""
    found, pools = [], list[str]()
    for flag, value in settings.items():
        name = flag.removeprefix("--").replace("-", "_")
        its = _pools_with(deployment, name)
        pools += its
        if its:
            found.append(_vary(f"pools.{its[0]}.{'replicas' if name == 'workers' else name}", value))
        elif paths.full(deployment, name):
            found.append(_vary(name, value))
    if not found:
        return ""
    which = f" (pools: {', '.join(dict.fromkeys(pools))})" if pools else ""
    return f", or set it here with {' '.join(found)}{which}"


def _pools_with(deployment: Deployment, name: str) -> list[str]:
    """Return the pools that have a setting; none if it is not one of pools."""
    if name != "workers" and not (paths.full(deployment, name) or "").startswith("pools.*."):
        return []
    setting = "replicas" if name == "workers" else name
    return [pool.name for pool in deployment.pools if setting in paths.settings_of_pool(pool.engine)]


def _vary(name: str, value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else value if isinstance(value, str | int | float) else "VALUE"
    return f"--vary {name}={text}"


def refuse_without_roles(deployment: Deployment) -> None:
    """Refuse flags about the handover between prefill and decode workers if there are none.

    Raises:
        UserError: there is one.
    """
    if deployment.is_disaggregated:
        return
    unused: list[Any] = [deployment.disaggregation, deployment.kv_transfer]
    if not deployment.has_links:
        unused.append(deployment.transfer)
    for group in unused:
        for flag in flags_of(group):
            if flag.removeprefix("--").replace("-", "_") in OF_TIERS:
                continue
            raise UserError(f"{flag} needs prefill and decode workers; use --prefill-workers and --decode-workers")
