"""Client processes: one in this process, or several with a common schedule whose records are merged."""

import asyncio
import contextlib
import dataclasses
import math
import multiprocessing
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import uvloop

from dynabench.interrupt import InterruptError, held_back
from dynabench.live.bodies import MeasuredServer
from dynabench.live.enough import Enough
from dynabench.live.http_client import clock
from dynabench.live.load import LoadGenerator, client_facts
from dynabench.live.timeline import Stats, requests_of
from foundation.errors import UserError
from foundation.open_files import room_for
from reports.record.records import Requests
from workloads import Workload
from workloads.pacing import LoadConfig
from workloads.workload import select

STATS_S = 0.25
STOP_S = 0.1
READY_S = 60.0
OTHER_FILES = 128
"""Files that a client has open beside its connections: modules, pipes, results."""
AT_ONCE = ("concurrency", "max_concurrency", "session_concurrency")
"""Limits of a load on what is in flight."""
MOST_CONNECTIONS = 1 << 16
"""Connections of a client whose load sets no limit: more than one address can have to a server."""


class ClientRecords(NamedTuple):
    """The measurements of the clients."""

    requests: Requests
    gaps: np.ndarray
    facts: dict[str, float]


class Order(NamedTuple):
    """The task of a client."""

    workload: Workload
    target: MeasuredServer
    load: LoadConfig
    salt: str
    timeout_s: float
    enough: Enough | None = None
    """When to send nothing more (None: when all is sent)."""
    most_connections: int | None = None
    """How many each client may have open at once; what would need another fails (None: no limit)."""


async def send_all(
    order: Order,
    *,
    num_clients: int,
    stop: asyncio.Event,
    on_stats: Callable[[Stats], None] | None = None,
    start: float | None = None,
) -> ClientRecords:
    """Send a workload from one or several processes; end early once `stop` is set.

    With one process, `start` is time 0 of the workload on the clock of `time.perf_counter` (None: immediately).

    Raises:
        UserError: a client may not open as many connections as the load needs.
    """
    order = order._replace(most_connections=_make_room(order, num_clients))
    if num_clients == 1:
        return await _send(order, start, stop, on_stats)
    if order.enough is not None:  # clients that end at different times would change the load
        load = dataclasses.replace(order.load, measure_s=order.enough.least_s)
        order = order._replace(load=load, enough=Enough(math.inf, 0.0, order.enough.ends_at))
    shards = shares(order.workload, num_clients)
    async with _clients([_part(order, shards, place) for place in range(len(shards))]) as connections:
        for connection in connections:
            await asyncio.wait_for(asyncio.to_thread(connection.recv), READY_S)
        start = clock() + 0.3
        for connection in connections:
            connection.send(start)
        stats: dict[int, Stats] = {}

        def take(place: int, news: Stats) -> None:
            stats[place] = news
            if on_stats is not None:
                on_stats(_merged_stats(list(stats.values())))

        parts = await asyncio.gather(
            *(_follow(connection, place, stop, take) for place, connection in enumerate(connections))
        )
    return _merged(parts, shards)


def _make_room(order: Order, num_clients: int) -> int | None:
    """Let each client open as many connections as it needs; return the most it may open if an open loop may need more.

    Raises:
        UserError: it may not.
    """
    load = order.load
    name, at_once = next(((name, value) for name in AT_ONCE if (value := getattr(load, name))), ("", None))
    each = -(-len(order.workload) // num_clients)
    needed = min(-(-at_once // num_clients) if at_once else MOST_CONNECTIONS, each) + OTHER_FILES
    limit = room_for(needed)
    if limit < needed and at_once:
        setting = f"--{name.replace('_', '-')}"
        enough = -(-(needed - OTHER_FILES) * num_clients // max(limit - OTHER_FILES, 1))
        raise UserError(
            f"{setting} {at_once} needs {needed:,} open files in each of {num_clients} client processes, but the hard limit "
            f"is {limit:,}; raise it (ulimit -Hn {needed}; of a container, --ulimit nofile={needed}), or use --clients {enough}"
        )
    has_room = limit >= needed and each <= MOST_CONNECTIONS
    return None if at_once or has_room else limit - OTHER_FILES


@contextlib.asynccontextmanager
async def _clients(orders: list[Order]) -> AsyncIterator[list[Connection]]:
    """Start a client process for each order; yield the connections to them, and end them afterwards."""
    context = multiprocessing.get_context("spawn")
    connections: list[Connection] = []
    processes = []
    try:
        for order in orders:
            ours, theirs = context.Pipe()
            process = context.Process(target=_client, args=(theirs, order), daemon=True)
            with held_back():
                process.start()
            theirs.close()
            connections.append(ours)
            processes.append(process)
        yield connections
    finally:
        for connection in connections:
            connection.close()
        for process in processes:
            await asyncio.to_thread(process.join, 5)
            if process.is_alive():
                process.kill()


def _part(order: Order, shards: list[list[int]], place: int) -> Order:
    """Return the task of one of several clients."""
    part = dataclasses.replace(order.workload, requests=select(order.workload.requests, shards[place]))
    return order._replace(workload=part, load=_share_load(order.load, place, len(shards)))


def shares(workload: Workload, count: int) -> list[list[int]]:
    """Divide a workload's requests; requests of a session, and requests that depend on each other, stay together."""
    parent = list(range(len(workload)))

    def root(number: int) -> int:
        while parent[number] != number:
            parent[number] = number = parent[parent[number]]
        return number

    of_session: dict[str, int] = {}
    for number, request in enumerate(workload):
        for other in request.after:
            parent[root(number)] = root(other)
        if request.session:
            parent[root(number)] = root(of_session.setdefault(request.session, number))
    groups: dict[int, list[int]] = {}
    for number in range(len(workload)):
        groups.setdefault(root(number), []).append(number)
    result: list[list[int]] = [[] for _ in range(min(count, len(groups)))]
    for place, group in enumerate(groups.values()):
        result[place % len(result)] += group
    return [sorted(numbers) for numbers in result]


async def _send(
    order: Order, start: float | None, stop: asyncio.Event, on_stats: Callable[[Stats], None] | None
) -> ClientRecords:
    generator = LoadGenerator(
        order.workload,
        target=order.target,
        load=order.load,
        salt=order.salt,
        timeout_s=order.timeout_s,
        start=start,
        enough=order.enough,
        most_connections=order.most_connections,
    )

    async def tell() -> None:
        while on_stats is not None:
            await asyncio.sleep(STATS_S)
            on_stats(generator.stats())

    telling = asyncio.create_task(tell())
    try:
        timeline = await generator.run(stop)
    finally:
        telling.cancel()
    if on_stats is not None:
        on_stats(generator.stats())
    requests = requests_of(timeline, order.workload, generator.load)
    return ClientRecords(requests, np.array(timeline.gaps).reshape(-1, 5), client_facts(generator))


def _client(connection: Connection, order: Order) -> None:
    """Run a client process: report that it is ready, receive the start time, report progress, send the measurements."""
    try:
        connection.send("ready")
        start = connection.recv()
    except (EOFError, ConnectionError):  # our parent was interrupted, or is gone
        return

    async def run() -> ClientRecords:
        stop = asyncio.Event()
        waiting = asyncio.create_task(_wait_for_stop(connection, stop))
        try:
            return await _send(order, start, stop, connection.send)
        finally:
            waiting.cancel()

    with contextlib.suppress(BrokenPipeError):
        connection.send(uvloop.run(run()))


async def _wait_for_stop(connection: Connection, stop: asyncio.Event) -> None:
    """Wait until our parent says "stop", or is gone.

    The loop cannot watch the connection: it would no longer block, and then takes no more than fits its buffer.
    """
    while not connection.poll():
        await asyncio.sleep(STOP_S)
    with contextlib.suppress(EOFError, OSError):
        connection.recv()  # a socket that is closed with something unread is reset, whatever was sent before
    stop.set()


async def _follow(
    connection: Connection, place: int, stop: asyncio.Event, take: Callable[[int, Stats], None]
) -> ClientRecords:
    """Wait for a client's measurements, and pass on its progress."""
    stopping = asyncio.create_task(_tell_stop(connection, stop))
    try:
        while True:
            message: Any = await asyncio.to_thread(connection.recv)
            if isinstance(message, ClientRecords):
                return message
            take(place, message)
    except (EOFError, ConnectionError) as error:
        if stop.is_set():
            raise InterruptError from error
        raise RuntimeError(f"client process {place} ended without reporting a result") from error
    finally:
        stopping.cancel()


async def _tell_stop(connection: Connection, stop: asyncio.Event) -> None:
    await stop.wait()
    with contextlib.suppress(OSError):
        connection.send("stop")


def _share_load(load: LoadConfig, place: int, count: int) -> LoadConfig:
    """Give a client its share of the limits."""
    changes = {}
    for name in AT_ONCE:
        value = getattr(load, name)
        if value is not None:
            changes[name] = max(value // count + (place < value % count), 1)
    return dataclasses.replace(load, **changes)


def _merged(parts: list[ClientRecords], shards: list[list[int]]) -> ClientRecords:
    requests = Requests.concatenate(
        [
            part.requests.replace(request=np.array(numbers)[part.requests.request])
            for part, numbers in zip(parts, shards, strict=True)
        ]
    )
    facts = {name: sum(part.facts[name] for part in parts) for name in parts[0].facts}
    facts["cpu_share"] = max(part.facts["cpu_share"] for part in parts)
    return ClientRecords(requests[np.argsort(requests.request)], np.concatenate([part.gaps for part in parts]), facts)


def _merged_stats(parts: list[Stats]) -> Stats:
    workers: dict[int, int] = {}
    for part in parts:
        for worker, count in part.workers.items():
            workers[worker] = workers.get(worker, 0) + count

    def worst(values: list[tuple[float, float] | None]) -> tuple[float, float] | None:
        known = [value for value in values if value is not None]
        return (max(v[0] for v in known), max(v[1] for v in known)) if known else None

    return Stats(
        max(part.now_s for part in parts),
        sum(part.num_sent for part in parts),
        sum(part.num_ended for part in parts),
        sum(part.num_failed for part in parts),
        sum(part.num_tokens for part in parts),
        worst([part.ttft_ms for part in parts]),
        worst([part.tpot_ms for part in parts]),
        dict(sorted(workers.items())),
    )
