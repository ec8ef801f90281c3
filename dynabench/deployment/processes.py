"""A deployment as processes: those of this host, and those that run in a cluster."""

import socket
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from dynabench.deployment.description import ECHOES, OWN, Deployment, Pool
from foundation.errors import UserError
from serving.frontend.config import FrontendConfig
from serving.frontend.server import frontend_program, frontend_programs
from serving.kv_tiers.config import KvStoreServiceConfig
from serving.routing.service import RouterServiceConfig
from serving.runtime.address import EndpointAddress
from serving.runtime.config import RuntimeConfig
from serving.supervision.group import Program
from serving.worker.config import WorkerConfig
from serving.worker.engine import EngineError
from serving.worker.make import check_installed, make_engine
from serving.worker.programs import LightEngine, WorkerGroup, program_of, worker_programs
from serving.worker.registry import EngineChoice

STORE = "kv-store"


def deployment_programs(
    deployment: Deployment, runtime: RuntimeConfig, *, namespace: str, descriptor: int, seed: int = 0
) -> list[Program]:
    """Return the processes of a deployment, workers first.

    Args:
        deployment: the deployment.
        runtime: how the processes find each other.
        namespace: namespace of the processes.
        descriptor: the frontend's listening socket.
        seed: seed of the router's random choices.

    Raises:
        ValueError: an engine rejects its settings, or there are too few GPUs.
    """
    home = home_of(deployment, namespace)
    stores = _store(deployment, runtime)
    wanted = [_workers(deployment, pool, home, stores) for pool in deployment.pools]
    found = [*stores, *worker_programs(wanted, runtime)]
    frontend = _frontend(deployment, namespace, seed)
    if deployment.standalone_router:
        found.append(_router(deployment, namespace, runtime, seed))
    return found + frontend_programs(frontend, deployment.router, deployment.sharing, runtime, descriptor)


class DeploymentParts(NamedTuple):
    """The parts of a deployment: one process of each kind."""

    workers: dict[str, Program]
    """Workers by pool; each uses the GPUs that it sees."""
    frontend: Program
    router: Program | None
    store: Program | None


def parts_of(
    deployment: Deployment, runtime: RuntimeConfig, *, namespace: str, store: KvStoreServiceConfig | None, seed: int = 0
) -> DeploymentParts:
    """Return one process of each kind; `store` is the address at which workers reach the store.

    Raises:
        ValueError: an engine rejects its settings.
    """
    home = home_of(deployment, namespace)
    stores = [] if store is None else [_store_program(store, runtime)]
    workers = {}
    for pool in deployment.pools:
        if pool.runs_model:
            make_engine(pool.engine, replace(pool.worker, role=pool.role), pool.run, pool.arguments)
        workers[pool.name] = program_of(_workers(deployment, pool, home, stores), pool.name, runtime)
    return DeploymentParts(
        workers,
        frontend_program(_frontend(deployment, namespace, seed), deployment.router, deployment.sharing, runtime),
        _router(deployment, namespace, runtime, seed) if deployment.standalone_router else None,
        next(iter(stores), None),
    )


def home_of(deployment: Deployment, namespace: str) -> str:
    """Return the namespace of the workers."""
    return f"{namespace}-workers" if deployment.standalone_router else namespace


def pattern_of(
    deployment: Deployment, pool: Pool, runtime: RuntimeConfig, *, namespace: str, beside: list[Program]
) -> Program:
    """Return a nameless additional worker of a pool, on no GPU, that works with the processes of `programs`."""
    stores = [program for program in beside if program.name == STORE]
    workers = replace(_workers(deployment, pool, home_of(deployment, namespace), stores), count=1)
    [program] = worker_programs([workers], runtime)
    return program


def check_engines(deployment: Deployment) -> None:
    """Make sure that engines that run models are installed and accept their settings.

    Raises:
        UserError: an engine is not installed, or rejects its settings.
    """
    for pool in deployment.pools:
        if pool.runs_model:
            try:
                make_engine(pool.engine, replace(pool.worker, role=pool.role), pool.run, pool.arguments)
                check_installed(pool.engine)
            except (EngineError, ValueError) as error:
                raise UserError(str(error)) from error


def component_of(deployment: Deployment, pool: Pool) -> str:
    """Return the component of a model's workers; each model has its own, and its prefill workers have another."""
    is_prefill = pool.role == "prefill"
    if len(deployment.models) == 1:
        return "prefill" if is_prefill else "backend"
    pools = deployment.models[pool.served_name]
    return next(other.name for other in pools if (other.role == "prefill") == is_prefill)


def addresses_of(deployment: Deployment, home: str) -> set[EndpointAddress]:
    """Return the endpoints of the workers of all pools."""
    return {EndpointAddress(home, component_of(deployment, pool), "generate") for pool in deployment.pools}


def _workers(deployment: Deployment, pool: Pool, home: str, stores: list[Program]) -> WorkerGroup:
    engine, worker = _engine(deployment, pool, stores), _worker_config(deployment, pool, home)
    return WorkerGroup(pool.name, pool.replicas, engine, worker)


def _worker_config(deployment: Deployment, pool: Pool, home: str) -> WorkerConfig:
    """Return the worker settings of a pool, with the worker's address and the name of its model."""
    worker = pool.worker
    name = worker.model_name or ("" if worker.model_path else pool.served_name)
    endpoint = f"dyn://{home}.{component_of(deployment, pool)}.generate"
    return replace(worker, endpoint=endpoint, model_name=name, role=pool.role, router_mode=pool.router_mode)


def _engine(deployment: Deployment, pool: Pool, stores: list[Program]) -> EngineChoice | LightEngine:
    if pool.engine == "mocker":
        links = deployment.transfer
        transfer = replace(
            deployment.kv_transfer,
            kv_bytes_per_token=links.kv_bytes_per_token,
            transfer_bandwidth_gb_s=links.bandwidth_gb_s,
            transfer_latency_ms=links.latency_ms,
            transfer_block_us=links.block_us,
        )
        for store in stores if pool.mocker.has_host_memory else ():
            service: KvStoreServiceConfig = store.settings[0]
            transfer = replace(
                transfer,
                kv_store=f"{service.host}:{service.port}",
                kv_store_write_policy=deployment.kv_store.kv_store_write_policy,
            )
        settings = (pool.simulated, pool.answers, transfer, deployment.disaggregation.lease)
        return LightEngine("serving.mocker", settings=settings)
    if pool.engine in ECHOES:
        return LightEngine("serving.echo", words=(pool.engine.removeprefix("echo_"),))
    if pool.engine in OWN:
        file = pool.own.engine_file
        if file is None or not Path(file).is_file():
            raise ValueError(f"pools.{pool.name}.engine_file is {file!r}: there is no such file")
        return LightEngine("serving.own", words=(pool.engine, file))
    return EngineChoice(pool.engine, pool.run, pool.arguments)


def _frontend(deployment: Deployment, namespace: str, seed: int) -> FrontendConfig:
    """Return the frontend's settings; if there is a separate router, the frontend has nothing to choose."""
    mode = "round-robin" if deployment.standalone_router else deployment.router_mode
    return replace(deployment.frontend, namespace=namespace, router_mode=mode, seed=seed)


def _router(deployment: Deployment, namespace: str, runtime: RuntimeConfig, seed: int) -> Program:
    """Return a router in its own process, between the frontend and the workers."""
    service = RouterServiceConfig(
        workers=f"dyn://{home_of(deployment, namespace)}.{component_of(deployment, deployment.pools[0])}.generate",
        endpoint=f"dyn://{namespace}.router.generate",
        router_mode=deployment.router_mode,
        seed=seed,
    )
    return Program("router", ["-m", "serving.router_service"], (service, deployment.router, runtime))


def check_store(deployment: Deployment) -> None:
    """Refuse a store that no worker could use, because all KV of a store passes through host memory.

    Raises:
        ValueError: no worker has host memory.
    """
    size = deployment.kv_store.kv_store_size
    if size and not any(pool.engine == "mocker" and pool.mocker.has_host_memory for pool in deployment.pools):
        raise ValueError(
            f"kv_store_size is {size:g}, but no worker has kv_offloading_size; expected workers with host memory, "
            "because all KV "
            "of the store passes through it"
        )


def kept_gib(deployment: Deployment) -> float:
    """Return the actual size of a store (GiB), whose bytes are scaled."""
    return deployment.kv_store.kv_store_size * deployment.kv_transfer.kv_bytes_scale


def _store(deployment: Deployment, runtime: RuntimeConfig) -> list[Program]:
    """Return the store that workers share, if there is one.

    Raises:
        ValueError: no worker has host memory.
    """
    check_store(deployment)
    size = kept_gib(deployment)
    if not size:
        return []
    if runtime.discovery_backend == "memory":  # there, a program's host is its name, and its ports are its own
        return [_store_program(KvStoreServiceConfig(kv_store_size=size, host=STORE), runtime)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return [_store_program(KvStoreServiceConfig(kv_store_size=size, port=port), runtime)]


def _store_program(service: KvStoreServiceConfig, runtime: RuntimeConfig) -> Program:
    return Program(STORE, ["-m", "serving.kv_store"], (service, runtime), is_needed_by_others=True)
