"""The planner and its hands on this host, which a deployment with a planner needs besides its other processes."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from dynabench.deployment.description import Deployment
from dynabench.deployment.engines import pools_of
from dynabench.deployment.file import as_plain
from dynabench.deployment.processes import home_of, pattern_of
from dynabench.planner.facts import pool_facts
from dynabench.planner.hands import Hands
from dynabench.planner.service import PlannerServiceConfig
from serving.planner import Planner
from serving.runtime.config import RuntimeConfig
from serving.supervision.group import Program


def check_planner(deployment: Deployment) -> None:
    """Refuse a planner that cannot plan a deployment on this host.

    Raises:
        ValueError: an engine, a setting or a limit does not suit it.
    """
    if not has_planner(deployment):
        return
    name = deployment.planner.planner
    for pool in deployment.pools:
        if pool.engine != "mocker":
            raise ValueError(
                f"planner is {name!r} and pools.{pool.name}.engine is {pool.engine!r}; expected 'mocker': a planner "
                "cannot start and stop "
                "other workers yet"
            )
    # Start times are measured later.
    Planner(deployment.planner, [pool_facts(replace(pool, startup_s=0.0)) for pool in pools_of(deployment)])


def has_planner(deployment: Deployment) -> bool:
    """Return whether a planner may change the number of workers."""
    return deployment.planner.planner != "static"


def planner_program(deployment: Deployment, runtime: RuntimeConfig, *, namespace: str, url: str) -> Program:
    """Return the planner of a deployment; `url` is its frontend's."""
    home, api_key = home_of(deployment, namespace), deployment.frontend.api_key
    config = PlannerServiceConfig(namespace=namespace, home=home, url=url, api_key=api_key)
    return Program("planner", ["-m", "dynabench.planner"], (config, as_plain(deployment), runtime), is_retried=True)


def hands_of(
    deployment: Deployment,
    runtime: RuntimeConfig,
    *,
    namespace: str,
    beside: Sequence[Program],
    environment: Mapping[str, str] | None = None,
    say: Callable[[str], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Hands:
    """Return the hands, which complement the processes from `dynabench.deployment.processes.deployment_programs`.

    Without a planner they only watch. `environment` is added to each worker's own. `clock` returns the time (s) of the
    roster.
    """
    patterns: dict[str, Program] = {}
    for pool in deployment.pools if has_planner(deployment) else ():
        pattern = pattern_of(deployment, pool, runtime, namespace=namespace, beside=list(beside))
        patterns[pool.name] = replace(pattern, environment={**(environment or {}), **pattern.environment})
    return Hands(deployment, patterns, namespace=namespace, say=say, clock=clock)
