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
import time
from base64 import b64decode, b64encode

from serving.runtime.alarm import Alarm
from serving.runtime.cluster_token import KEY as CLUSTER_TOKEN
from serving.runtime.kubernetes.account import Account, ThisPod
from serving.runtime.kubernetes.api import ApiError, KubernetesApi
from serving.runtime.kubernetes.claims import Claims
from serving.runtime.kubernetes.names import TOKEN_SECRET, TOKEN_SECRET_VARIABLE
from serving.runtime.kubernetes.objects import SECRETS, Data
from serving.runtime.kubernetes.others import Others
from serving.runtime.kubernetes.reflector import Reflector
from serving.runtime.kubernetes.registration import Registration
from serving.runtime.ports import OnChange, RuntimeUnavailableError, Stop, guarded
from serving.runtime.stopping import cancel_all

log = logging.getLogger(__name__)

CLOSING_S = 5.0
GRACE_S = 1.0
"""How long a renewal may take to appear on a watch."""

FILLING_PAUSES_S = (0.0, 0.1, 0.3, 1.0, 3.0)
"""The waits before each attempt to fill an empty Secret: another process may be quicker."""

LASTING = (CLUSTER_TOKEN,)
"""Keys that outlive the processes that put them; each is in a Secret."""


class KubernetesDiscovery:
    """See the module."""

    def __init__(
        self, api: KubernetesApi, pod: ThisPod, id: str, *, lease_ttl_s: float, token_secret: str = TOKEN_SECRET
    ) -> None:
        """Prepare to join, as a process of a pod."""
        self._api = api
        self._secret_of = dict.fromkeys(LASTING, token_secret)
        self._id = id
        self._ttl_s = lease_ttl_s
        self._own = Registration(api, pod, id, lease_ttl_s=lease_ttl_s)
        self._claims = Claims(api, id, lease_ttl_s=lease_ttl_s)
        self._watches: list[tuple[str, OnChange]] = []
        self._others: Others | None = None
        self._shared: dict[str, bytes] = {}
        self._following: dict[str, Reflector[Data]] = {}
        self._starting = asyncio.Lock()
        self._beating: asyncio.Task[None] | None = None
        self._alarm = Alarm(log, "this process is safely in discovery again")

    @classmethod
    async def connect(cls, instance_id: int, *, lease_ttl_s: float) -> "KubernetesDiscovery":
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
        """Put a key that outlives us into its Secret if that is empty; return its value after that.

        The Secret itself must exist: a right to create one could not be limited to its name.

        Raises:
            RuntimeUnavailableError: the API server cannot be reached or refuses us, or there is no Secret.
        """
        name = self._secret_of[key]
        for pause_s in FILLING_PAUSES_S:
            await asyncio.sleep(pause_s)
            if (secret := await self._api.get(SECRETS, Data, name)) is None:
                raise RuntimeUnavailableError(
                    f"there is no Secret {name} in namespace {self._api.namespace}; expected an empty one "
                    f"(kubectl create secret generic {name})"
                )
            if (held := _value(secret)) is not None:
                return held
            # Only the version that was empty is changed, so one of several processes succeeds.
            metadata = {"resourceVersion": secret.metadata.resource_version}
            content = {"metadata": metadata, "data": {"value": b64encode(value).decode()}}
            try:
                await self._api.patch(SECRETS, name, content=content)
            except ApiError as error:
                if error.status not in (404, 409):
                    raise
            else:
                return value
        raise RuntimeUnavailableError(
            f"Secret {name} in namespace {self._api.namespace} is empty, but changes whenever this process fills it; "
            "expected nobody to change it meanwhile"
        )

    def place(self, key: str) -> tuple[str, str]:
        """Return where a key that outlives us is kept, and the command that empties it."""
        name = self._secret_of[key]
        return f"Secret {name}", f"kubectl patch secret {name} -p '{{\"data\":null}}'"

    async def watch(self, prefix: str, on_change: OnChange) -> Stop:
        """Report the keys below a prefix, now and as they change."""
        entry = (prefix, guarded(on_change, "a key in discovery"))
        async with self._starting:
            if prefix in LASTING:
                await self._follow(prefix)
            elif self._others is None:
                others = Others(self._api, self._id, self._tell)
                await others.start()
                self._others = others
            known = self._shared if prefix in LASTING or self._others is None else self._others.keys
            for key, value in list(known.items()):
                if key.startswith(prefix):
                    entry[1](key, value)
            self._watches.append(entry)

        def stop() -> None:
            if entry in self._watches:
                self._watches.remove(entry)
            if self._others is not None and all(prefix in LASTING for prefix, _ in self._watches):
                self._others.stop()
                self._others = None

        return stop

    async def close(self) -> None:
        """Remove our Lease and all our keys, and release our claims."""
        self._watches.clear()
        await cancel_all(*([self._beating] if self._beating else []))
        await asyncio.gather(
            *(following.close() for following in [self._others, *self._following.values()] if following)
        )
        with contextlib.suppress(ApiError, TimeoutError):  # the Leases will expire
            async with asyncio.timeout(CLOSING_S):
                await self._claims.release()
                await self._own.end()
        await self._api.close()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            if self._others is not None and time.monotonic() - self._own.renewed_s > min(GRACE_S, self._ttl_s / 6):
                self._others.check(self._own.renewed)
            try:
                await self._own.renew()
                await self._claims.keep()
            except ApiError as error:
                self._alarm.update(f"this process may be lost from discovery; trying again: {error}")
            else:
                self._alarm.update("")

    async def _follow(self, key: str) -> None:
        """Follow a key that outlives processes."""
        if key in self._following:
            return

        def take(secret: Data | None) -> None:
            if secret is None:
                return  # nobody can fill it until it exists again: keep the last value
            if self._shared.get(key) != (value := _value(secret)):
                self._shared.pop(key, None)
                if value is not None:
                    self._shared[key] = value
                self._tell(key, value)

        async def on_list(found: dict[str, Data]) -> None:
            take(found.get(self._secret_of[key]))

        reflector = Reflector(
            self._api,
            SECRETS,
            Data,
            on_list=on_list,
            on_change=lambda _, found: take(found),
            fields=f"metadata.name={self._secret_of[key]}",
        )
        await reflector.start()
        self._following[key] = reflector

    def _tell(self, key: str, value: bytes | None) -> None:
        for prefix, on_change in list(self._watches):
            if key.startswith(prefix):
                on_change(key, value)


def _value(secret: Data) -> bytes | None:
    """Return the value in one of our Secrets: None if it is empty, no bytes if it has something else."""
    text = (secret.data or {}).get("value")
    with contextlib.suppress(ValueError):
        return b64decode(text, validate=True) if text else None
    return b""
