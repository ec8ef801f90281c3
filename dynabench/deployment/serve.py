"""A deployment served on this host until a signal comes."""

import asyncio
import sys

from dynabench.deployment.description import Deployment
from dynabench.deployment.engines import refuse_idle_settings
from dynabench.deployment.processes import programs
from foundation.errors import UserError
from serving.frontend.server import PortError, listen
from serving.runtime.config import RuntimeConfig
from serving.supervision.group import Group, GroupError, Program
from serving.supervision.log_writer import LogWriter
from serving.supervision.process import run


def serve(deployment: Deployment) -> None:
    """Run the processes of a deployment until SIGINT or SIGTERM; a second one ends them at once.

    Raises:
        UserError: a setting is wrong, the port is taken, or a process does not start.
        KeyboardInterrupt: a second signal came.
    """
    frontend, runtime = deployment.frontend, deployment.runtime or RuntimeConfig()
    try:
        refuse_idle_settings([deployment])
        with listen(frontend.http_host, frontend.http_port) as listener:
            wanted = programs(deployment, runtime, namespace=deployment.name, descriptor=listener.fileno())
            run(lambda stopping: _serve(wanted, frontend.drain_s, stopping))
    except (PortError, GroupError, ValueError) as error:
        raise UserError(str(error)) from error


async def _serve(wanted: list[Program], drain_s: float, stopping: asyncio.Event) -> None:
    """Run the processes until the event is set, then give them time to finish."""
    log = LogWriter(sys.stdout.fileno())
    try:
        async with Group(restart=True, say=log.say) as group:
            await group.start(*wanted)
            await group.wait(stopping)
            log.say(f"stopping: requests in progress have {drain_s:g} s to finish; Ctrl-C again stops at once")
            await group.stop(drain_s + 5)
    finally:
        log.close()
