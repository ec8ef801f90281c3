"""Many stand-ins in a few processes, each on a port of its own.

replica        port       KV events of rank r     side channel of rank r
0              P          E + r                   S + r
n              P + n      E + n * ranks + r       S + n * ranks + r
"""

import asyncio
import contextlib
import json
import logging
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta

from foundation.processes import num_cores
from foundation.settings import CheckedSettings, Count
from serving.model.errors import ModelError
from serving.runtime.ports import RuntimeUnavailableError
from serving.stand_in.config import KvEventsConfig, StandInConfig
from serving.stand_in.ports import check_ports, endpoint_of_replica
from serving.stand_in.server import listener_of, serve_stand_in
from serving.supervision.group import Event, ProcessGroup, ProcessReady, Program
from serving.supervision.log_writer import LogWriter
from serving.supervision.process import report_ready, run_process
from serving.worker.engine import EngineError

log = logging.getLogger(__name__)

EXPECTED = (ModelError, EngineError, RuntimeUnavailableError, ValueError, OSError)
"""What keeps a replica from starting that the user can mend."""

STOP_S = 5.0
"""How much longer a process may take to end than its requests."""

NUMBER = "{replica}"
"""Stands for a replica's number in the topic of KV events, from which routers read who publishes."""


class ReplicaError(RuntimeUnavailableError):
    """A replica that does not start; the message names it and says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasConfig(CheckedSettings):
    """How many stand-ins there are, alike in all but where they are reached."""

    replicas: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Stand-ins on consecutive ports, from --port on; whatever else has a port (KV events, side channel, admin) also gets
    one of its own in each."""

    replica_processes: Count | None = None
    """Processes that they share (default: one for each core; if one ends, it is started again)."""

    @property
    def num_processes(self) -> int:
        """Processes that they share."""
        return min(self.replicas, self.replica_processes or num_cores())


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
    check_ports(config, count)
    return [_replica(config, number) for number in range(count)]


def _replica(config: StandInConfig, number: int) -> StandInConfig:
    events, handover, admin = config.kv_events, config.kv_handover, config.admin
    if events is not None and NUMBER in events.topic:
        events = replace(events, topic=events.topic.replace(NUMBER, str(number)))
    if not number:
        return replace(config, kv_events=events)
    more = number * config.engine.dp_size
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


async def serve_replicas(config: StandInConfig, count: int, num_processes: int, stopping: asyncio.Event) -> None:
    """Serve several stand-ins until the event is set.

    Args:
        config: the settings of each; they differ only in where they are reached.
        count: how many there are.
        num_processes: how many processes they share; with one, they run in this one.
        stopping: set when the process is asked to end.

    Raises:
        PortError: a port cannot be used.
        ReplicaError: one of several does not start.
        GroupError: a process did not start.
        ModelError, EngineError: as `serve`, for one, or for the last that failed in one process.
        ValueError: as `serve`, or two replicas would be reached at one place.
    """
    configs = replicas_of(config, count)
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(listener_of(each)) for each in configs]
        if count == 1:
            await serve_stand_in(configs[0], stopping, listeners[0])
        elif num_processes == 1:
            await serve_here(configs, listeners, stopping)
        else:
            await _serve_apart(config, listeners, num_processes, stopping)


async def serve_here(
    configs: Sequence[StandInConfig], listeners: Sequence[socket.socket], stopping: asyncio.Event
) -> None:
    """Serve stand-ins in this process; one that fails once it has started leaves the others alone, unless it is the last.

    Raises:
        ReplicaError: one does not start.
        ModelError, EngineError, ValueError: as `serve`, for the last that failed.
    """
    waiting = {config.http.port for config in configs}

    def on_ready(port: int) -> None:
        waiting.discard(port)
        if not waiting:
            report_ready()

    serving = {
        asyncio.create_task(
            serve_stand_in(config, stopping, listener, partial(on_ready, config.http.port))
        ): config.http.port
        for config, listener in zip(configs, listeners, strict=True)
    }
    running = set(serving)
    try:
        while running:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if (error := task.exception()) is not None and serving[task] in waiting:
                    raise _not_started(serving[task], error)
                if not running:
                    task.result()
                elif error is not None:
                    log.error("the replica on port %d has ended: %s", serving[task], error)
    finally:
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


def _not_started(port: int, error: BaseException) -> BaseException:
    """Return the error of a replica that does not start, with its name unless it is an error of ours."""
    if not isinstance(error, EXPECTED):
        return error
    named = ReplicaError(f"the replica on port {port} does not start: {error}")
    named.__cause__ = error
    return named


async def _serve_apart(
    config: StandInConfig, listeners: Sequence[socket.socket], num_processes: int, stopping: asyncio.Event
) -> None:
    writer = LogWriter(sys.stderr.fileno())
    ready: set[str] = set()
    descriptors = [listener.fileno() for listener in listeners]

    def on_event(event: Event) -> None:
        if isinstance(event, ProcessReady) and event.name not in ready:  # one that comes back was ready before
            ready.add(event.name)
            if len(ready) == num_processes:
                report_ready()

    try:
        async with ProcessGroup(restart=True, say=writer.say, on_event=on_event) as group:
            await group.start(*programs_of(config, descriptors, num_processes))
            await group.wait(stopping)
            await group.stop(config.http.shutdown_timeout_s + STOP_S)
    finally:
        writer.close()


def programs_of(config: StandInConfig, descriptors: Sequence[int], num_processes: int) -> list[Program]:
    """Return the processes that share the replicas, of which each has a descriptor of its listener.

    They derive their settings: those of all replicas are more than Linux lets one process hand to another.
    """
    return [
        Program(
            f"replicas-{number}",
            ["-m", "serving.stand_in"],
            [config, list(range(number, len(descriptors), num_processes)), descriptors[number::num_processes]],
            file_descriptors=tuple(descriptors[number::num_processes]),
        )
        for number in range(num_processes)
    ]


def run_here(settings: str) -> None:
    """Serve what a parent process wants of this one, given as JSON."""
    common, numbers, descriptors = json.loads(settings)
    config = msgspec.convert(common, StandInConfig)
    listeners = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    run_process(lambda stopping: serve_here([_replica(config, number) for number in numbers], listeners, stopping))
