"""A planner's hands in a Kubernetes cluster: they set the number of pods of each pool's Deployment as ordered.

They run in the planner's own process, and follow the same rules as the hands on a host (`hands.py`): the highest term,
each decision once. They report the existing pods, and decide nothing. Pools are scaled independently: a failure in one
does not delay the others.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from dynabench.planner.messages import Orders, ReportedFleet, WantedWorkers, fleets, orders
from dynabench.planner.pods import Pods
from serving.runtime.address import EndpointAddress, Instance
from serving.runtime.alarm import Alarm
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.kubernetes.account import Account
from serving.runtime.kubernetes.api import ApiError, Kind, KubernetesApi
from serving.runtime.kubernetes.names import DELETION_COST, POD_NAME, deployment_of, workers_of
from serving.runtime.kubernetes.objects import AUTOSCALERS, DEPLOYMENTS, PODS, Autoscaler, Deployment, Pod, Resource
from serving.runtime.kubernetes.reflector import Reflector
from serving.runtime.ports import RuntimeUnavailableError
from serving.runtime.stopping import cancel_all

log = logging.getLogger(__name__)

AGAIN_S = 2.0
"""Delay before a failed action is tried again."""

CONFLICTS = 5
"""How often setting the number is tried again if something else changed the Deployment in the meantime."""

NAMELESS_S = 15.0
"""How long a ready pod may be missing from discovery."""


class Decided(NamedTuple):
    """The wanted size of a pool, and the decision it comes from."""

    term: int
    wanted: WantedWorkers

    @property
    def place(self) -> tuple[int, int]:
        """Its position in the order of all decisions."""
        return self.term, self.wanted.number


@dataclass(slots=True)
class _Pool:
    """A pool, and the last decision that was carried out."""

    name: str
    deployment: str
    news: asyncio.Event = field(default_factory=asyncio.Event)
    obeyed: tuple[int, int] = (0, 0)


class ClusterHands:
    """Scales the pools of one deployment as its planner orders."""

    def __init__(
        self,
        runtime: DistributedRuntime,
        pools: Collection[str],
        addresses: Collection[EndpointAddress],
        *,
        name: str,
        namespace: str,
        is_advisory: bool,
    ) -> None:
        self._runtime = runtime
        self._addresses = addresses
        self._name = name
        self._namespace = namespace
        self._is_advisory = is_advisory
        self._pools = {pool: _Pool(pool, deployment_of(name, pool)) for pool in pools}
        self._pods = Pods({pool: deployment_of(name, pool) for pool in pools})
        self._scalers: dict[str, Autoscaler] = {}
        self._orders: dict[str, Orders] = {}
        self._keys: dict[str, str] = {}
        """Pod names by the keys of their instances in discovery."""
        self._reported: ReportedFleet | None = None
        self._news = asyncio.Event()
        self._alarms: dict[str, Alarm] = {}
        self._naming: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """Obey until the block ends.

        Raises:
            RuntimeUnavailableError: the API server or the network is unreachable or refuses access.
            ValueError: an autoscaler already scales a pool.
        """
        self._api = KubernetesApi(Account.of_this_pod())
        reflectors = self._reflectors()
        tasks: list[asyncio.Task[None]] = []
        try:
            for reflector in reflectors:
                await reflector.start()
            for pool in self._pools.values():
                if refusal := self._refusal(pool):
                    raise ValueError(refusal)
            for address in self._addresses:
                await self._runtime.discovery.watch(address.prefix, self._on_instance)
            await self._runtime.discovery.watch(orders(self._namespace), self._on_orders)
            tasks = [asyncio.create_task(self._report_forever())]
            tasks += [asyncio.create_task(self._obey_forever(pool)) for pool in self._pools.values()]
            for task in tasks:
                task.add_done_callback(self._on_end)
            self._wake()
            yield
        finally:
            await cancel_all(*tasks)
            if self._naming is not None:
                self._naming.cancel()
            await asyncio.gather(*(reflector.close() for reflector in reflectors))
            await self._api.close()

    def _reflectors(self) -> list[Reflector[Any]]:
        found: list[Reflector[Any]] = [
            self._follow(PODS, Pod, self._pods.pods, labels=workers_of(self._name)),
            self._follow(DEPLOYMENTS, Deployment, self._pods.deployments),
        ]
        return found if self._is_advisory else [*found, self._follow(AUTOSCALERS, Autoscaler, self._scalers)]

    def _follow(
        self, resource: Resource, kind: type[Kind], held: dict[str, Kind], *, labels: str = ""
    ) -> Reflector[Kind]:
        """Return the reflector that keeps objects up to date, by their names."""

        async def on_list(found: dict[str, Kind]) -> None:
            held.clear()
            held.update(found)
            self._wake()

        def on_change(name: str, found: Kind | None) -> None:
            if found is None:
                held.pop(name, None)
            else:
                held[name] = found
            self._wake()

        return Reflector(self._api, resource, kind, on_list=on_list, on_change=on_change, labels=labels)

    def _wake(self) -> None:
        self._news.set()
        for pool in self._pools.values():
            pool.news.set()

    def _on_instance(self, key: str, value: bytes | None) -> None:
        id = key.rpartition("/")[2]
        pod = self._keys.pop(key, "")
        if self._pods.instances.get(pod) == id:
            del self._pods.instances[pod]
        if value is not None and (pod := Instance.parse(key, value).pod):
            self._keys[key] = pod
            self._pods.instances[pod] = id
        self._wake()

    def _on_orders(self, key: str, value: bytes | None) -> None:
        by = key.rpartition("/")[2]
        if value is None:
            self._orders.pop(by, None)
        else:
            self._orders[by] = msgspec.json.decode(value, type=Orders)
        self._wake()

    async def _report_forever(self) -> None:
        """Report the workers, and what is wrong with pools."""
        key = f"{fleets(self._namespace)}{self._runtime.instance_id:x}"
        while True:
            await self._news.wait()
            self._news.clear()
            self._look()
            fleet = self._pods.fleet()
            if fleet == self._reported:
                continue
            try:
                await self._runtime.discovery.put(key, msgspec.json.encode(fleet))
                self._reported = fleet
                self._say("the report to the planner", "")
            except RuntimeUnavailableError as error:
                self._say(
                    "the report to the planner", f"cannot report the workers to the planner; trying again: {error}"
                )
                await asyncio.sleep(AGAIN_S)
                self._news.set()

    def _look(self) -> None:
        """Log what prevents pools from reaching their ordered size."""
        for pool in self._pools.values():
            trouble = self._pods.trouble(pool.name)
            self._say(f"pods of {pool.name}", trouble and f"{pool.deployment} cannot start all its pods: {trouble}")
            self._say(f"the autoscaler of {pool.name}", self._refusal(pool))
            missing = (
                f"there is no Deployment {pool.deployment} in namespace {self._api.namespace}; expected one for "
                f"pool {pool.name}, which does not change until then"
            )
            self._say(f"the Deployment of {pool.name}", "" if pool.deployment in self._pods.deployments else missing)
        self._wait_for_names()

    def _wait_for_names(self) -> None:
        """Check later whether the pods that are missing from discovery now are still missing."""
        if self._pods.nameless() and self._naming is None:
            loop = asyncio.get_running_loop()
            self._naming = loop.call_later(NAMELESS_S, self._look_for, self._pods.nameless())

    def _look_for(self, pods: list[str]) -> None:
        """Log which pods are still missing from discovery."""
        self._naming = None
        lost = [name for name in pods if name in self._pods.nameless()]
        text = f"{lost[0]} is ready but not in discovery; expected {POD_NAME} in its environment" if lost else ""
        self._say("pods that discovery does not know", text)
        self._wait_for_names()

    def _refusal(self, pool: _Pool) -> str:
        """Return which autoscaler already scales a pool, "" if none does: two would undo each other's changes."""
        for name, scaler in sorted(self._scalers.items()):
            target = scaler.spec.scale_target_ref
            if (target.kind, target.name) == ("Deployment", pool.deployment):
                return (
                    f"HorizontalPodAutoscaler {name} also scales {pool.deployment}; expected either it or a planner "
                    f"(kubectl delete hpa {name}, or --advisory)"
                )
        return ""

    def _decided(self, pool: _Pool) -> Decided | None:
        """Return our planner's last decision about a pool, unless it is done or another planner has taken over.

        Our planner is this process. No other orders are obeyed: any pod can write some, and few may scale.
        """
        own = f"{self._runtime.instance_id:x}"
        ours = self._orders.get(own)
        if ours is None or ours.fleet != own or pool.name not in ours.wanted:
            return None
        if any(other.term > ours.term for other in self._orders.values()):
            return None
        decided = Decided(ours.term, ours.wanted[pool.name])
        return decided if decided.place > pool.obeyed else None

    async def _obey_forever(self, pool: _Pool) -> None:
        while True:
            await pool.news.wait()
            pool.news.clear()
            decided = self._decided(pool)
            if decided is None or self._refusal(pool):
                continue
            try:
                await self._scale(pool, decided)
                pool.obeyed = max(pool.obeyed, decided.place)
                self._say(f"the size of {pool.name}", "")
            except ApiError as error:
                self._say(f"the size of {pool.name}", f"{pool.name} is unchanged; trying again: {error}")
                await asyncio.sleep(AGAIN_S)
                pool.news.set()

    async def _scale(self, pool: _Pool, decided: Decided) -> None:
        """Set the number of pods of a pool; if something else changed it in the meantime, read it again.

        Raises:
            ApiError: the API server refuses the change, or something else keeps changing the Deployment.
        """
        wanted = decided.wanted
        for attempt in range(1, CONFLICTS + 1):
            held = await self._api.get(DEPLOYMENTS, Deployment, pool.deployment, "scale")
            if held is None:
                raise ApiError(f"there is no Deployment {pool.deployment} in namespace {self._api.namespace}", 404)
            before = held.spec.replicas or 0
            if before == wanted.replicas or self._decided(pool) != decided:
                return
            if wanted.replicas < before and attempt == 1:
                await self._mark(pool, wanted)
            content = {
                "metadata": {"resourceVersion": held.metadata.resource_version},
                "spec": {"replicas": wanted.replicas},
            }
            try:
                await self._api.patch(DEPLOYMENTS, pool.deployment, "scale", content=content)
            except ApiError as error:
                if error.status == 409 and attempt < CONFLICTS:
                    continue
                raise
            log.info("%s: %d -> %d workers (%s)", pool.name, before, wanted.replicas, wanted.reason)
            return

    async def _mark(self, pool: _Pool, wanted: WantedWorkers) -> None:
        """Tell Kubernetes which pods should leave first; if that fails, Kubernetes chooses."""
        for name, cost in self._pods.costs(pool.name, wanted.replicas, wanted.leaving).items():
            try:
                await self._api.patch(PODS, name, content={"metadata": {"annotations": {DELETION_COST: cost}}})
            except ApiError as error:
                if error.status != 404:
                    self._say("the choice of workers that leave", f"Kubernetes chooses which worker leaves: {error}")
                    return
        self._say("the choice of workers that leave", "")

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """End the process if a task fails: Kubernetes starts it again, and a planner without hands would look alive."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("decisions can no longer be carried out: %s: %s", type(error).__name__, error)
            self._runtime.stopping.set()

    def _say(self, what: str, trouble: str) -> None:
        self._alarms.setdefault(what, Alarm(log, f"resolved: {what}")).update(trouble)
