"""Do the two simulations agree? One run with the live code on virtual time, beside the same run in `dynabench simulate`.

    rehearsed(run, workload)                  the load generator measures a stage
    simulate(run, workload)                   the fast simulation (dynabench/virtual/run.py)
    differences(rehearsed, simulated)         what is not the same, column by column

Nothing fails, and the network takes no time. So whatever differs is a defect of one of the two, or something that only
one of them models (docs/rehearsal.md).
"""

import asyncio
import random
from typing import Any, NamedTuple

import numpy as np

from dynabench.arm import Run
from dynabench.deployment.description import Deployment
from dynabench.live.bodies import MeasuredServer
from dynabench.live.clients import Order, send_all
from dynabench.live.fleet import num_ranks_of, offset_of
from dynabench.live.run import on_this_host, serving_adapters
from dynabench.rehearsal.stage.stage import UP_S, Stage
from dynabench.rehearsal.virtual_time.loop import run as run_virtually
from dynabench.rehearsal.virtual_time.tcp import PORT
from reports.record.records import Ints, Record, Requests
from serving.runtime.memory.network import Network
from serving.runtime.world import SeededWorld, within
from workloads import Workload

APART_S = 0.01
"""Between the starts of two programs (s), so that workers register in order, and have the numbers that they have in the
other simulation."""
TIMEOUT_S = 1e6
"""After what time a request counts as failed (s): later than any is answered."""

TOLERANCE_S = 2e-6
"""Times that differ by less are equal: the live code reports its stages in whole microseconds."""
COMPARED = (
    *("intended_s", "sent_s", "admitted_s", "transfer_end_s", "first_token_s", "second_token_s", "last_token_s"),
    *("worker", "prefill_worker", "cached_tokens", "host_tokens", "disk_tokens", "predicted_tokens", "best_tokens"),
    *("queue_depth", "isl", "osl", "finish_reason"),
)
"""Columns of `Requests` that both simulations know."""


class Difference(NamedTuple):
    """A column in which some requests differ."""

    column: str
    num_requests: int
    """How many requests differ."""
    request: int
    """The first of them."""
    rehearsed: Any
    """Its value there; None if unknown."""
    simulated: Any
    largest: float
    """The largest difference, of numbers that both know; else 0."""

    def __str__(self) -> str:
        """Return it as a sentence."""
        first = f"the first is request {self.request}: {self.rehearsed} rehearsed, {self.simulated} simulated"
        return f"{self.column} differs in {self.num_requests} requests by up to {self.largest:g}; {first}"


def rehearsed(run: Run, workload: Workload) -> Record:
    """Carry out a run with the live code on virtual time, and return what the load generator measured.

    Raises:
        UserError: a program of the deployment cannot run in virtual time.
        WorkloadError: the workload asks for adapters that the engines cannot have.
        VirtualLoopError: the programs wait for each other, or never come to rest.
    """
    return run_virtually(_measured(serving_adapters(on_this_host(run), workload), workload))


async def _measured(run: Run, workload: Workload) -> Record:
    deployment, network = run.deployment, Network(random.Random(f"network {run.seed}"))
    stage = Stage(deployment, run.seed, network)
    for name in stage.programs:
        stage.start(name)
        await asyncio.sleep(APART_S)
    await asyncio.sleep(UP_S)
    order = Order(workload, _target(stage, deployment), run.settings.load, "", TIMEOUT_S)
    with within(SeededWorld(run.seed, "client")):
        sending = send_all(order, num_clients=1, stop=asyncio.Event())
        sent = await asyncio.create_task(sending, context=network.node("client").context())
    num_workers = sum(map(num_ranks_of, deployment.pools))
    return Record(run.arm.name, sent.requests, sent.gaps, 0.0, num_workers, repeat=run.repeat, is_live=True)


def _target(stage: Stage, deployment: Deployment) -> MeasuredServer:
    url, model = f"http://{stage.frontends[0]}:{PORT}", deployment.pools[0].served_name
    return MeasuredServer(url, model, is_ours=True, num_prefill_workers=offset_of(deployment))


def differences(rehearsed: Requests, simulated: Requests) -> list[Difference]:
    """Return the columns in which two records of the same requests differ.

    Of requests that failed in both, nothing else is compared; a column that one of the two lacks is not, either.
    """
    both = rehearsed.succeeded & simulated.succeeded
    found = [_difference("succeeded", rehearsed.request, rehearsed.succeeded, simulated.succeeded)]
    for column in COMPARED:
        ours, theirs = (getattr(requests, column)[both] for requests in (rehearsed, simulated))
        found.append(_difference(column, rehearsed.request[both], ours, theirs))
    return [one for one in found if one is not None]


def _difference(column: str, numbers: Ints, ours: Any, theirs: Any) -> Difference | None:
    """Return how two columns of the same requests differ, None if they do not."""
    is_unknown = np.ma.getmaskarray(ours), np.ma.getmaskarray(theirs)
    if any(mask.all() for mask in is_unknown):
        return None
    ours, theirs = np.ma.getdata(ours), np.ma.getdata(theirs)
    are_known, gaps = ~is_unknown[0] & ~is_unknown[1], np.zeros(len(numbers))
    if ours.dtype.kind in "bif":
        gaps = np.where(are_known, np.abs(ours.astype(float) - theirs.astype(float)), 0.0)
        differ = gaps > TOLERANCE_S
    else:
        differ = are_known & (ours != theirs)
    places = np.flatnonzero(differ | (is_unknown[0] != is_unknown[1]))
    if not len(places):
        return None
    first = int(places[0])
    rehearsed, simulated = (
        None if mask[first] else values[first] for mask, values in zip(is_unknown, (ours, theirs), strict=True)
    )
    return Difference(column, len(places), int(numbers[first]), rehearsed, simulated, float(gaps.max()))
