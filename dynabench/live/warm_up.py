"""Requests before a run that are not measured, because the first requests of each size take an engine longer."""

import asyncio
import secrets

from dynabench.arm import ClientConfig
from dynabench.deployment.description import Deployment
from dynabench.live.bodies import MeasuredServer
from dynabench.live.clients import Order, send_all
from workloads import Request, Workload
from workloads.pacing import LoadConfig

WARMUPS = 8
WARMUP_TOKENS = 8


def num_warmups(client: ClientConfig, deployment: Deployment) -> int:
    """Return the number of requests before a run: as many as set, else a few for each worker that runs a model."""
    if client.warmup_requests is not None:
        return client.warmup_requests
    return WARMUPS * deployment.num_workers if client.url is None and deployment.pools[0].runs_model else 0


async def warm_up(
    workload: Workload, target: MeasuredServer, count: int, timeout_s: float, stop: asyncio.Event
) -> None:
    """Send requests of the workload's lengths, from its shortest to its longest prompt, and discard the results."""
    ordered = sorted(workload.requests, key=lambda request: request.input_length)
    chosen = [ordered[(len(ordered) - 1) * (place + 1) // count] for place in range(count)]
    requests = [
        Request(0.0, request.input_length, min(request.output_length, WARMUP_TOKENS), (place,))
        for place, request in enumerate(chosen)
    ]
    load = LoadConfig(concurrency=max(count // 4, 1))
    whole = max(ordered[-1].input_length, 1)  # no two prompts share a block
    order = Order(Workload("warm-up", whole, requests), target, load, secrets.token_hex(8), timeout_s)
    await send_all(order, num_clients=1, stop=stop)
