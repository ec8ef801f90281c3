"""A planner of real workers in its own process, started with `python -m dynabench.planner`.

It observes the workers every few seconds, asks the planner core, logs the decision with its inputs, and writes its
orders to discovery for the hands (`hands.py`, or `cluster_hands.py` in a cluster). While an input is missing, it
changes nothing and says so once.

    waiting for the claim --> waiting for a ready worker in each pool --> planning
            ^                                                               |
            +-----------------another planner has the claim-----------------+
"""

import asyncio
import logging
from dataclasses import dataclass, field, replace
from typing import Literal

import aiohttp
import msgspec

from dynabench.deployment.description import Deployment
from dynabench.deployment.engines import SimulatedPool, pools_of
from dynabench.deployment.processes import addresses_of
from dynabench.planner.facts import pool_facts
from dynabench.planner.log_lines import json_of, line_of
from dynabench.planner.messages import Orders, ReportedFleet, WantedWorkers, claim, fleets, orders
from dynabench.planner.seen import Reports, counts_of, is_up, mean_startup_s
from serving.planner import Counts, Observation, Planner, ScalingDecision, policy_named, traffic_between
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.ports import RuntimeUnavailableError
from serving.runtime.stopping import until_stopped
from serving.supervision.process import report_ready
from serving.worker.load_reports import TOPIC, LoadReport

log = logging.getLogger(__name__)

WAIT_S = 1.0
"""How often it checks whether it may start."""

ANSWER_S = 2.0
"""How long the frontend may take to answer."""

MAX_METRICS_BYTES = 1 << 24
MAX_NOTES = 200
"""Most different notes that are counted; all are logged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerServiceConfig:
    """Where a planner finds its deployment."""

    namespace: str = "dynamo"
    """Namespace of the deployment."""
    home: str = "dynamo"
    """Namespace of the deployment's workers."""
    url: str = "http://127.0.0.1:8080"
    """URL of the frontend."""
    hands: Literal["parent", "kubernetes"] = "parent"
    """Who carries out the decisions: the process that starts the workers, or, in a cluster, this process."""
    api_key: str = field(default="", repr=False)


class BlindError(Exception):
    """The planner is missing an input; the message names it."""


class PlannerService:
    """Plans one deployment while no other planner does."""

    def __init__(self, runtime: DistributedRuntime, config: PlannerServiceConfig, deployment: Deployment) -> None:
        self._runtime = runtime
        self._config = config
        self._settings = deployment.planner
        self._pools = {pool.name: pool for pool in pools_of(deployment)}
        self._addresses = addresses_of(deployment, config.home)
        self._interval_s = self._settings.planner_interval_s or policy_named(self._settings.planner).default_interval_s
        self._fleets: dict[str, ReportedFleet] = {}
        self._reports = Reports()
        self._planner: Planner | None = None
        self._looked: tuple[float, Counts] | None = None
        """The time of the last observation, and the frontend's counts at that time."""
        self._orders = Orders("", 0)
        self._said: tuple[str, ...] = ()
        self.is_planning = False
        """Whether it had all inputs when it last looked."""

    async def run(self, connector: aiohttp.BaseConnector | None = None) -> None:
        """Plan until the process is asked to end.

        Args:
            connector: connects to the frontend (default: over TCP).
        """
        runtime, stopping = self._runtime, self._runtime.stopping
        await runtime.discovery.watch(fleets(self._config.namespace), self._on_fleet)
        for address in self._addresses:
            await runtime.events.subscribe(address.subject(TOPIC), self._on_load)
        report_ready()
        headers = {"authorization": f"Bearer {self._config.api_key}"} if self._config.api_key else {}
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:
            while not stopping.is_set():
                await self._look(session)
                wait_s = self._interval_s if self._looked else min(WAIT_S, self._interval_s)
                await until_stopped(stopping, asyncio.sleep(wait_s))

    async def _look(self, session: aiohttp.ClientSession) -> None:
        """Decide once, unless an input is missing."""
        self.is_planning = False
        try:
            await self._claim()
            id, fleet = self._the_fleet()
            if self._planner is None:
                if not is_up(fleet.pools):
                    self._note(("waiting for a ready worker in each pool",))
                    return
                self._begin(fleet)
            before, self._looked = self._looked, (self._now(), await self._counts(session))
        except BlindError as error:
            self._note((f"nothing changes: {error}",), logging.WARNING)
            return
        self.is_planning = True
        if before is None:
            self._note(())
            log.info("planning %s with %s", ", ".join(self._pools), self._settings.planner)
            return
        assert self._planner is not None
        observation = self._observe(fleet, before, self._looked)
        decision = self._planner.decide(observation)
        await self._order(id, fleet, observation, decision)

    async def _claim(self) -> None:
        """Make sure that no other planner is active.

        Raises:
            BlindError: another planner is active, or that cannot be determined.
        """
        try:
            term = await self._runtime.discovery.claim(claim(self._config.namespace))
        except RuntimeUnavailableError as error:
            raise BlindError(str(error)) from error
        if term is None:
            self._planner, self._looked = None, None
            raise BlindError(f"another planner is running in {self._config.namespace}; this one waits until it stops")
        if term != self._orders.term:
            self._orders = Orders("", term)

    def _the_fleet(self) -> tuple[str, ReportedFleet]:
        if len(self._fleets) != 1:
            which = f"found {len(self._fleets)}" if self._fleets else "found none"
            raise BlindError(f"expected one process that starts workers in {self._config.namespace}, but {which}")
        [(id, fleet)] = self._fleets.items()
        if missing := self._pools.keys() - fleet.pools.keys():
            raise BlindError(f"the process that starts workers does not report {', '.join(sorted(missing))}")
        return id, fleet

    def _begin(self, fleet: ReportedFleet) -> None:
        """Make a planner, with the start time that workers were measured to need here."""
        facts = [pool_facts(self._measured(pool, fleet)) for pool in self._pools.values()]
        try:
            self._planner = Planner(self._settings, facts)
        except ValueError as error:
            raise BlindError(str(error)) from error

    def _measured(self, pool: SimulatedPool, fleet: ReportedFleet) -> SimulatedPool:
        startup_s = mean_startup_s(fleet.pools[pool.name], default_s=pool.startup_s)
        # Those that take longer are given up. One may still have done so, as it was slow to start again after its death.
        return replace(pool, startup_s=min(startup_s, self._settings.startup_timeout_s))

    async def _counts(self, session: aiohttp.ClientSession) -> Counts:
        """Ask the frontend for its counts."""
        url = self._config.url
        try:
            async with session.get(f"{url}/metrics") as response:
                response.raise_for_status()
                text = await response.content.read(MAX_METRICS_BYTES)
                return counts_of(text.decode())
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            why = getattr(error, "message", "") or getattr(error, "strerror", "") or type(error).__name__
            raise BlindError(f"the frontend at {url} does not return its metrics ({why})") from error

    def _observe(self, fleet: ReportedFleet, before: tuple[float, Counts], after: tuple[float, Counts]) -> Observation:
        now = after[0]
        self._reports.keep(now)
        pools = {
            name: self._reports.state(
                fleet.pools[name],
                num_ranks=pool.engine.num_engines,
                block_size=pool.engine.config.block_size,
            )
            for name, pool in self._pools.items()
        }
        return Observation(now=now, pools=pools, traffic=traffic_between(before[1], after[1], now - before[0]))

    async def _order(self, id: str, fleet: ReportedFleet, seen: Observation, decision: ScalingDecision) -> None:
        """Log a decision, and publish it for the hands."""
        number = self._orders.decisions + 1
        if decision.changes:
            log.info("%s", line_of(number, decision, seen))
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s", json_of(number, decision, seen))
        self._note(decision.notes)
        wanted = dict(self._orders.wanted) if self._orders.fleet == id else {}
        for name, target in decision.orders.items():
            leaving = self._reports.idle_first(fleet.pools[name])
            wanted[name] = WantedWorkers(number, target.replicas, target.reason, leaving)
        self._orders = msgspec.structs.replace(self._orders, fleet=id, decisions=number, wanted=wanted)
        await self._runtime.discovery.put(
            f"{orders(self._config.namespace)}{self._runtime.instance_id:x}", msgspec.json.encode(self._orders)
        )

    def _note(self, notes: tuple[str, ...], level: int = logging.INFO) -> None:
        """Count the notes, and log those that were not among the previous ones."""
        counts = dict(self._orders.notes)
        for note in notes:
            if note in counts or len(counts) < MAX_NOTES:
                counts[note] = counts.get(note, 0) + 1
            if note not in self._said:
                log.log(level, "%s", note)
        self._orders = msgspec.structs.replace(self._orders, notes=counts)
        self._said = notes

    def _on_fleet(self, key: str, value: bytes | None) -> None:
        id = key.rpartition("/")[2]
        if self._config.hands == "kubernetes" and id != f"{self._runtime.instance_id:x}":
            return  # it belongs to another planner, which waits for the claim
        if value is None:
            self._fleets.pop(id, None)
        else:
            self._fleets[id] = msgspec.json.decode(value, type=ReportedFleet)

    def _on_load(self, data: bytes) -> None:
        self._reports.add(self._now(), msgspec.msgpack.decode(data, type=LoadReport))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
