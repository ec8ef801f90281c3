"""The stage of a rehearsal: the programs of a deployment, each on a node of its own, in one process on virtual time.

    deployment --deployment_programs--> programs --(by module)--> coroutines, each in its node's context and world

A program is what `dynabench serve` would start as a process, with the same settings. Its code is the live code; only
the network, the clocks and the randomness below it are simulated.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dynabench.deployment.description import Deployment
from dynabench.deployment.processes import deployment_programs
from dynabench.rehearsal.tcp import MemorySocket
from foundation.errors import UserError
from serving.engines.echo import Echo
from serving.engines.kv.params import RemoteKv
from serving.engines.mock.engine import Mocker
from serving.frontend.app import Frontend
from serving.frontend.models import Models
from serving.frontend.server import serve_frontend
from serving.kv_tiers.store import StoreServer, serve_store
from serving.routing.service import RouterService
from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.memory.network import Network
from serving.runtime.memory.node import Node
from serving.runtime.ports import RuntimeUnavailableError
from serving.runtime.world import SeededWorld, within
from serving.supervision.group import Program
from serving.worker.loop import run_worker

PORT = 8000
"""Where each frontend serves HTTP, at its own node."""
NAMESPACE = "rehearsal"
RESTART_S = 1.0
"""After what time a program that ended is started again (s)."""
MEMORY = RuntimeConfig(discovery_backend="memory", etcd_endpoints="", nats_server="")


@dataclass(slots=True)
class Actor:
    """A program that runs, or ran."""

    program: Program
    node: Node
    world: SeededWorld
    stopping: asyncio.Event
    task: asyncio.Task[None] = field(init=False)
    models: Models | None = None
    """Of a frontend: its models, once it has begun."""
    handlers: Frontend | None = None
    """Of a frontend: its handlers, once it serves."""
    engine: Mocker | None = None
    """Of a worker: its engine."""
    store: StoreServer | None = None
    """Of a store for KV: what it has."""


def names_of(deployment: Deployment) -> tuple[list[str], list[str]]:
    """Return the names of a deployment's workers, and of its other programs.

    Raises:
        UserError: one of them cannot run in virtual time.
    """
    stage = Stage(deployment, 0, Network(random.Random(0)))
    return stage.workers, [name for name in stage.programs if name not in stage.workers]


class Stage:
    """See the module. It begins empty; `start` starts every program."""

    def __init__(self, deployment: Deployment, seed: int, network: Network) -> None:
        """Prepare the programs.

        Raises:
            UserError: one of them cannot run in virtual time.
        """
        self.network, self._seed = network, seed
        found = deployment_programs(deployment, MEMORY, namespace=NAMESPACE, descriptor=0, seed=seed)
        self.programs = {program.name: program for program in found}
        for program in found:
            _main_of(program)
        self.actors: dict[str, Actor] = {}
        """The last of each program."""
        self.killed_s: dict[Node, float] = {}
        """When programs were killed, by the loop's clock."""
        self._incarnations: dict[str, int] = {}

    @property
    def frontends(self) -> list[str]:
        """The names of the frontends."""
        return [name for name, program in self.programs.items() if _module(program) == "serving.frontend"]

    @property
    def routers(self) -> list[str]:
        """The names of the routers that are programs of their own."""
        return [name for name, program in self.programs.items() if _module(program) == "serving.router_service"]

    @property
    def workers(self) -> list[str]:
        """The names of the workers."""
        return [name for name, program in self.programs.items() if _module(program) in ENGINES]

    def start(self, *names: str) -> None:
        """Start programs (default: all)."""
        for name in names or self.programs:
            program = self.programs[name]
            number = self._incarnations[name] = self._incarnations.get(name, -1) + 1
            node, world = self.network.node(name), SeededWorld(self._seed, f"{name} {number}")
            actor = self.actors[name] = Actor(program, node, world, asyncio.Event())
            with within(world):
                actor.task = asyncio.create_task(_main_of(program)(actor), context=node.context(), name=name)
            actor.task.add_done_callback(partial(self._supervise, actor), context=Context())

    def kill(self, name: str, *, is_lost: bool = False) -> None:
        """End a program as the kernel does, or with its whole machine."""
        node = self.actors[name].node
        self.killed_s[node] = asyncio.get_running_loop().time()
        self.network.kill(node, is_lost=is_lost)

    def stop(self, name: str) -> None:
        """Ask a program to end."""
        actor = self.actors[name]
        actor.node.context().run(actor.stopping.set)

    def start_again(self, actor: Actor) -> None:
        """Start a program that ended, as its supervisor does: if it still runs, it is killed first."""
        name = actor.program.name
        if self.actors[name] is not actor:
            return  # it has been started again
        if not actor.node.is_dead:
            self.kill(name)
        self.start(name)

    def _supervise(self, actor: Actor, task: asyncio.Task[None]) -> None:
        """Start a program again that ended because something it needs was away."""
        if not task.cancelled() and isinstance(task.exception(), RuntimeUnavailableError):
            self.kill(actor.program.name)
            asyncio.get_running_loop().call_later(RESTART_S, self.start_again, actor, context=Context())

    def owner_of(self, kv: RemoteKv) -> Actor | None:
        """Return the worker that keeps KV for another, if it runs."""
        for actor in self.running(self.workers):
            if actor.engine is not None and actor.engine.offers(kv):
                return actor
        return None

    def failures(self) -> Iterator[tuple[str, BaseException]]:
        """Yield the programs that ended by an error of their own."""
        for name, actor in self.actors.items():
            task = actor.task
            error = task.exception() if task.done() and not task.cancelled() else None
            if error is not None and not isinstance(error, RuntimeUnavailableError):  # then it is started again
                yield name, error

    def running(self, names: list[str]) -> Iterator[Actor]:
        """Yield the programs of these names that run."""
        for name in names:
            actor = self.actors.get(name)
            if actor is not None and not actor.node.is_dead and not actor.task.done():
                yield actor


Main = Callable[[Actor], Coroutine[Any, Any, None]]


async def _frontend(actor: Actor) -> None:
    config, router, disaggregation, network = actor.program.settings
    async with await DistributedRuntime.connect(network, stopping=actor.stopping) as runtime:
        models = Models(runtime, config, router, disaggregation)
        actor.models = models
        listener: Any = MemorySocket(actor.program.name, PORT)

        def see(handlers: Frontend) -> None:
            actor.handlers = handlers

        await serve_frontend(runtime, config, models, listener, see=see)


async def _mocker(actor: Actor) -> None:
    worker, simulated, answers, transfer, lease, network = actor.program.settings
    actor.engine = Mocker(worker, simulated.config, simulated.timing, answers=answers, transfer=transfer, lease=lease)
    await run_worker(network, worker, actor.engine, actor.stopping, default_name="mock")


async def _echo(actor: Actor) -> None:
    worker, network = actor.program.settings
    kind: Any = actor.program.arguments[2]
    await run_worker(network, worker, Echo(kind), actor.stopping)


async def _router(actor: Actor) -> None:
    service, router, network = actor.program.settings
    async with await DistributedRuntime.connect(network, drain_s=service.drain_s, stopping=actor.stopping) as runtime:
        await RouterService(runtime, service, router).run()


async def _store(actor: Actor) -> None:
    store, network = actor.program.settings
    async with await DistributedRuntime.connect(network, stopping=actor.stopping) as runtime:

        def see(server: StoreServer) -> None:
            actor.store = server

        token = await runtime.cluster_token()
        await serve_store(store, token, actor.stopping, on_ready=lambda: None, see=see)


ENGINES: dict[str, Main] = {"serving.mocker": _mocker, "serving.echo": _echo}
MAINS: dict[str, Main] = {
    **ENGINES,
    "serving.frontend": _frontend,
    "serving.router_service": _router,
    "serving.kv_store": _store,
}
"""What runs in virtual time, by the module that its process would run."""


def _module(program: Program) -> str:
    return program.arguments[1]


def _main_of(program: Program) -> Main:
    """Return what a program does.

    Raises:
        UserError: it cannot run in virtual time.
    """
    module = _module(program)
    if module not in MAINS:
        raise UserError(
            f"{program.name} ({module}) cannot be rehearsed: it is not only our own code; expected mockers, echo engines, "
            "frontends, a router and a KV store"
        )
    return MAINS[module]
