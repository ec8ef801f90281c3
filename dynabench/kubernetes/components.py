"""The components of a deployment in a cluster: one kind of pod for each."""

import math
import re
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from dynabench.deployment.description import OWN, Deployment, Pool
from dynabench.deployment.processes import DeploymentParts, check_store, kept_gib, parts_of
from dynabench.kubernetes import names
from dynabench.kubernetes.arguments import arguments_of
from dynabench.kubernetes.contract import ADDRESS, COMPONENT, ours, planner_arguments
from dynabench.kubernetes.settings import ClusterConfig
from foundation.own_code import base_and_additions, is_own
from foundation.settings import changed
from serving.frontend.config import FrontendConfig
from serving.kv_tiers.config import KvStoreServiceConfig
from serving.model.card import Role
from serving.model.hub import SCHEME, is_hub_id
from serving.runtime.config import RuntimeConfig
from serving.runtime.kubernetes.names import POOL, ROLE
from serving.supervision.group import Program
from serving.worker.devices import num_gpus
from serving.worker.registry import ENGINES, EngineChoice

HTTP, GRAPH_HTTP, SYSTEM, STORE_PORT = 8080, 8000, 9090, 7600
"""Ports in containers: the frontend's default, its default under Dynamo's operator, the port of probes (the one that
the operator uses), and the KV store's."""

FIRST_PORT = 1024
"""The first port that a process without special rights may listen on."""

FILES, MODELS, CACHE, TMP, SHARED_MEMORY = "/etc/dynabench", "/models", "/cache", "/tmp", "/dev/shm"  # noqa: S108
"""Where a container has its volumes: files of this machine, models of a claim, downloaded ones, and room to write."""

FILE_NAME = re.compile(r"(?!\.\.)[-.\w]{1,253}", re.ASCII)
"""A key of a ConfigMap."""

QUICK_S = 300.0
"""Time limit for starting a process that loads no model."""

LOADING_S = 1800.0
"""Time limit for starting a process that loads a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterComponent:
    """A set of identical pods, each with one container."""

    name: str
    """What follows the deployment's name: the name of a pool or of another component."""
    kind: str
    """`frontend`, `router`, `kv-store`, `planner` or `worker`."""
    image: str
    arguments: list[str]
    """Arguments of Python."""
    replicas: int
    drain_s: float
    """How long the component may take to finish its work when it stops."""
    startup_s: float
    """How long the component may take to start."""
    ports: dict[str, int]
    """Ports by name. Probes use the first."""
    cpu: str
    memory_mib: int
    """Requested memory (MiB)."""
    most_memory_mib: int | None
    """Memory limit (MiB); None means no limit."""
    gpus: int = 0
    role: Role | None = None
    """The role of workers; None for other components."""
    environment: dict[str, str] = field(default_factory=dict)
    loads_model: bool = False
    """Whether the component reads a model, downloaded or from a volume."""
    files: tuple[str, ...] = ()
    """Files of this machine that are mounted in `FILES`."""

    @property
    def is_worker(self) -> bool:
        """Whether its pods are workers of a pool."""
        return self.kind == "worker"


def components_of(
    deployment: Deployment, config: ClusterConfig, runtime: RuntimeConfig, *, has_planner: bool
) -> list[ClusterComponent]:
    """Return the components of a deployment, workers last.

    Raises:
        ValueError: the deployment cannot run in a cluster.
    """
    check_store(deployment)
    _check_own_code(deployment)
    prepared = _reachable(deployment, HTTP if config.form == "manifests" else GRAPH_HTTP)
    store = None
    if deployment.kv_store.kv_store_size:
        host = f"{deployment.name}-{names.STORE}"
        store = KvStoreServiceConfig(kv_store_size=kept_gib(deployment), host=host, port=STORE_PORT)
    parts = parts_of(prepared, runtime, namespace=deployment.name, store=store)
    found = [_frontend(prepared, config, parts)]
    if parts.router is not None:
        found.append(_router(config, parts.router))
    if parts.store is not None and store is not None:
        found.append(_store(config, parts.store, store))
    if has_planner:
        found.append(_planner(prepared, config))
    found += [_worker(prepared, config, pool, parts.workers[pool.name]) for pool in prepared.pools]
    _check_used(config, prepared, loads_model=any(component.loads_model for component in found))
    return found


def files_of(pool: Pool) -> tuple[str, ...]:
    """Return the files of this machine that a pool's workers read."""
    given = (pool.timing.timing_file if pool.engine == "mocker" else None, pool.run.extra_engine_args)
    return tuple(str(path) for path in given if path is not None)


def labels_of(deployment: str, component: ClusterComponent) -> dict[str, str]:
    """Return the labels of a component's pods."""
    own = {COMPONENT: component.kind, ROLE: component.role or "aggregated"} if component.is_worker else {}
    return selector_of(deployment, component) | own


def selector_of(deployment: str, component: ClusterComponent) -> dict[str, str]:
    """Return the labels that distinguish a component's pods from all others."""
    own = {POOL: component.name} if component.is_worker else {COMPONENT: component.kind}
    return ours(deployment) | own


def _reachable(deployment: Deployment, http_port: int) -> Deployment:
    """Make processes listen where other pods can reach them; the frontend's port has a default."""
    named = deployment.frontend.http_port
    port = http_port if named in (0, FrontendConfig().http_port) else named
    if port < FIRST_PORT or port == SYSTEM:
        raise ValueError(
            f"frontend.http_port is {port}; expected at least {FIRST_PORT}, because pods do not run as root, and not {SYSTEM}, "
            "which answers probes"
        )
    frontend = replace(deployment.frontend, http_host="0.0.0.0", http_port=port)  # noqa: S104 (a pod's own)
    transfer = replace(deployment.kv_transfer, transfer_host=ADDRESS)
    pools = tuple(_reading(pool) for pool in deployment.pools)
    return replace(deployment, frontend=frontend, kv_transfer=transfer, pools=pools)


def _reading(pool: Pool) -> Pool:
    """Make an engine's own server listen where workers of the other role can reach it."""
    if pool.engine == "sglang" and pool.role != "aggregated" and "host" not in pool.engine_args:
        return replace(pool, engine_args={**pool.engine_args, "host": ADDRESS})
    return pool


def _frontend(deployment: Deployment, config: ClusterConfig, parts: DeploymentParts) -> ClusterComponent:
    settings = deployment.frontend
    return ClusterComponent(
        name=names.FRONTEND,
        kind=names.FRONTEND,
        image=config.image,
        arguments=arguments_of(parts.frontend, {}),
        replicas=config.frontends,
        drain_s=settings.drain_s,
        startup_s=QUICK_S,
        ports={"http": settings.http_port},
        cpu="250m",
        memory_mib=512,
        most_memory_mib=512 + settings.http_workers * (256 + settings.max_buffered_mb),
    )


def _router(config: ClusterConfig, program: Program) -> ClusterComponent:
    return ClusterComponent(
        name=names.ROUTER,
        kind=names.ROUTER,
        image=config.image,
        arguments=arguments_of(program, {}),
        replicas=1,
        drain_s=program.settings[0].drain_s,
        startup_s=LOADING_S,  # ready once there are workers to route to
        ports={"system": SYSTEM},
        cpu="250m",
        memory_mib=256,
        most_memory_mib=1024,
    )


def _store(config: ClusterConfig, program: Program, store: KvStoreServiceConfig) -> ClusterComponent:
    listening = replace(program, settings=(replace(store, host=ADDRESS), *program.settings[1:]))
    return ClusterComponent(
        name=names.STORE,
        kind=names.STORE,
        image=config.image,
        arguments=arguments_of(listening, {}),
        replicas=1,
        drain_s=0.0,
        startup_s=QUICK_S,
        ports={"system": SYSTEM, "kv": STORE_PORT},
        cpu="250m",
        memory_mib=256,
        most_memory_mib=256 + math.ceil(store.kv_store_size * 1024),
    )


def _planner(deployment: Deployment, config: ClusterConfig) -> ClusterComponent:
    url = f"http://{deployment.name}-{names.FRONTEND}:{deployment.frontend.http_port}"
    return ClusterComponent(
        name=names.PLANNER,
        kind=names.PLANNER,
        image=config.image,
        arguments=planner_arguments(deployment=f"{FILES}/deployment.yaml", url=url),
        replicas=1,
        drain_s=0.0,
        startup_s=QUICK_S,
        ports={"system": SYSTEM},
        cpu="100m",
        memory_mib=256,
        most_memory_mib=1024,
        files=("deployment.yaml",),
    )


def _worker(deployment: Deployment, config: ClusterConfig, pool: Pool, program: Program) -> ClusterComponent:
    files = files_of(pool)
    common = ClusterComponent(
        name=pool.name,
        kind="worker",
        image=config.image,
        arguments=arguments_of(program, {path: f"{FILES}/{PurePosixPath(path).name}" for path in files}),
        replicas=pool.replicas,
        drain_s=pool.worker.drain_s,
        startup_s=QUICK_S,
        ports={"system": SYSTEM},
        cpu="100m",
        memory_mib=256,
        most_memory_mib=512,
        role=pool.role,
        files=files,
    )
    _check_files(pool)
    _check_model(pool, config)
    if not pool.runs_model:
        return replace(common, loads_model=bool(pool.worker.model_path))
    return replace(
        common,
        image=config.engine_image or config.image,
        startup_s=max(LOADING_S, deployment.planner.startup_timeout_s),
        cpu="4",
        memory_mib=16 * 1024,
        most_memory_mib=None,
        gpus=_gpus(pool),
        environment=_side_channel(pool),
        loads_model=True,
    )


def _gpus(pool: Pool) -> int:
    if not ENGINES[pool.engine].memory_argument:
        return 0
    return num_gpus(EngineChoice(pool.engine, pool.run, pool.arguments), replace(pool.worker, role=pool.role), 1)


def _side_channel(pool: Pool) -> dict[str, str]:
    """Make vLLM's decode workers fetch KV from its prefill workers at their pods' addresses."""
    return {"VLLM_NIXL_SIDE_CHANNEL_HOST": ADDRESS} if pool.engine == "vllm" and pool.role != "aggregated" else {}


def _check_own_code(deployment: Deployment) -> None:
    """Refuse classes in files: only this machine has the files."""
    modes = {"router_mode": deployment.router_mode} | {
        f"pools.{pool.name}.router_mode": pool.router_mode for pool in deployment.pools if pool.router_mode
    }
    given = modes | {"planner": deployment.planner.planner}
    files = {setting: name for setting, name in given.items() if is_own(base_and_additions(name)[0])}
    files |= {f"pools.{pool.name}.engine_file": pool.engine_name for pool in deployment.pools if pool.engine in OWN}
    for setting, name in files.items():
        raise ValueError(
            f"{setting} is {name!r}; expected a built-in one: your own files are not copied into the cluster"
        )


def _check_used(config: ClusterConfig, deployment: Deployment, *, loads_model: bool) -> None:
    """Refuse flags that change nothing."""
    runs_model = any(pool.runs_model for pool in deployment.pools)
    unused = {"engine_image": not runs_model, "model_claim": not loads_model, "hf_token_secret": not loads_model}
    for name in changed(config):
        if unused.get(name):
            raise ValueError(f"--{name.replace('_', '-')} is given, but no pool runs a model: leave it out")


def _check_files(pool: Pool) -> None:
    """Refuse files whose names a ConfigMap does not take."""
    for path in files_of(pool):
        if not FILE_NAME.fullmatch(PurePosixPath(path).name):
            raise ValueError(
                f"pools.{pool.name} uses the file {path!r}; expected a name of letters, digits, -, _ and . (at most 253 characters)"
            )


def _check_model(pool: Pool, config: ClusterConfig) -> None:
    """Refuse engines on several nodes, and models that only this machine has."""
    if pool.run.num_nodes > 1:
        raise ValueError(
            f"pools.{pool.name}.num_nodes is {pool.run.num_nodes}; expected 1: an instance on several nodes needs a LeaderWorkerSet, "
            "which is not supported yet"
        )
    for setting, path in (("model", pool.worker.model_path), ("model_config", pool.worker.model_config)):
        is_mounted = config.model_claim and (path == MODELS or path.startswith(f"{MODELS}/"))
        if path and not is_mounted and not path.startswith(SCHEME) and not is_hub_id(path):
            raise ValueError(
                f"pools.{pool.name}.{setting} is {path!r}; expected a model on the Hugging Face hub, or "
                f"--model-claim with a path below {MODELS}: pods cannot see files on this machine"
            )
