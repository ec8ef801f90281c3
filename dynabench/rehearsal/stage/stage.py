"""The stage of a rehearsal: the programs of a deployment, each on a node of its own, in one process on virtual time.

    deployment --deployment_programs--> programs --(by module)--> coroutines, each in its node's context and world

A program is what `dynabench serve` would start as a process, with the same settings. Its code is the live code; only
the network, the clocks and the randomness below it are simulated.
"""

import asyncio
import random
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dynabench.deployment.description import Deployment
from dynabench.deployment.file import from_plain
from dynabench.deployment.processes import deployment_programs
from dynabench.planner.programs import check_planner, has_planner, planner_program
from dynabench.planner.service import PlannerService
from dynabench.rehearsal.stage.own import own_engine
from dynabench.rehearsal.stage.story import NotedService, Story, Stretch
from dynabench.rehearsal.virtual_time.tcp import PORT, MemoryConnector, MemorySocket
from foundation.errors import UserError
from serving.engines.echo import Echo
from serving.engines.kv.params import RemoteKv
from serving.engines.mock.engine import Mocker
from serving.frontend.app import Frontend
from serving.frontend.models import Models
from serving.frontend.server import GROUP, serve_frontend
from serving.kv_tiers.store import StoreServer, serve_store
from serving.routing.service import RouterService
from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.memory.network import Network
from serving.runtime.memory.node import Node
from serving.runtime.ports import RuntimeUnavailableError
from serving.runtime.stopping import until_stopped
from serving.runtime.world import SeededWorld, within
from serving.supervision.group import Program
from serving.supervision.process import PARENT, report_ready
from serving.worker.config import WorkerConfig
from serving.worker.loop import run_worker

NAMESPACE = "rehearsal"
PLANNER = "planner"
"""The name of the planner."""
SUPERVISOR = "supervisor"
"""The name of who starts the programs."""
MORE = 3
"""How many of the workers that a planner adds to a pool may be hit by faults."""
KILLED = -signal.SIGKILL
HANGS_S = 0.1
"""How often a worker whose start hangs looks whether it may go on (s)."""
UP_S = 5.0
"""Within this time after the last start every worker is known (s)."""
MEMORY = RuntimeConfig(discovery_backend="memory", etcd_endpoints="", nats_server="")


@dataclass(slots=True)
class Actor:
    """A program that runs, or ran."""

    program: Program
    node: Node
    world: SeededWorld
    stopping: asyncio.Event
    story: Story
    life: Stretch
    """When it runs."""
    task: asyncio.Task[None] = field(init=False)
    code: int | None = None
    """The exit code that its parent sees, negative if a signal ended it; None before."""
    asked_s: float | None = None
    """When it was first asked to end (s, by the loop's clock)."""
    is_restarting: bool = False
    """Whether a fault has asked it to end."""
    is_harmed: bool = False
    """Whether a fault ended it, or is the reason why it ended at once."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once its parent sees its end."""
    models: Models | None = None
    """Of a frontend: its models, once it has begun."""
    handlers: Frontend | None = None
    """Of a frontend: its handlers, once it serves."""
    router: RouterService | None = None
    """Of a router that is a program of its own: its service, once it has begun."""
    engine: Mocker | None = None
    """Of a worker: its engine, unless it is one that cannot be looked into."""
    service: NotedService | None = None
    """Of a worker: what it serves, once it has begun."""
    store: StoreServer | None = None
    """Of a store for KV: what it has."""
    planner: PlannerService | None = None
    """Of a planner: its service, once it is connected."""
    spoiled: list[str] = field(default_factory=list)
    """Of a worker: the KV that it used although its bytes were wrong."""

    def see_kv(self, found: memoryview, wanted: bytes) -> None:
        """Compare KV that is used with what it should be."""
        if found != wanted:
            wrong = sum(one != other for one, other in zip(found, wanted, strict=True))
            self.spoiled.append(f"{wrong} of {len(wanted)} bytes")


def names_of(deployment: Deployment) -> tuple[list[str], list[str]]:
    """Return the names of a deployment's workers, those that a planner may add included, and of its other programs.

    Raises:
        UserError: one of them cannot run in virtual time.
    """
    stage = Stage(deployment, 0, Network(random.Random(0)))
    workers, others = stage.workers, [name for name in stage.programs if name not in stage.workers]
    if not has_planner(deployment):
        return workers, others
    more = [f"{pool.name}-{pool.replicas + number}" for pool in deployment.pools for number in range(MORE)]
    return [*workers, *more], [*others, SUPERVISOR]


class Stage:
    """See the module. It begins empty; `start` starts every program."""

    def __init__(
        self, deployment: Deployment, seed: int, network: Network, story: Story | None = None, *, own_engine: str = ""
    ) -> None:
        """Prepare the programs.

        Args:
            deployment: the deployment.
            seed: of everything random.
            network: on which they run.
            story: is told what happens.
            own_engine: `pystr:FILE` or `pytok:FILE`, which each worker runs instead of its engine.

        Raises:
            UserError: one of them cannot run in virtual time.
        """
        check_planner(deployment)
        self._own = own_engine
        self.network, self.story, self._seed = network, story or Story(), seed
        with within(SeededWorld(seed, "programs")):
            found = deployment_programs(deployment, MEMORY, namespace=NAMESPACE, descriptor=0, seed=seed)
        if has_planner(deployment):
            found.append(planner_program(deployment, MEMORY, namespace=NAMESPACE, url=f"http://frontend:{PORT}"))
        self.programs = {program.name: program for program in found}
        """Those of the deployment, and those that the planner started, whether or not they run."""
        for program in found:
            _main_of(program)
        self.actors: dict[str, Actor] = {}
        """The last of each program."""
        self.failures: list[str] = []
        """Which programs ended by an error of their own, or unasked, and how."""
        self.killed_s: dict[Node, float] = {}
        """When programs were killed, by the loop's clock."""
        self.on_end: Callable[[Actor], object] = lambda _: None
        """Is called when a program's code has ended, and before its parent ends it at once."""
        self.bad_starts = set[str]()
        """What happens to workers that start now: `start-fails`, `start-hangs`."""
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
        """Start programs at once, without a parent."""
        for name in names:
            self.launch(self.programs[name])

    def launch(
        self, program: Program, *, takes_s: float = 0.0, on_ready: Callable[[str], object] = lambda _: None
    ) -> Actor:
        """Start a program.

        Args:
            program: the program; it need not be the deployment's.
            takes_s: how long its process takes until its own code runs (s).
            on_ready: is called with the name by which others know it once it is ready.
        """
        name = program.name
        self.programs[name] = program
        number = self._incarnations[name] = self._incarnations.get(name, -1) + 1
        node, world = self.network.node(name), SeededWorld(self._seed, f"{name} {number}")
        life = self.story.live(name)
        actor = self.actors[name] = Actor(program, node, world, asyncio.Event(), self.story, life)
        with within(world):
            context = node.context()
            context.run(PARENT.set, on_ready)
            actor.task = asyncio.create_task(self._process(actor, takes_s), context=context, name=name)
        actor.task.add_done_callback(partial(self._on_done, actor), context=Context())
        return actor

    def _main(self, actor: Actor) -> Coroutine[Any, Any, None]:
        """Return what a program does."""
        if self._own and _module(actor.program) in ENGINES:
            return _own(actor, self._own)
        return _main_of(actor.program)(actor)

    def kill(self, name: str, *, is_lost: bool = False) -> None:
        """Let a fault end a program, as the kernel does, or with its whole machine; then its parent sees it later."""
        actor = self.actors[name]
        actor.is_harmed = True
        self._kill(actor, is_lost=is_lost)

    def signal(self, actor: Actor, number: int) -> None:
        """Send a signal to a program: SIGTERM asks it to end, SIGINT after that ends it at once."""
        if actor.code is not None or actor.node.is_dead:
            return
        is_asked = actor.asked_s is not None
        if not is_asked:
            actor.asked_s = asyncio.get_running_loop().time()
        if number == signal.SIGKILL:
            self.on_end(actor)
            self._kill(actor)
        elif is_asked:
            actor.is_harmed |= actor.is_restarting  # its parent could not know that it had been asked
            self.on_end(actor)
            asyncio.get_running_loop().call_soon(actor.task.cancel, context=actor.node.context())
        else:
            actor.node.context().run(actor.stopping.set)

    def owner_of(self, kv: RemoteKv) -> Actor | None:
        """Return the worker that keeps KV for another, if it runs."""
        for actor in self.running(self.workers):
            if actor.engine is not None and actor.engine.offers(kv):
                return actor
        return None

    def _kill(self, actor: Actor, *, is_lost: bool = False) -> None:
        now = asyncio.get_running_loop().time()
        actor.life.end(now)
        if not actor.node.is_dead:
            self.killed_s[actor.node] = now
            self.network.kill(actor.node, is_lost=is_lost)
        if not is_lost:
            _end(actor, KILLED)

    def restart(self, actor: Actor) -> None:
        """Let a fault ask a program to end, unless its parent has."""
        if actor.asked_s is None:
            actor.is_restarting = True
            self.signal(actor, signal.SIGTERM)

    def see_end(self, actor: Actor) -> None:
        """Let the parent of a program see its end; if it still runs, it is killed."""
        if actor.code is None:
            actor.is_harmed = True
            self._kill(actor)

    async def _process(self, actor: Actor, takes_s: float) -> None:
        """Run a program's process; one that is asked to end before its own code runs does so at once."""
        is_worker = _module(actor.program) in ENGINES
        await until_stopped(actor.stopping, asyncio.sleep(takes_s))
        if is_worker and "start-fails" in self.bad_starts:
            raise RuntimeUnavailableError("a fault ended it as it started")
        while is_worker and "start-hangs" in self.bad_starts and not actor.stopping.is_set():
            await until_stopped(actor.stopping, asyncio.sleep(HANGS_S))
        if not actor.stopping.is_set():
            await self._main(actor)

    def _on_done(self, actor: Actor, task: asyncio.Task[None]) -> None:
        """Let a process end whose code has."""
        actor.life.end(asyncio.get_running_loop().time())
        error = None if task.cancelled() else task.exception()
        name, is_asked = actor.program.name, actor.stopping.is_set() or task.cancelled() or actor.node.is_dead
        if error is None and not is_asked:
            self.failures.append(f"{name} ended unasked, without an error")
        elif error is not None and not isinstance(error, RuntimeUnavailableError):  # what it needs was away
            self.failures.append(f"{name} ended: {error!r:.300}")
        self.on_end(actor)
        if not actor.node.is_dead:
            self.network.kill(actor.node)
        _end(actor, 1 if task.cancelled() or error is not None else 0)

    def running(self, names: list[str]) -> Iterator[Actor]:
        """Yield the programs of these names that run."""
        for name in names:
            actor = self.actors.get(name)
            if actor is not None and not actor.node.is_dead and not actor.task.done():
                yield actor


def _end(actor: Actor, code: int) -> None:
    if actor.code is None:
        actor.code = code
        actor.ended.set()


Main = Callable[[Actor], Coroutine[Any, Any, None]]


async def _frontend(actor: Actor) -> None:
    config, router, disaggregation, network = actor.program.settings
    async with await DistributedRuntime.connect(network, stopping=actor.stopping) as runtime:
        models = Models(runtime, config, router, disaggregation)
        actor.models = models
        listener: Any = MemorySocket(actor.program.name, PORT)

        def see(handlers: Frontend) -> None:
            actor.handlers = handlers

        group = actor.program.environment.get(GROUP, "")
        await serve_frontend(runtime, config, models, listener, group=group, see=see)


async def _mocker(actor: Actor) -> None:
    worker, simulated, answers, transfer, lease, network = actor.program.settings
    actor.engine = Mocker(worker, simulated.config, simulated.timing, answers=answers, transfer=transfer, lease=lease)
    actor.engine.on_used = actor.see_kv
    await _work(actor, network, worker, actor.engine, "mock")


async def _echo(actor: Actor) -> None:
    worker, network = actor.program.settings
    kind: Any = actor.program.arguments[2]
    await _work(actor, network, worker, Echo(kind))


async def _own(actor: Actor, engine: str) -> None:
    worker, network = actor.program.settings[0], actor.program.settings[-1]
    await _work(actor, network, worker, own_engine(engine, worker))


async def _work(
    actor: Actor, network: RuntimeConfig, worker: WorkerConfig, engine: Any, default_name: str = ""
) -> None:
    """Serve an engine, and note which requests it has when."""
    engine.service = actor.service = NotedService(engine.service, actor.program.name, actor.story)
    await run_worker(network, worker, engine, actor.stopping, default_name=default_name)


async def _router(actor: Actor) -> None:
    service, router, network = actor.program.settings
    async with await DistributedRuntime.connect(network, drain_s=service.drain_s, stopping=actor.stopping) as runtime:
        actor.router = RouterService(runtime, service, router)
        await actor.router.run()


async def _store(actor: Actor) -> None:
    store, network = actor.program.settings
    async with await DistributedRuntime.connect(network, stopping=actor.stopping) as runtime:

        def see(server: StoreServer) -> None:
            actor.store = server

        token = await runtime.cluster_token()
        await serve_store(store, token, actor.stopping, on_ready=report_ready, see=see)


async def _planner(actor: Actor) -> None:
    config, plain, network = actor.program.settings
    async with await DistributedRuntime.connect(network, stopping=actor.stopping) as runtime:
        actor.planner = PlannerService(runtime, config, from_plain(plain))
        await actor.planner.run(MemoryConnector(actor.node.network))


ENGINES: dict[str, Main] = {"serving.mocker": _mocker, "serving.echo": _echo}
MAINS: dict[str, Main] = {
    **ENGINES,
    "serving.frontend": _frontend,
    "serving.router_service": _router,
    "serving.kv_store": _store,
    "dynabench.planner": _planner,
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
            "frontends, a router, a KV store and a planner"
        )
    return MAINS[module]
