"""How long Leases have stayed unchanged, by our own clock, because the clocks of the nodes may differ. Pure."""

from serving.runtime.kubernetes.objects import Lease


class Ages:
    """See the module; `now` is in seconds, on any clock."""

    def __init__(self) -> None:
        """Start with no Lease seen."""
        self._seen: dict[str, tuple[str, float]] = {}
        """By name: the last version, and when it was first seen."""

    def observe(self, now: float, lease: Lease) -> float:
        """Record a Lease as it is now; return for how many seconds we have seen it unchanged."""
        name, version = lease.metadata.name, lease.metadata.resource_version
        known, since_s = self._seen.get(name, ("", now))
        if version != known:
            since_s = now
        self._seen[name] = version, since_s
        return now - since_s
