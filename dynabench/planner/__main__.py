"""Run a planner with `python -m dynabench.planner`, in a cluster or started by the parent of the workers.

A parent hands over the settings.
"""

import asyncio
import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import App, Parameter

from dynabench.deployment.description import Deployment
from dynabench.deployment.file import from_plain, read_deployment
from dynabench.deployment.processes import addresses_of, home_of
from dynabench.planner.cluster_hands import ClusterHands
from dynabench.planner.programs import check_planner, has_planner
from dynabench.planner.service import PlannerService, PlannerServiceConfig
from foundation.errors import UserError
from serving.cli.command_line import PLAIN_DEFAULTS, Verbosity, version
from serving.cli.commands import RuntimeSettings, failing_in_one_line
from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import DistributedRuntime
from serving.supervision.group import SETTINGS
from serving.supervision.logs import set_up
from serving.supervision.process import run_process

app = App(
    name="dynabench.planner",
    version=version,
    help="A planner in a Kubernetes cluster.",
    default_parameter=PLAIN_DEFAULTS,
)


def main() -> None:
    """Plan until a signal arrives."""
    if SETTINGS not in os.environ:
        command, bound, _ = app.parse_args(exit_on_error=False, print_error=False)
        command(*bound.args, **bound.kwargs)
        return
    given = json.loads(os.environ[SETTINGS])
    set_up()
    plan(
        msgspec.convert(given[0], PlannerServiceConfig),
        from_plain(given[1]),
        msgspec.convert(given[2], RuntimeConfig),
    )


@app.default
def in_a_cluster(
    *,
    hands: Literal["kubernetes"],
    deployment: Annotated[Path, Parameter(name=["--deployment", "-f"])],
    url: str = "http://127.0.0.1:8080",
    advisory: Annotated[bool, Parameter(negative=())] = False,
    runtime: RuntimeSettings | None = None,
    verbose: Verbosity = 0,
) -> None:
    """Plan the pools of a deployment whose workers are pods, until a signal arrives.

    Args:
        hands: Who starts and ends workers: Kubernetes, by the number of pods of Deployment NAME-POOL for each pool.
        deployment: The deployment (YAML), with a planner and a name.
        url: The frontend.
        advisory: Log decisions and change nothing.
        runtime: How to find the workers.
        verbose: How much to log.
    """
    set_up(verbose)
    try:
        described = read_deployment(deployment)
        if not has_planner(described):
            raise ValueError("planner.planner is 'static'; expected one that changes the number of workers")
        if advisory:
            described = replace(described, planner=replace(described.planner, advisory=True))
        check_planner(described)
    except (UserError, ValueError) as error:
        text = str(error)
        raise ValueError(text if text.startswith(str(deployment)) else f"{deployment}: {text}") from None
    name = described.name
    config = PlannerServiceConfig(
        namespace=name, home=home_of(described, name), url=url, hands="kubernetes", api_key=described.frontend.api_key
    )
    plan(config, described, runtime or described.runtime or RuntimeConfig())


def plan(config: PlannerServiceConfig, deployment: Deployment, network: RuntimeConfig) -> None:
    """Run a planner until a signal arrives.

    Raises:
        RuntimeUnavailableError: the network or the cluster is unreachable or refuses access.
        ValueError: something else already scales a pool.
    """

    async def work(stopping: asyncio.Event) -> None:
        async with await DistributedRuntime.connect(network, stopping=stopping) as runtime:
            service = PlannerService(runtime, config, deployment)
            async with hands_of(runtime, config, deployment):
                await service.run()

    run_process(work)


def hands_of(
    runtime: DistributedRuntime, config: PlannerServiceConfig, deployment: Deployment
) -> contextlib.AbstractAsyncContextManager[None]:
    """Return the work of the hands in this process: none if they are in the parent."""
    if config.hands == "parent":
        return contextlib.nullcontext()
    hands = ClusterHands(
        runtime,
        [pool.name for pool in deployment.pools],
        addresses_of(deployment, config.home),
        name=deployment.name,
        namespace=config.namespace,
        is_advisory=deployment.planner.advisory,
    )
    return hands.at_work()


if __name__ == "__main__":
    with failing_in_one_line("dynabench.planner"):
        main()
