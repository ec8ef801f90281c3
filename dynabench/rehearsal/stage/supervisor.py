"""The supervisor of a rehearsal: what `dynabench serve` does for its processes, as a program on the stage.

    ProcessGroup --launch--> Stage        the live group: it starts programs, restarts those that end, and asks some to end
    Hands        ----------> ProcessGroup the live hands: they start and end workers as the planner orders

Only the processes are simulated: each takes a while to start, and signals and exit codes are the stage's.
"""

import asyncio
import contextlib
import math
import signal
from collections.abc import Callable, Iterator
from contextvars import copy_context
from typing import NamedTuple

from dynabench.deployment.description import Deployment
from dynabench.planner.hands import Hands
from dynabench.planner.programs import hands_of, has_planner
from dynabench.rehearsal.stage.stage import MEMORY, NAMESPACE, SUPERVISOR, Actor, Stage
from serving.runtime.world import SeededWorld, within, world
from serving.supervision.group import Event, ProcessGroup, ProcessReady, Program

LAUNCH_S = (0.5, 2.0)
"""How long a process takes to start (s)."""


class Worker(NamedTuple):
    """A worker as its supervisor sees it."""

    name: str
    actor: Actor
    """Its process, or the last that it had."""
    up_since_s: float
    """When it first was ready (s, by the loop's clock); infinity: it never was."""
    is_leaving: bool
    """Whether it was asked to end, for good."""


class SimulatedProcess:
    """A program on the stage as its parent sees it."""

    pid = 0
    log = None
    last_line = ""

    def __init__(self, stage: Stage, program: Program, takes_s: float) -> None:
        """Start it."""
        self._on_ready: Callable[[str], object] = lambda _: None
        self._stage, self._parent = stage, copy_context()
        self.is_ready = False
        self.actor = stage.launch(program, takes_s=takes_s, on_ready=self._hear)

    @property
    def process(self) -> "SimulatedProcess":
        """See `Started`."""
        return self

    @property
    def returncode(self) -> int | None:
        """See `Process`."""
        return self.actor.code

    @property
    def cause(self) -> str:
        """See `Started`."""
        return f"ended with code {self.returncode}"

    async def wait(self) -> int:
        """See `Process`."""
        await self.actor.ended.wait()
        assert self.actor.code is not None
        return self.actor.code

    def send_signal(self, number: int) -> None:
        """See `Process`."""
        self._stage.signal(self.actor, number)

    def kill(self) -> None:
        """See `Process`."""
        self._stage.signal(self.actor, signal.SIGKILL)

    def listen(self, on_ready: Callable[[str], None]) -> None:
        """See `Started`."""
        self._on_ready = on_ready

    def close(self) -> None:
        """See `Started`."""

    def _hear(self, known_as: str) -> None:
        """Take its report, in the parent's context."""
        self.is_ready = True
        asyncio.get_running_loop().call_soon(self._on_ready, known_as, context=self._parent)


class Supervisor:
    """See the module."""

    def __init__(self, stage: Stage, deployment: Deployment) -> None:
        """Prepare; nothing runs yet."""
        self._stage = stage
        self._pools = [pool.name for pool in deployment.pools]
        self.hands: Hands | None = None
        """The planner's hands, if there is a planner."""
        if has_planner(deployment):
            loop, beside = asyncio.get_running_loop(), list(stage.programs.values())
            self.hands = hands_of(deployment, MEMORY, namespace=NAMESPACE, beside=beside, clock=loop.time)
        self._group = ProcessGroup(restart=True, on_event=self._on_event, launch=self._launch)
        self._up_since_s: dict[str, float] = {}

    def begin(self, seed: int) -> asyncio.Task[None]:
        """Start every program of the stage, in a process of its own; return the work of the supervisor."""
        node = self._stage.network.node(SUPERVISOR)
        with within(SeededWorld(seed, SUPERVISOR)):
            return asyncio.create_task(self._run(), context=node.context(), name=SUPERVISOR)

    def workers(self, pool: str) -> Iterator[Worker]:
        """Yield the workers of a pool: those that run, start, start again, or leave."""
        for program in self._group._keepers.values():
            name = program.name
            if name.rpartition("-")[0] == pool:
                leaving = self._group._leaving[name].is_set()
                yield Worker(name, self._stage.actors[name], self._up_since_s.get(name, math.inf), leaving)

    async def _run(self) -> None:
        async with self.hands.at_work(self._group, MEMORY) if self.hands else contextlib.nullcontext():
            await self._group.start(*self._stage.programs.values())
            await self._group.wait(asyncio.Event())

    async def _launch(self, program: Program, _: bool) -> SimulatedProcess:
        return SimulatedProcess(self._stage, program, world().entropy.uniform(*LAUNCH_S))

    def _on_event(self, event: Event) -> None:
        if isinstance(event, ProcessReady):
            self._up_since_s.setdefault(event.name, asyncio.get_running_loop().time())
        if self.hands is not None:
            self.hands.on_event(event)
