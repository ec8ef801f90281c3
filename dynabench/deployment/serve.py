"""A deployment served on this host until a signal comes."""

import asyncio
import sys

import uvloop

from dynabench.deployment.description import Deployment
from dynabench.deployment.processes import programs
from foundation.errors import UserError
from serving.frontend.server import PortError, listen
from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import stop_on_signals
from serving.supervision.group import Group, GroupError, Program
from serving.supervision.log_writer import LogWriter


def serve(deployment: Deployment) -> None:
    """Run the processes of a deployment until SIGINT or SIGTERM; a second one ends them at once.

    Raises:
        UserError: a setting is wrong, the port is taken, or a process does not start.
        KeyboardInterrupt: a second signal came.
    """
    frontend, runtime = deployment.frontend, deployment.runtime or RuntimeConfig()
    try:
        with listen(frontend.http_host, frontend.http_port) as listener:
            wanted = programs(deployment, runtime, namespace=deployment.name, descriptor=listener.fileno())
            was_cut_short = uvloop.run(_serve(wanted, frontend.drain_s))
    except (PortError, GroupError, ValueError) as error:
        raise UserError(str(error)) from error
    if was_cut_short:
        raise KeyboardInterrupt


async def _serve(wanted: list[Program], drain_s: float) -> bool:
    """Run the processes until a signal comes; return whether a second one cut their end short."""
    stopping, hurry = asyncio.Event(), asyncio.Event()
    stop_on_signals(stopping, again=hurry.set)
    log = LogWriter(sys.stdout.fileno())
    group = Group(restart=True, say=log.say)
    try:
        for program in wanted:
            await group.start(program)
        await group.wait(stopping)
        log.say(f"stopping: requests in progress have {drain_s:g} s to finish; Ctrl-C again stops at once")
    finally:
        await group.stop(drain_s + 5 if stopping.is_set() else 0, hurry=hurry)
        log.close()
    return hurry.is_set()
