"""`dynabench serve`: a frontend, perhaps a router of its own, and workers as one supervised group."""

import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, Literal, get_type_hints

import msgspec

from dynabench.errors import UserError
from mocker import EngineConfig
from serving.frontend.config import FrontendConfig
from serving.frontend.server import PortError, listen
from serving.frontend.server import programs as frontend_programs
from serving.router import RouterConfig
from serving.routing.service import RouterServiceConfig
from serving.runtime.config import RuntimeConfig
from serving.supervision.group import Group, GroupError, Program
from serving.supervision.log_writer import LogWriter
from serving.supervision.process import run
from serving.worker.config import ModelRunConfig, WorkerConfig
from serving.worker.devices import Allotment, allot, describe, this_host
from serving.worker.registry import ENGINES, EngineChoice


class GraphError(UserError):
    """A graph that cannot be started."""


class WorkerGroup(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Workers that are alike."""

    count: int = 1
    engine: Literal["mocker", "echo_core", "echo_full", "mistralrs", "llamacpp", "vllm", "sglang", "trtllm"] = "mocker"
    component: str = "backend"
    worker: dict[str, Any] = {}
    """`WorkerConfig` but for the endpoint."""
    engine_args: dict[str, Any] = {}
    """`EngineConfig` for the mocker; for engines that run models, arguments of their own."""
    run: dict[str, Any] = {}
    """`ModelRunConfig`, for engines that run models."""


class Graph(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What to start. Each part holds the settings of the same name."""

    namespace: str = "dynamo"
    frontend: dict[str, Any] = {}
    router: dict[str, Any] = {}
    standalone_router: bool = False
    """Put the router into a process of its own."""
    runtime: dict[str, Any] = {}
    workers: list[WorkerGroup] = []


def read(path: Path) -> Graph:
    """Read a graph from a YAML file.

    Raises:
        GraphError: it cannot be read, or something in it is not understood.
    """
    import yaml

    try:
        graph: Graph = msgspec.convert(yaml.safe_load(path.read_text()), Graph)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise GraphError(f"{path}: {' '.join(str(error).split())}") from error
    if not graph.workers:
        raise GraphError(f"{path}: workers is empty; at least one entry was expected")
    return graph


def settings(values: dict[str, Any], kind: Any, where: str) -> Any:
    """Make settings of a part of a graph.

    Raises:
        GraphError: there is no such setting, or its value is wrong.
    """
    names = {field.name for field in dataclasses.fields(kind)}
    if unknown := sorted(set(values) - names):
        raise GraphError(f"{where}: unknown {', '.join(unknown)}; expected some of {', '.join(sorted(names))}")
    try:
        kinds = get_type_hints(kind, include_extras=True)  # inherited ones, too
        given = {name: msgspec.convert(value, kinds[name], dec_hook=_decode) for name, value in values.items()}
        return kind(**given)
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        raise GraphError(f"{where}: {error}") from error


def _decode(kind: type, value: Any) -> Any:
    """Make what msgspec does not know (paths) of a value."""
    return kind(value)


def programs(graph: Graph, frontend: FrontendConfig, descriptor: int) -> list[Program]:
    """Return the processes of a graph, workers first.

    Raises:
        GraphError: a setting is wrong.
    """
    runtime = settings(graph.runtime, RuntimeConfig, "runtime")
    router = settings(graph.router, RouterConfig, "router")
    home = f"{graph.namespace}-workers" if graph.standalone_router else graph.namespace
    allotments = iter(_allot(graph))
    found = []
    parts: tuple[Any, ...]
    for place, group in enumerate(graph.workers):
        where = f"workers[{place}]"
        if group.count < 1:
            raise GraphError(f"{where}: count must be at least 1, not {group.count}")
        worker = settings(group.worker, WorkerConfig, f"{where}.worker")
        endpoint = f"dyn://{home}.{group.component}.generate"
        worker = dataclasses.replace(worker, endpoint=endpoint)
        names = [f"{group.component}-{number}" for number in range(group.count)]
        if group.engine in ENGINES:
            for name, (choice, environment, *_) in zip(names, allotments, strict=False):
                parts = (worker, choice.run, runtime, list(choice.arguments))
                found.append(Program(name, ["-m", choice.module], parts, environment))
            continue
        if group.engine == "mocker":
            engine = settings(group.engine_args, EngineConfig, f"{where}.engine_args")
            arguments, parts = ["-m", "serving.mocker"], (worker, engine, runtime)
        elif group.engine_args:
            raise GraphError(f"{where}: {group.engine} has no engine_args")
        else:
            arguments, parts = ["-m", "serving.echo", group.engine.removeprefix("echo_")], (worker, runtime)
        found += [Program(name, arguments, parts) for name in names]
    if graph.standalone_router:
        if len({group.component for group in graph.workers}) > 1:
            raise GraphError("a router of its own serves one component; these workers have several")
        service = RouterServiceConfig(
            workers=f"dyn://{home}.{graph.workers[0].component}.generate",
            endpoint=f"dyn://{graph.namespace}.router.generate",
            router_mode=frontend.router_mode,
            seed=frontend.seed,
        )
        found.append(Program("router", ["-m", "serving.router_service"], (service, router, runtime)))
        frontend = dataclasses.replace(frontend, router_mode="round-robin")
    frontend = dataclasses.replace(frontend, namespace=graph.namespace)
    found += frontend_programs(frontend, router, runtime, descriptor)
    names = [program.name for program in found]
    if len(set(names)) < len(names):
        raise GraphError("two groups of workers have the same component; give each its own")
    return found


def _allot(graph: Graph) -> list[Allotment]:
    """Divide this host among the graph's engines that run models, in their order.

    Raises:
        GraphError: a setting is wrong, or there are too few GPUs.
    """
    wanted = []
    for place, group in enumerate(graph.workers):
        where = f"workers[{place}]"
        if group.engine in ENGINES:
            flags = [f"--{name}={json.dumps(value)}" for name, value in group.engine_args.items()]
            choice = EngineChoice(group.engine, settings(group.run, ModelRunConfig, f"{where}.run"), flags)
            worker = settings(group.worker, WorkerConfig, f"{where}.worker")
            wanted += [(choice, worker)] * group.count
    try:
        allotments = allot(wanted, this_host())
    except ValueError as error:
        raise GraphError(f"workers: {error}") from error
    for line in describe(allotments):
        print(line, flush=True)
    return allotments


def serve(graph: Graph) -> None:
    """Run a graph until SIGINT or SIGTERM; a second one ends it at once.

    Raises:
        GraphError: a setting is wrong, the port is taken, or a process does not start.
        KeyboardInterrupt: a second signal came.
    """
    frontend: FrontendConfig = settings(graph.frontend, FrontendConfig, "frontend")
    try:
        listener = listen(frontend.http_host, frontend.http_port)
    except PortError as error:
        raise GraphError(str(error)) from error
    with listener:
        try:
            wanted = programs(graph, frontend, listener.fileno())
            run(lambda stopping: _serve(wanted, frontend.drain_s, stopping))
        except GroupError as error:
            raise GraphError(str(error)) from error


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
