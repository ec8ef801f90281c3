"""Many stand-ins in a few processes, each on a port of its own.

replica        port       KV events of rank r     side channel of rank r
0              P          E + r                   S + r
n              P + n      E + n * ranks + r       S + n * ranks + r
"""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import logging
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from foundation.settings import Count, check
from serving.stand_in.config import KvEventsConfig, StandInConfig
from serving.stand_in.server import listener_of, serve
from serving.stand_in.vllm.kv_events.endpoints import endpoint_of_replica
from serving.supervision.group import Event, Group, Program
from serving.supervision.log_writer import LogWriter
from serving.supervision.process import report_ready, run

log = logging.getLogger(__name__)

STOP_S = 5.0
"""How much longer a process may take to end than its requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasConfig:
    """How many stand-ins there are, alike in all but where they are reached."""

    replicas: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Stand-ins on consecutive ports, from --port on; whatever else has a port (KV events, side channel, admin) also gets
    one of its own in each."""

    replica_processes: Count | None = None
    """Processes that they share (default: one for each core; if one ends, it is started again)."""

    def __post_init__(self) -> None:
        """Reject invalid values."""
        check(self)

    @property
    def num_processes(self) -> int:
        """Processes that they share."""
        return min(self.replicas, self.replica_processes or _num_cores())


def replicas_of(config: StandInConfig, count: int) -> list[StandInConfig]:
    """Return the settings of each of several stand-ins that differ only in where they are reached.

    Raises:
        ValueError: they would be reached at one place.
    """
    if count > 1 and config.http.uds:
        raise ValueError(
            f"uds is {config.http.uds} and there are {count} replicas; expected ports: give --port instead"
        )
    if count > 1 and not config.http.port:
        raise ValueError(f"port is 0 and there are {count} replicas; expected the first of {count} ports")
    if config.http.port + count - 1 > 65535:
        raise ValueError(
            f"port {config.http.port} leaves no room for {count} replicas; expected at most {65536 - count}"
        )
    return [_replica(config, number) for number in range(count)]


def _replica(config: StandInConfig, number: int) -> StandInConfig:
    if not number:
        return config
    more = number * config.engine.dp_size
    events, handover, admin = config.kv_events, config.kv_handover, config.admin
    return replace(
        config,
        http=replace(config.http, port=config.http.port + number),
        kv_events=None if events is None else _moved(events, more),
        kv_handover=None
        if handover is None
        else replace(handover, side_channel_port=handover.side_channel_port + more, engine_id=None),
        faults=replace(config.faults, seed=config.faults.seed + number),
        admin=None if admin is None else replace(admin, port=admin.port + number if admin.port else 0),
    )


def _moved(events: KvEventsConfig, more: int) -> KvEventsConfig:
    """Return where the events of another replica are published."""
    replay = events.replay_endpoint
    return replace(
        events,
        endpoint=endpoint_of_replica(events.endpoint, more),
        replay_endpoint=None if replay is None else endpoint_of_replica(replay, more),
    )


async def serve_replicas(configs: Sequence[StandInConfig], num_processes: int, stopping: asyncio.Event) -> None:
    """Serve several stand-ins until the event is set.

    Args:
        configs: the settings of each.
        num_processes: how many processes they share; with one, they run in this one.
        stopping: set when the process is asked to end.

    Raises:
        PortError: a port cannot be used.
        GroupError: a process did not start.
        ModelError, EngineError, ValueError: as `serve`, if there is one process.
    """
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(listener_of(config)) for config in configs]
        if num_processes == 1:
            await serve_here(configs, listeners, stopping)
        else:
            await _serve_apart(configs, listeners, num_processes, stopping)


async def serve_here(
    configs: Sequence[StandInConfig], listeners: Sequence[socket.socket], stopping: asyncio.Event
) -> None:
    """Serve stand-ins in this process; one that fails leaves the others alone, unless it is the last.

    Raises:
        ModelError, EngineError, ValueError: as `serve`, for the last that failed.
    """
    waiting = itertools.count(len(configs) - 1, -1)

    def on_ready() -> None:
        if not next(waiting):
            report_ready()

    serving = [
        asyncio.create_task(serve(config, stopping, listener, on_ready), name=str(config.http.port))
        for config, listener in zip(configs, listeners, strict=True)
    ]
    running = set(serving)
    try:
        while running:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not running:
                    task.result()
                elif (error := task.exception()) is not None:
                    log.error("the replica on port %s has ended: %s", task.get_name(), error)
    finally:
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


async def _serve_apart(
    configs: Sequence[StandInConfig], listeners: Sequence[socket.socket], num_processes: int, stopping: asyncio.Event
) -> None:
    writer = LogWriter(sys.stderr.fileno())
    ready: set[str] = set()
    wanted = [
        _program(number, configs[number::num_processes], listeners[number::num_processes])
        for number in range(num_processes)
    ]

    def on_event(event: Event) -> None:
        ready.add(event.name)
        if len(ready) == num_processes:
            report_ready()

    try:
        async with Group(restart=True, say=writer.say, on_event=on_event) as group:
            await group.start(*wanted)
            await group.wait(stopping)
            await group.stop(max(config.http.shutdown_timeout_s for config in configs) + STOP_S)
    finally:
        writer.close()


def _program(number: int, configs: Sequence[StandInConfig], listeners: Sequence[socket.socket]) -> Program:
    descriptors = [listener.fileno() for listener in listeners]
    settings: list[Any] = [[dataclasses.asdict(config) for config in configs], descriptors]
    return Program(f"replicas-{number}", ["-m", "serving.stand_in"], settings, file_descriptors=tuple(descriptors))


def run_here(settings: str) -> None:
    """Serve what a parent process wants of this one, given as JSON."""
    parts, descriptors = json.loads(settings)
    configs = msgspec.convert(parts, list[StandInConfig])
    listeners = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    run(lambda stopping: serve_here(configs, listeners, stopping))


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
