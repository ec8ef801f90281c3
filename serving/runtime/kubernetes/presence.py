"""Which processes live: those whose Lease is renewed, unless an EndpointSlice says that their pod is not ready. Pure.

A pod's readiness is known within a second or so where a container ends; a Lease covers what it does not show: a process that
hangs, one that was started again in the same pod, and pods behind no Service.

Times are of our own clock, from when we saw a renewal: the clocks of the cluster's nodes may differ. Leases are compared with
our own, as we see it: while our own renewals do not come back, we see nobody's, and nobody counts as dead for that.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from serving.runtime.kubernetes.names import VERSION
from serving.runtime.kubernetes.objects import EndpointSlice, Lease

DEFAULT_TTL_S = 10.0


@dataclass(slots=True)
class Process:
    """What its Lease says of a process."""

    pod: str
    """The pod's uid."""
    version: int
    """Of what it has registered."""
    ttl_s: float
    renewed: str
    """When it renewed the Lease last, by its clock."""
    seen_s: float
    """When we saw that, by ours."""


class Presence:
    """See the module; `now` is in seconds, on any clock."""

    def __init__(self, own: str) -> None:
        """Begin, as the process of this id."""
        self.processes: dict[str, Process] = {}
        """By id."""
        self._own = own
        self._slices: dict[str, dict[str, bool]] = {}

    def on_lease(self, now: float, id: str, lease: Lease) -> None:
        """Take note of a process's Lease."""
        spec, version = lease.spec, lease.metadata.annotation(VERSION)
        known, renewed = self.processes.get(id), spec.renew_time or ""
        ttl_s = float(spec.lease_duration_seconds or DEFAULT_TTL_S)
        is_seen = known is None or known.renewed != renewed
        if id == self._own and known is not None and is_seen and now - known.seen_s > ttl_s / 2:
            self._give_time(now)
        self.processes[id] = Process(
            lease.metadata.pod,
            number(version),
            ttl_s,
            renewed,
            now if known is None or is_seen else known.seen_s,
        )

    def forget(self, id: str) -> None:
        """Take note that a process's Lease is gone."""
        self.processes.pop(id, None)

    def on_slice(self, name: str, found: EndpointSlice | None) -> None:
        """Take note of an EndpointSlice, or that it is gone."""
        self._slices.pop(name, None)
        if found is not None:
            self._slices[name] = {
                endpoint.target_ref.uid: endpoint.conditions is None or endpoint.conditions.is_serving
                for endpoint in found.endpoints or ()
                if endpoint.target_ref is not None and endpoint.target_ref.kind == "Pod"
            }

    def on_slices(self, found: Mapping[str, EndpointSlice]) -> None:
        """Take note of all EndpointSlices."""
        self._slices.clear()
        for name, each in found.items():
            self.on_slice(name, each)

    def living(self) -> list[str]:
        """Return the ids of those that live, in an order that does not depend on what happened when."""
        own = self.processes.get(self._own)
        latest = own.seen_s if own is not None else 0.0
        return [
            id
            for id, process in sorted(self.processes.items())
            if latest - process.seen_s < process.ttl_s and self._is_ready(process.pod)
        ]

    def _give_time(self, now: float) -> None:
        """Let the Leases that had not run out count from now on: their holders may have been as cut off as we were."""
        latest_s = self.processes[self._own].seen_s
        for process in self.processes.values():
            if latest_s - process.seen_s < process.ttl_s:
                process.seen_s = now

    def _is_ready(self, pod: str) -> bool:
        said = [pods[pod] for pods in self._slices.values() if pod in pods]
        return any(said) or not said


def number(text: str) -> int:
    """Read a version of what a process registers; 0 if it is none."""
    return int(text) if text.isascii() and text.isdecimal() else 0
