"""What checks look at in programs: instances, requests, routings and limits."""

import asyncio
import math
from collections.abc import Iterator

from dynabench.rehearsal.stage.stage import PLANNER, Actor, Stage
from serving.engines.mock.live import live_of
from serving.engines.mock.rank import MockEngine
from serving.life.flight import Flight
from serving.routing.live import LiveRouting
from serving.runtime.address import INSTANCES, Instance


def known_instances(stage: Stage) -> dict[int, str]:
    """Return the programs that discovery knows, by the ids of their instances."""
    return {
        instance.instance_id: instance.transport.removeprefix("memory:").partition("/")[0]
        for key, entry in stage.network.discovery.keys.items()
        if key.startswith(INSTANCES)
        for instance in [Instance.parse(key, entry.value)]
    }


def num_asked(stage: Stage) -> int:
    """Return how many requests for its metrics a planner may have at a frontend; they are open there like others."""
    return int(PLANNER in stage.programs)


def flights(frontend: Actor) -> Iterator[Flight]:
    """Yield the requests that a frontend answers."""
    for response in () if frontend.handlers is None else frontend.handlers.answering._responses:
        yield from (choice.attempts.flight for choice in response._accepted.choices)


def requests_at(worker: Actor) -> Iterator[str]:
    """Yield the requests at which a worker's engine works."""
    for rank in () if worker.engine is None else worker.engine.ranks:
        yield from (live_of(sequence).request_id for sequence in rank.engine.sequences())


def waits_for_work(worker: Actor) -> Iterator[str]:
    """Yield the requests that a worker has while its engine works; an engine that cannot be looked into always does."""
    if worker.service is not None and (worker.engine is None or any(map(_works, worker.engine.ranks))):
        yield from worker.service.here


def _works(rank: MockEngine) -> bool:
    """Return whether a rank computes, or copies KV to or from its GPU."""
    return rank.engine.step is not None or asyncio.get_running_loop().time() < rank.engine.wake_s < math.inf


def limits_of(stage: Stage) -> dict[str, int]:
    """Return how many requests each frontend may have in progress."""
    return {name: stage.programs[name].settings[0].max_inflight_requests for name in stage.frontends}


def routings(actor: Actor) -> Iterator[LiveRouting]:
    """Yield the routings of a frontend, or that of a router that is a program of its own."""
    for pool in actor.models.pools() if actor.models is not None else ():
        if pool.routing is not None:
            yield pool.routing
    if actor.router is not None and actor.router._routing is not None:
        yield actor.router._routing
