"""The workers of a deployment in a cluster, derived from pods and Deployments. A core.

    starting  a pod that is not ready, not in discovery, or not yet made by its Deployment
    ready     a pod that is ready, under its id in discovery
    draining  a pod that is being deleted

Pods that have failed or finished do not count; evicted ones remain in the cluster for a while.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime

from dynabench.planner.messages import MOST_WORKERS, ReportedFleet, ReportedWorker
from foundation.text import one_line
from serving.runtime.kubernetes.names import DELETION_COST, POOL
from serving.runtime.kubernetes.objects import Deployment, Pod

OVER = ("Failed", "Succeeded")
FIRST = "-1"
"""Deletion cost of a pod that should leave first; other pods have a cost of 0."""


class Pods:
    """The pods and Deployments of a deployment's workers, as last seen."""

    def __init__(self, pools: Mapping[str, str]) -> None:
        """Start without workers; `pools` maps each pool to its Deployment."""
        self.pods: dict[str, Pod] = {}
        """Pods by name."""
        self.deployments: dict[str, Deployment] = {}
        """Deployments by name."""
        self.instances: dict[str, str] = {}
        """Ids in discovery, by the pod's name."""
        self._pools = pools
        self._startups: dict[str, float] = {}
        """The time until each pod was first ready, by its uid."""

    def fleet(self) -> ReportedFleet:
        """Return the workers of each pool, for the planner."""
        self._measure()
        return ReportedFleet({pool: (*map(self._worker, self._of(pool)), *self._unmade(pool)) for pool in self._pools})

    def nameless(self) -> list[str]:
        """Return the pods that are ready but missing from discovery."""
        return [
            name
            for name, pod in sorted(self.pods.items())
            if _is_ready(pod) and not _is_leaving(pod) and name not in self.instances
        ]

    def costs(self, pool: str, replicas: int, leaving: Sequence[str]) -> Mapping[str, str | None]:
        """Return which pods need another deletion cost, so that the right pods leave first; None removes the cost.

        Kubernetes already deletes pods that are not ready before others.

        Args:
            pool: the pool that shrinks.
            replicas: its new size.
            leaving: ids in the order in which they should leave.
        """
        workers = [worker for worker in map(self._worker, self._of(pool)) if worker.state != "draining"]
        places = {instance: place for place, instance in enumerate(leaving)}
        ready = [worker for worker in workers if worker.state == "ready"]
        ready.sort(key=lambda worker: places.get(worker.instance, len(places)))
        num_ready_leaving = max(len(ready) - replicas, 0) if len(workers) > replicas else 0
        first = {worker.name for worker in ready[:num_ready_leaving]}
        wanted = {worker.name: FIRST if worker.name in first else None for worker in ready}
        return {
            name: cost
            for name, cost in wanted.items()
            if (self.pods[name].metadata.annotation(DELETION_COST) == FIRST) != (cost == FIRST)
        }

    def trouble(self, pool: str) -> str:
        """Return why Kubernetes cannot make the pods that a pool should have, "" if it can."""
        deployment = self.deployments.get(self._pools[pool])
        for condition in (deployment.status.conditions if deployment else None) or ():
            if condition.type == "ReplicaFailure" and condition.status == "True":
                return one_line(condition.message or "no reason given")
        return ""

    def _of(self, pool: str) -> list[Pod]:
        pods = (pod for _, pod in sorted(self.pods.items()))
        return [pod for pod in pods if pod.metadata.label(POOL) == pool and pod.status.phase not in OVER]

    def _unmade(self, pool: str) -> list[ReportedWorker]:
        """Return the workers that a Deployment should have, but has not made pods for yet."""
        deployment = self.deployments.get(self._pools[pool])
        if deployment is None:
            return []
        wanted = 1 if deployment.spec.replicas is None else deployment.spec.replicas
        present = sum(not _is_leaving(pod) for pod in self._of(pool))
        missing = min(wanted, MOST_WORKERS) - present
        return [ReportedWorker(f"{deployment.metadata.name}-unmade-{number}", "starting") for number in range(missing)]

    def _worker(self, pod: Pod) -> ReportedWorker:
        name = pod.metadata.name
        instance, startup_s = self.instances.get(name, ""), self._startups.get(pod.metadata.uid)
        if _is_leaving(pod):
            return ReportedWorker(name, "draining", instance, startup_s)
        if _is_ready(pod) and instance:
            return ReportedWorker(name, "ready", instance, startup_s)
        return ReportedWorker(name, "starting", "", startup_s)

    def _measure(self) -> None:
        """Note how long pods took until they were first ready, by the cluster's clock."""
        for pod in self.pods.values():
            restarts = sum(container.restart_count for container in pod.status.container_statuses or ())
            if pod.metadata.uid not in self._startups and _is_ready(pod) and not restarts:
                ready = next(each for each in pod.status.conditions or () if each.type == "Ready")
                seconds = _seconds(pod.metadata.creation_timestamp, ready.last_transition_time)
                if seconds is not None:
                    self._startups[pod.metadata.uid] = seconds
        uids = {pod.metadata.uid for pod in self.pods.values()}
        self._startups = {uid: seconds for uid, seconds in self._startups.items() if uid in uids}


def _is_ready(pod: Pod) -> bool:
    return any(each.type == "Ready" and each.status == "True" for each in pod.status.conditions or ())


def _is_leaving(pod: Pod) -> bool:
    return pod.metadata.deletion_timestamp is not None


def _seconds(start: str | None, end: str | None) -> float | None:
    """Return the time between two timestamps, None if one is missing or invalid."""
    try:
        return max((datetime.fromisoformat(end or "") - datetime.fromisoformat(start or "")).total_seconds(), 0.0)
    except (ValueError, TypeError):
        return None
