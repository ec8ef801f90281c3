"""Do the two simulations agree? A deployment as live code on virtual time, measured by the load generator.

    record = await measured(run, workload)     as `dynabench run` does, but on virtual time
    simulate(run, workload)                    as `dynabench simulate` does
    differences(rehearsed, simulated)          request by request

Nothing fails, and the network takes no time, so whatever differs is a defect of one of the two, or an overhead that only
the live code has (docs/rehearsal.md).
"""

import asyncio
import random

from dynabench.arm import Run
from dynabench.live.bodies import MeasuredServer
from dynabench.live.clients import Order, send_all
from dynabench.rehearsal.loop import run as run_virtually
from dynabench.rehearsal.stage import PORT, Stage
from reports.record.records import Record
from serving.runtime.memory.network import Network
from serving.runtime.world import SeededWorld, within
from workloads import Workload

UP_S = 5.0
"""Within this time after the start every worker is known (s)."""
TIMEOUT_S = 1e6
"""No request is given up."""


def rehearsed(run: Run, workload: Workload) -> Record:
    """Carry out one run on virtual time with the live code, and return what its clients measured."""
    return run_virtually(_measured(run, workload))


async def _measured(run: Run, workload: Workload) -> Record:
    network = Network(random.Random(f"network {run.seed}"))
    stage = Stage(run.deployment, run.seed, network)
    for name in stage.programs:  # in order, so that workers have the same numbers as in the other simulation
        stage.start(name)
        await asyncio.sleep(UP_S)
    target = MeasuredServer(
        f"http://{stage.frontends[0]}:{PORT}", run.deployment.pools[0].served_name, is_ours=True
    )
    order = Order(workload, target, run.settings.load, "", TIMEOUT_S)
    with within(SeededWorld(run.seed, "client")):
        client = network.node("client")
        sending = asyncio.create_task(send_all(order, num_clients=1, stop=asyncio.Event()), context=client.context())
        sent = await sending
    return Record(run.arm.name, sent.requests, sent.gaps, 0.0, run.deployment.num_workers, is_live=True)
