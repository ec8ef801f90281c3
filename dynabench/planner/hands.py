"""A planner's hands on this host: they start and end workers as the planner orders, and report the workers.

They decide nothing. Orders remain in force after they disappear, so a planner that dies or hangs changes nothing.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from itertools import takewhile

import msgspec

from dynabench.deployment.description import Deployment
from dynabench.planner.history import fleet_use
from dynabench.planner.messages import Orders, fleets, orders
from dynabench.planner.roster import PoolOfWorkers, Roster
from reports.record.fleet import FleetUse
from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.ports import RuntimeUnavailableError
from serving.runtime.stopping import cancel_all
from serving.supervision.group import Event, ProcessEnded, ProcessGroup, ProcessReady, Program

AGAIN_S = 1.0
"""Delay before a failed report is tried again."""

LATE_S = 5.0
"""How much longer than its drain time a worker may take to end."""


class Hands:
    """Starts and ends the workers of one deployment as the planner with the highest term orders, and keeps a roster."""

    def __init__(
        self,
        deployment: Deployment,
        patterns: Mapping[str, Program],
        *,
        namespace: str,
        say: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.roster = Roster([PoolOfWorkers(pool.name, pool.role, pool.gpus_per_worker) for pool in deployment.pools])
        self._planner = deployment.planner.planner
        self._patterns = patterns
        """The program of a worker of each pool, without its name."""
        self._patience_s = {pool.name: pool.worker.drain_s + LATE_S for pool in deployment.pools}
        self._namespace = namespace
        self._say = say or (lambda _: None)
        self._clock = clock
        self._orders: dict[str, Orders] = {}
        self._last: dict[int, Orders] = {}
        """The last orders of each planner, by its term."""
        self._news = asyncio.Event()
        self._ending: set[asyncio.Task[None]] = set()
        self._trouble = ""
        self.error: BaseException | None = None
        """Why orders are no longer carried out."""
        for pool in deployment.pools:
            for _ in range(pool.replicas):
                self.roster.begin(clock(), pool.name)

    def on_event(self, event: Event) -> None:
        """Note a change of a process of the group."""
        now = self._clock()
        match event:
            case ProcessReady(name, known_as):
                self.roster.on_ready(now, name, known_as)
            case ProcessEnded(name, was_ready, is_kept):
                self.roster.on_ended(now, name, was_ready=was_ready, is_kept=is_kept)
        self._news.set()

    @contextlib.asynccontextmanager
    async def at_work(self, group: ProcessGroup, network: RuntimeConfig) -> AsyncIterator[None]:
        """Obey until the block ends; workers that are draining continue after it.

        Raises:
            RuntimeUnavailableError: the network cannot be joined.
        """
        async with await DistributedRuntime.connect(network) as runtime:
            await runtime.discovery.watch(orders(self._namespace), self._on_orders)
            await self._report(runtime)
            obeying = asyncio.create_task(self._obey_forever(group, runtime))
            obeying.add_done_callback(self._on_end)
            try:
                yield
            finally:
                await cancel_all(obeying, *self._ending)

    def fleet_use(self, start_s: float, end_s: float) -> FleetUse:
        """Return how the workers changed in an interval, in seconds since its start."""
        return fleet_use(self.roster, self._planner, list(self._last.values()), start_s=start_s, end_s=end_s)

    def _on_orders(self, key: str, value: bytes | None) -> None:
        if value is None:
            self._orders.pop(key, None)
        else:
            self._orders[key] = msgspec.json.decode(value, type=Orders)
        self._news.set()

    async def _obey_forever(self, group: ProcessGroup, runtime: DistributedRuntime) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            ours = [given for given in self._orders.values() if given.fleet == f"{runtime.instance_id:x}"]
            if ours:
                await self._obey(max(ours, key=lambda given: given.term), group)
            try:
                await self._report(runtime)
                self._trouble = ""
            except RuntimeUnavailableError as error:
                if str(error) != self._trouble:
                    self._trouble = str(error)
                    self._say(f"cannot report the workers to the planner; trying again: {error}")
                await asyncio.sleep(AGAIN_S)
                self._news.set()

    def _on_end(self, obeying: asyncio.Task[None]) -> None:
        if not obeying.cancelled() and (error := obeying.exception()) is not None:
            self.error = error
            self._say(f"the planner's decisions are no longer carried out: {type(error).__name__}: {error}")

    async def _obey(self, given: Orders, group: ProcessGroup) -> None:
        if given.term < max(self._last, default=0):
            return
        self._last[given.term] = given
        now = self._clock()
        ending, starting = self.roster.obey(now, given.term, given.wanted)
        for change in [*takewhile(lambda change: change.time_s == now, reversed(self.roster.changes))][::-1]:
            self._say(f"{change.pool}: {change.before} -> {change.after} workers ({change.reason})")
        for name in ending:
            task = asyncio.create_task(self._end(group, name))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        for name in starting:
            await self._start(group, name)

    async def _start(self, group: ProcessGroup, name: str) -> None:
        pattern = self._patterns[self.roster.members[name].pool]
        try:
            await group.start(replace(pattern, name=name, is_retried=True))
        except OSError as error:  # the host has run out of file descriptors, memory or processes
            self._say(f"{name} could not be started ({error.strerror})")
            self.roster.on_unstarted(self._clock(), name)

    async def _end(self, group: ProcessGroup, name: str) -> None:
        member = self.roster.members[name]
        await group.end(name, self._patience_s[member.pool] if member.instance else LATE_S)
        self.roster.forget(self._clock(), name)
        self._news.set()

    async def _report(self, runtime: DistributedRuntime) -> None:
        key = f"{fleets(self._namespace)}{runtime.instance_id:x}"
        await runtime.discovery.put(key, msgspec.json.encode(self.roster.fleet()))
