"""What a simulation derives from a deployment: routers, delays and sizes, as means over its workers where these differ."""

from collections.abc import Sequence
from dataclasses import replace

from dynabench.arm import Run
from dynabench.deployment.description import Deployment
from dynabench.deployment.overhead import Overhead, overhead_of
from mocker.tiers.config import HostMemory
from mocker.timing.choose import SimulatedEngine
from mocker.timing.kv_size import KvSize, kv_size_of
from serving.engines.mock.costs import step_costs_of
from serving.model.card import Role
from serving.router import Router, RouterConfig, StepCosts, choices_of


def router_of(run: Run, engines: Sequence[SimulatedEngine], role: Role) -> Router:
    """Return the router over the workers of a role; each role has its own seed."""
    deployment = run.deployment
    pairs = [pair for pair in zip(engines, deployment.worker_pools, strict=True) if pair[1].role == role]
    of_role = [engine for engine, _ in pairs]
    ports = [deployment.transfer.gpu_bandwidth * pool.timing.tensor_parallel_size for _, pool in pairs]
    return Router(
        deployment.mode_of(role),
        with_load_costs(with_step_costs(deployment.router, of_role), of_role, ports),
        block_size=of_role[0].config.block_size,
        rng=choices_of(role, run.seed),
        closed_events=True,
        stage=role,
        follows_events=deployment.sharing.conditional_disagg != "never",
    )


def read_kv_size(deployment: Deployment) -> KvSize | None:
    """Return the size of the KV that workers read from each other, None if they never do."""
    if not (deployment.is_disaggregated or deployment.fleet.drain_policy == "hand-over"):
        return None
    reader = next(pool for pool in deployment.pools if pool.role != "prefill")
    return kv_size_of(
        reader.timing,
        block_size=reader.engine_config.block_size,
        kv_bytes_per_token=deployment.transfer.kv_bytes_per_token,
    )


def with_step_costs(router: RouterConfig, engines: Sequence[SimulatedEngine]) -> RouterConfig:
    """Set the step costs for the predicting modes that the user has not set: the mean over the workers."""
    rows = {engine: step_costs_of(engine) for engine in set(engines)}
    means = [_mean(column) for column in zip(*(rows[engine] for engine in engines), strict=True)]
    base, prefill, sequence, context, budget = means
    return router.with_costs(StepCosts(base, prefill, sequence, context, round(budget)))


def with_load_costs(router: RouterConfig, engines: Sequence[SimulatedEngine], ports: Sequence[float]) -> RouterConfig:
    """Set the KV load times that the user has not set: the mean over the workers that have them.

    Args:
        router: the user's settings.
        engines: the workers' engines.
        ports: the receive bandwidth of each rank (bytes/s).
    """
    rows: dict[str, list[float]] = {}
    for engine, port in zip(engines, ports, strict=True):
        if engine.host is not None:
            for name, load_us in _load_costs(engine.host, engine.config.block_size, port).items():
                rows.setdefault(name, []).append(load_us)
    return replace(router, **{name: _mean(row) for name, row in rows.items() if getattr(router, name) is None})  # type: ignore[arg-type]


def _load_costs(host: HostMemory, block_size: int, port: float) -> dict[str, float]:
    """Return the load time of a token's KV from each tier of a worker (us); lower tiers load through host memory."""
    token_us = host.chunk_bytes / (host.blocks_per_chunk * block_size) * 1e6
    found = {"host_load_us_per_token": token_us / host.bandwidth}
    for tier in host.tiers:
        name, bandwidth = ("shared", min(tier.bandwidth, port)) if tier.name == "store" else ("disk", tier.bandwidth)
        found[f"{name}_load_us_per_token"] = token_us / bandwidth + found["host_load_us_per_token"]
    return found


def mean_overhead(deployment: Deployment) -> Overhead:
    """Return the delays between a client and the engines: the mean over the workers if pools differ."""
    each = [overhead_of(deployment.overhead, pool.timing) for pool in deployment.pools for _ in range(pool.replicas)]
    return Overhead(*(_mean(values) for values in zip(*each, strict=True)))


def _mean(values: Sequence[float]) -> float:
    """Return the mean, exactly if all values are equal."""
    return values[0] if len(set(values)) == 1 else sum(values) / len(values)
