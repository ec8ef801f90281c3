"""Serve a deployment on this host until a signal arrives."""

import asyncio
import contextlib
import sys

from dynabench.deployment.description import Deployment
from dynabench.deployment.engines import refuse_idle_settings
from dynabench.deployment.processes import deployment_programs, home_of
from dynabench.live.strangers import Network, Strangers
from dynabench.planner.hands import Hands
from dynabench.planner.programs import check_planner, hands_of, has_planner, planner_program
from foundation.errors import UserError
from serving.frontend.http.listening import PortError, listen
from serving.model.watch import watch_cards
from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.ports import RuntimeUnavailableError
from serving.supervision.group import Event, GroupError, ProcessGroup, Program
from serving.supervision.log_writer import LogWriter
from serving.supervision.process import report_ready, run_process


def serve_deployment(deployment: Deployment) -> None:
    """Run the processes of a deployment until SIGINT or SIGTERM; a second signal ends them at once.

    Raises:
        UserError: a setting is wrong, the port is taken, or a process does not start.
        KeyboardInterrupt: a second signal arrived.
    """
    frontend, runtime = deployment.frontend, deployment.runtime or RuntimeConfig()
    try:
        refuse_idle_settings([deployment])
        check_planner(deployment)
        with listen(frontend.http_host, frontend.http_port) as listener:
            wanted = deployment_programs(deployment, runtime, namespace=deployment.name, descriptor=listener.fileno())
            port = listener.getsockname()[1]
            run_process(lambda stopping: _serve(deployment, runtime, wanted, port, stopping))
    except (PortError, GroupError, RuntimeUnavailableError, ValueError) as error:
        raise UserError(str(error)) from error


async def _serve(
    deployment: Deployment, runtime: RuntimeConfig, wanted: list[Program], port: int, stopping: asyncio.Event
) -> None:
    """Run the processes until the event is set, then give them time to finish."""
    log, drain_s = LogWriter(sys.stdout.fileno()), deployment.frontend.drain_s
    hands: Hands | None = None
    if has_planner(deployment):
        namespace, url = deployment.name, url_of(deployment.frontend.http_host, port)
        hands = hands_of(
            deployment, runtime, namespace=namespace, beside=wanted, say=lambda text: log.say(f"{'fleet':>10} {text}")
        )
        wanted = [*wanted, planner_program(deployment, runtime, namespace=namespace, url=url)]
    home = Network(home_of(deployment, deployment.name), runtime.place)
    strangers = Strangers(home, deployment.models, lambda text: log.say(f"{'fleet':>10} {text}"))

    def on_event(event: Event) -> None:
        strangers.on_event(event)
        if hands is not None:
            hands.on_event(event)

    try:
        async with (
            await DistributedRuntime.connect(runtime) as connected,
            ProcessGroup(restart=True, say=log.say, on_event=on_event) as group,
        ):
            await watch_cards(connected.discovery, strangers.on_card, home.namespace)
            async with hands.at_work(group, runtime) if hands else contextlib.nullcontext():
                await group.start(*wanted)
                strangers.watch(group)
                report_ready()
                await group.wait(stopping)
            log.say(f"stopping: requests in progress have {drain_s:g} s to finish; Ctrl-C again stops at once")
            await group.stop(drain_s + 5)
    finally:
        strangers.close()
        log.close()


def url_of(host: str, port: int) -> str:
    """Return an address at which this host reaches a server that listens on `host`."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 (of a frontend for all)
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"
