"""Names that one process can hold at a time: each is a Lease, changed only by those who have seen its last version."""

from serving.runtime.kubernetes.ages import Ages
from serving.runtime.kubernetes.api import KubernetesApi
from serving.runtime.kubernetes.names import claim_object, labels
from serving.runtime.kubernetes.objects import LEASES, Lease
from serving.runtime.kubernetes.registration import now_text
from serving.runtime.world import world

EPOCH_S = 1_735_689_600
"""2025-01-01: terms have 32 bits."""

MAX_DURATIONS = 3
"""The longest wait for the holder of a claim, in durations of our own Lease, whatever duration it asks for."""


class Claims:
    """The claims of one process."""

    def __init__(self, api: KubernetesApi, id: str, *, lease_ttl_s: float) -> None:
        """Prepare to claim."""
        self._api = api
        self._id = id
        self._duration_s = max(round(lease_ttl_s), 1)
        self._held: dict[str, str] = {}
        """Leases that we hold, and their versions."""
        self._ages = Ages()

    async def claim(self, name: str) -> int | None:
        """See `Discovery`; the term is the number of the Lease's transitions.

        Raises:
            ApiError: the API server does not report who holds it.
        """
        lease = claim_object(name)
        held = await self._api.get(LEASES, Lease, lease)
        if held is not None and held.spec.holder_identity == self._id:
            self._held[lease] = held.metadata.resource_version
            return held.spec.lease_transitions or 0
        self._held.pop(lease, None)
        if held is not None and held.spec.holder_identity and not self._is_abandoned(held):
            return None
        # Higher than any before, even if somebody removed the Lease.
        term = (held.spec.lease_transitions or 0) + 1 if held is not None else int(world().wall_s()) - EPOCH_S
        version = await self._take(lease, held, term)
        if version is None:
            return None  # another process was quicker
        self._held[lease] = version
        return term

    async def keep(self) -> None:
        """Renew all claims that we hold.

        Raises:
            ApiError: the API server cannot be reached, or does not allow it.
        """
        for lease, version in list(self._held.items()):
            renewed = await self._api.patch_unchanged(LEASES, lease, version, {"spec": {"renewTime": now_text()}})
            if self._held.get(lease) != version:
                continue  # asked for again meanwhile
            if renewed is None:
                del self._held[lease]  # another process has taken it, or somebody removed it
            else:
                self._held[lease] = renewed

    async def release(self) -> None:
        """Release all claims that we hold, so that others need not wait.

        Raises:
            ApiError: the API server cannot be reached, or does not allow it.
        """
        for lease, version in self._held.items():
            await self._api.patch_unchanged(LEASES, lease, version, {"spec": {"holderIdentity": ""}})

    async def _take(self, lease: str, held: Lease | None, term: int) -> str | None:
        spec = {
            "holderIdentity": self._id,
            "leaseDurationSeconds": self._duration_s,
            "leaseTransitions": term,
            "acquireTime": now_text(),
            "renewTime": now_text(),
        }
        if held is not None:
            return await self._api.patch_unchanged(LEASES, lease, held.metadata.resource_version, {"spec": spec})
        made = await self._api.create(LEASES, {"metadata": {"name": lease, "labels": labels()}, "spec": spec})
        return made.metadata.resource_version if made is not None else None

    def _is_abandoned(self, held: Lease) -> bool:
        """Return whether a Lease has not changed for its whole duration."""
        patience_s = min(held.spec.duration_s, MAX_DURATIONS * self._duration_s)
        return self._ages.observe(world().now(), held) > patience_s
