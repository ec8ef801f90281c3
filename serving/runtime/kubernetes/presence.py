"""The live processes: those whose Lease is renewed, unless an EndpointSlice shows that their pod is not ready. Pure.

When a container ends, its pod's readiness changes within a second or so. A Lease covers what readiness does not show: a
process that hangs, one that was restarted in the same pod, and pods behind no Service.

Times are by our own clock, from when we saw a renewal: the clocks of the cluster's nodes may differ. Leases are
compared with our own, as we see it: while our own renewals do not come back, we see nobody's, so nobody counts as dead.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from serving.runtime.kubernetes.objects import EndpointSlice, Lease


@dataclass(slots=True)
class Process:
    """What a process's Lease reports."""

    pod: str
    """The pod's uid."""
    version: int
    """The version of its keys."""
    ttl_s: float
    renewed: str
    """When it last renewed the Lease, by its clock."""
    seen_s: float
    """When we saw that, by our clock."""


class Presence:
    """See the module; `now` is in seconds, on any clock."""

    def __init__(self, own: str) -> None:
        """Start as the process with this id."""
        self.processes: dict[str, Process] = {}
        """By id."""
        self._own = own
        self._slices: dict[str, dict[str, bool]] = {}

    def on_lease(self, now: float, id: str, lease: Lease) -> None:
        """Record a process's Lease."""
        metadata, known = lease.metadata, self.processes.get(id)
        ttl_s, renewed = float(lease.spec.duration_s), lease.spec.renew_time or ""
        seen_s = known.seen_s if known is not None and known.renewed == renewed else now
        if id == self._own and known is not None and seen_s - known.seen_s > ttl_s / 2:
            self._give_time(now)
        self.processes[id] = Process(metadata.pod, metadata.version, ttl_s, renewed, seen_s)

    def forget(self, id: str) -> None:
        """Record that a process's Lease is gone."""
        self.processes.pop(id, None)

    def on_slice(self, name: str, found: EndpointSlice | None) -> None:
        """Record an EndpointSlice, or that it is gone."""
        self._slices.pop(name, None)
        if found is not None:
            self._slices[name] = {
                endpoint.target_ref.uid: endpoint.conditions is None or endpoint.conditions.is_serving
                for endpoint in found.endpoints or ()
                if endpoint.target_ref is not None and endpoint.target_ref.kind == "Pod"
            }

    def on_slices(self, found: Mapping[str, EndpointSlice]) -> None:
        """Record all EndpointSlices."""
        self._slices.clear()
        for name, each in found.items():
            self.on_slice(name, each)

    def living(self) -> list[str]:
        """Return the ids of live processes, in an order that does not depend on the order of events."""
        own = self.processes.get(self._own)
        latest = own.seen_s if own is not None else 0.0
        return [
            id
            for id, process in sorted(self.processes.items())
            if latest - process.seen_s < process.ttl_s and self._is_ready(process.pod)
        ]

    def _give_time(self, now: float) -> None:
        """Restart the clock of Leases that had not expired: their holders may have been cut off as we were."""
        latest_s = self.processes[self._own].seen_s
        for process in self.processes.values():
            if latest_s - process.seen_s < process.ttl_s:
                process.seen_s = now

    def _is_ready(self, pod: str) -> bool:
        said = [pods[pod] for pods in self._slices.values() if pod in pods]
        return any(said) or not said
