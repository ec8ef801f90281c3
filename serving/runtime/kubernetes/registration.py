"""A process's objects in the cluster: a Lease that it renews, and a ConfigMap with its keys. Both go with its pod."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import msgspec

from serving.runtime.kubernetes.account import ThisPod
from serving.runtime.kubernetes.ages import Ages
from serving.runtime.kubernetes.api import ApiError, KubernetesApi
from serving.runtime.kubernetes.names import PROCESS, VERSION, labels, process_object
from serving.runtime.kubernetes.objects import CONFIG_MAPS, LEASES, Data, Lease
from serving.runtime.ports import RuntimeUnavailableError
from serving.runtime.world import world

MAX_KEYS_BYTES = 1_000_000
"""The room in a ConfigMap, apart from its name and labels."""

LOOK_S = 30.0
"""How often a process makes sure that its keys are still there, as it wrote them."""


class Registration:
    """The Lease and the keys of this process."""

    def __init__(self, api: KubernetesApi, pod: ThisPod, id: str, *, lease_ttl_s: float) -> None:
        """Prepare to register."""
        self.renewed = ""
        """When the Lease was last renewed, as it records."""
        self.renewed_s = 0.0
        """The same, by our clock."""
        self._api = api
        self._pod = pod
        self._acquired = now_text()
        self._id = id
        self._name = process_object(id)
        self._duration_s = max(round(lease_ttl_s), 1)
        self._keys: dict[str, bytes] = {}
        self._version = 0
        """The version of the keys; `_written` is the version that the cluster has."""
        self._written = 0
        self._writing = asyncio.Lock()
        self._looked_s = world().now()
        self._beside: list[str] = []
        """Leases of other processes of this pod, which may be dead: a container that starts again keeps its pod."""
        self._ages = Ages()

    async def begin(self) -> None:
        """Create the Lease, and note which processes this pod had before us.

        Raises:
            ApiError: the API server cannot be reached, or does not allow it.
        """
        found, _ = await self._api.list(LEASES, Lease, labels=PROCESS)
        self._beside = [name for name, lease in found.items() if lease.metadata.pod == self._pod.uid]
        for name in self._beside:
            self._ages.observe(world().now(), found[name])
        await self._make_lease()

    async def put(self, key: str, value: bytes) -> None:
        """Register a key, now or at one of the next renewals of the Lease.

        Raises:
            RuntimeUnavailableError: it is too long, or the API server does not allow it.
        """
        if len(_encoded(self._keys | {key: value})) > MAX_KEYS_BYTES:
            raise RuntimeUnavailableError(
                f"{key} is {len(value)} bytes long; expected at most {MAX_KEYS_BYTES} for all that a process registers, as a "
                "ConfigMap holds it"
            )
        self._keys[key] = value
        await self._change()

    async def delete(self, key: str) -> None:
        """Remove a key."""
        if self._keys.pop(key, None) is not None:
            await self._change()

    async def renew(self) -> None:
        """Renew the Lease, write what could not be written before, and recreate what somebody removed.

        Raises:
            ApiError: the API server cannot be reached, or does not allow it.
        """
        now = world().now()
        if now - self.renewed_s > self._duration_s:
            self._looked_s = now  # we were cut off, and maybe so were others: they get time to renew
        if now - self._looked_s > LOOK_S:
            self._looked_s = now
            await self._remove_dead()
            if self._written and not await self._has_keys():
                self._version += 1
        if not await self._write():
            await self._beat()

    async def end(self) -> None:
        """Remove the Lease and all keys.

        Raises:
            ApiError: the API server cannot be reached, or does not allow it.
        """
        await self._api.delete(LEASES, self._name)
        if self._version:
            await self._api.delete(CONFIG_MAPS, self._name)

    async def _remove_dead(self) -> None:
        """Remove the objects of this pod's processes that have not renewed their Lease for twice its duration."""
        left = []
        for name in self._beside:
            lease = await self._api.get(LEASES, Lease, name)
            if lease is None:
                continue
            if self._ages.observe(world().now(), lease) > 2 * lease.spec.duration_s:
                await self._api.delete(CONFIG_MAPS, name)
                await self._api.delete(LEASES, name)
            else:
                left.append(name)
        self._beside = left

    async def _has_keys(self) -> bool:
        """Return whether the cluster has what we wrote last."""
        held = await self._api.get(CONFIG_MAPS, Data, self._name)
        return held is not None and held.metadata.version == self._written

    async def _change(self) -> None:
        self._version += 1
        try:
            await self._write()
        except ApiError as error:
            if not error.is_passing:
                raise

    async def _write(self) -> bool:
        """Write the keys, then count the change in the Lease; return whether there was anything to write."""
        async with self._writing:
            version = self._version
            if self._written == version:
                return False  # written with another change
            await self._write_keys(version)
            self._written = version
        await self._beat()
        return True

    async def _write_keys(self, version: int) -> None:
        content = {"metadata": self._metadata(version), "data": {"keys": _encoded(self._keys)}}
        try:
            await self._api.patch(CONFIG_MAPS, self._name, content=content)
        except ApiError as error:
            if error.status != 404:
                raise
            await self._api.create(CONFIG_MAPS, content)

    async def _beat(self) -> None:
        """Renew the Lease, and restore what somebody changed in it."""
        renewed = now_text()
        try:
            await self._api.patch(LEASES, self._name, content=self._lease(renewed))
            self._has_renewed(renewed)
        except ApiError as error:
            if error.status != 404:
                raise
            await self._make_lease()
            if self._version:  # whoever removed it may have removed the keys, too
                self._version += 1
                await self._write()

    async def _make_lease(self) -> None:
        renewed = now_text()
        await self._api.create(LEASES, self._lease(renewed))
        self._has_renewed(renewed)

    def _has_renewed(self, renewed: str) -> None:
        self.renewed, self.renewed_s = renewed, world().now()

    def _lease(self, renewed: str) -> dict[str, Any]:
        spec = {
            "holderIdentity": f"{self._pod.name}_{self._id}",
            "leaseDurationSeconds": self._duration_s,
            "acquireTime": self._acquired,
            "renewTime": renewed,
        }
        return {"metadata": self._metadata(self._written), "spec": spec}

    def _metadata(self, version: int) -> dict[str, Any]:
        return {
            "name": self._name,
            "labels": labels({PROCESS: self._id}),
            "annotations": {VERSION: str(version)},
            "ownerReferences": [self._pod.as_owner],
        }


def now_text() -> str:
    """Return the time in the format of Leases."""
    return datetime.fromtimestamp(world().wall_s(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _encoded(keys: dict[str, bytes]) -> str:
    return msgspec.json.encode({key: value.decode() for key, value in keys.items()}).decode()
