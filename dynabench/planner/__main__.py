"""`python -m dynabench.planner`: a planner, started by the parent of the workers, which hands it its settings."""

import asyncio
import json
import os

import msgspec

from dynabench.deployment.file import from_plain
from dynabench.planner.service import PlannerService, PlannerServiceConfig
from serving.cli.commands import failing_in_one_line
from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import DistributedRuntime
from serving.supervision.group import SETTINGS
from serving.supervision.logs import set_up
from serving.supervision.process import run


def main() -> None:
    """Plan until a signal comes."""
    if SETTINGS not in os.environ:
        raise ValueError("a planner is started by dynabench serve or dynabench run with --planner")
    given = json.loads(os.environ[SETTINGS])
    config = msgspec.convert(given[0], PlannerServiceConfig)
    deployment = from_plain(given[1])
    network = msgspec.convert(given[2], RuntimeConfig)
    set_up()

    async def plan(stopping: asyncio.Event) -> None:
        async with await DistributedRuntime.connect(network, stopping=stopping) as runtime:
            await PlannerService(runtime, config, deployment).run()

    run(plan)


if __name__ == "__main__":
    with failing_in_one_line("dynabench.planner"):
        main()
