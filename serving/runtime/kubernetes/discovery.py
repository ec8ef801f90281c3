"""Discovery in a Kubernetes cluster, by objects of its own (docs/decisions/0028).

    Lease dynabench-{id}            of each process: it renews this, and counts the changes of its keys in it
    ConfigMap dynabench-{id}        its keys, written before the Lease counts the change
    Lease dynabench-claim-{name}    who holds a claim, and its term
    Secret dynabench-cluster-token  the token: processes that call each other prove that they know it;
                                    DYN_CLUSTER_TOKEN_SECRET names another Secret

The first two belong to the process's pod, and the cluster removes them with it. `presence.py` decides who is alive.
While the API server is away, what was known stays in use; our changes are written once it is back.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping
from typing import Self

from serving.runtime.alarm import Alarm
from serving.runtime.cluster_token import KEY as CLUSTER_TOKEN
from serving.runtime.kubernetes.account import Account, ThisPod
from serving.runtime.kubernetes.api import ApiError, KubernetesApi
from serving.runtime.kubernetes.claims import Claims
from serving.runtime.kubernetes.names import TOKEN_SECRET, TOKEN_SECRET_VARIABLE
from serving.runtime.kubernetes.others import Others
from serving.runtime.kubernetes.registration import Registration
from serving.runtime.kubernetes.secret import SharedSecret
from serving.runtime.ports import OnChange, Stop, guarded
from serving.runtime.stopping import cancel_all
from serving.runtime.world import world

log = logging.getLogger(__name__)

CLOSING_S = 5.0
GRACE_S = 1.0
"""How long a renewal may take to appear on a watch."""


class KubernetesDiscovery:
    """See the module."""

    def __init__(
        self, api: KubernetesApi, pod: ThisPod, id: str, *, lease_ttl_s: float, token_secret: str = TOKEN_SECRET
    ) -> None:
        """Prepare to join, as a process of a pod."""
        self.outages = api.outages
        self._api = api
        self._id = id
        self._ttl_s = lease_ttl_s
        self._own = Registration(api, pod, id, lease_ttl_s=lease_ttl_s)
        self._claims = Claims(api, id, lease_ttl_s=lease_ttl_s)
        self._watches: list[tuple[str, OnChange]] = []
        self._others: Others | None = None
        self._token = SharedSecret(api, token_secret, lambda value: self._tell(CLUSTER_TOKEN, value))
        self._starting = asyncio.Lock()
        self._beating: asyncio.Task[None] | None = None
        self._alarm = Alarm(log, "this process is safely in discovery again")

    @classmethod
    async def connect(cls, instance_id: int, *, lease_ttl_s: float) -> Self:
        """Take a Lease in the namespace of this pod, and keep it.

        Raises:
            RuntimeUnavailableError: this is not a pod, or the API server cannot be reached or does not allow it.
        """
        account, pod = Account.of_this_pod(), ThisPod.found()
        token_secret = os.environ.get(TOKEN_SECRET_VARIABLE) or TOKEN_SECRET
        discovery = cls(
            KubernetesApi(account), pod, f"{instance_id:x}", lease_ttl_s=lease_ttl_s, token_secret=token_secret
        )
        try:
            await discovery._own.begin()
        except BaseException:
            await discovery._api.close()
            raise
        discovery._beating = asyncio.create_task(discovery._beat())
        return discovery

    async def put(self, key: str, value: bytes) -> None:
        """Register a key."""
        await self._own.put(key, value)

    async def delete(self, key: str) -> None:
        """Remove one of our keys."""
        await self._own.delete(key)

    async def claim(self, name: str) -> int | None:
        """See `Discovery`."""
        return await self._claims.claim(name)

    async def create(self, key: str, value: bytes) -> bytes:
        """See `KeepingDiscovery`; only the cluster token outlives its process."""
        assert key == CLUSTER_TOKEN, key
        return await self._token.fill(value)

    def place(self, key: str) -> tuple[str, str]:
        """See `KeepingDiscovery`."""
        assert key == CLUSTER_TOKEN, key
        name = self._token.name
        return f"Secret {name}", f"kubectl patch secret {name} -p '{{\"data\":null}}'"

    async def watch(self, prefix: str, on_change: OnChange) -> Stop:
        """Report the keys below a prefix, now and as they change."""
        entry = (prefix, guarded(on_change, "a key in discovery"))
        async with self._starting:
            for key, value in list((await self._known(prefix)).items()):
                if key.startswith(prefix):
                    entry[1](key, value)
            self._watches.append(entry)

        def stop() -> None:
            if entry in self._watches:
                self._watches.remove(entry)
            if self._others is not None and all(prefix == CLUSTER_TOKEN for prefix, _ in self._watches):
                self._others.stop()
                self._others = None

        return stop

    async def close(self) -> None:
        """Remove our Lease and all our keys, and release our claims."""
        self._watches.clear()
        await cancel_all(*([self._beating] if self._beating else []))
        await asyncio.gather(*(followed.close() for followed in (self._others, self._token) if followed))
        with contextlib.suppress(ApiError, TimeoutError):  # the Leases will expire
            async with asyncio.timeout(CLOSING_S):
                await self._claims.release()
                await self._own.end()
        await self._api.close()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            if self._others is not None and world().now() - self._own.renewed_s > min(GRACE_S, self._ttl_s / 6):
                self._others.check(self._own.renewed)
            try:
                await self._own.renew()
                await self._claims.keep()
            except ApiError as error:
                self._alarm.update(f"this process may be lost from discovery; trying again: {error}")
            else:
                self._alarm.update("")

    async def _known(self, prefix: str) -> Mapping[str, bytes]:
        """Return the keys that a watch of a prefix can see now, and follow them from then on."""
        if prefix == CLUSTER_TOKEN:
            await self._token.follow()
            return {} if self._token.value is None else {CLUSTER_TOKEN: self._token.value}
        if self._others is None:
            others = Others(self._api, self._id, self._tell)
            await others.start()
            self._others = others
        return self._others.keys

    def _tell(self, key: str, value: bytes | None) -> None:
        for prefix, on_change in list(self._watches):
            if key.startswith(prefix):
                on_change(key, value)
