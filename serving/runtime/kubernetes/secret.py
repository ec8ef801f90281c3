"""A Secret with one value, which outlives the processes that share it."""

import asyncio
import contextlib
from base64 import b64decode, b64encode
from collections.abc import Callable

from serving.runtime.kubernetes.api import KubernetesApi
from serving.runtime.kubernetes.objects import SECRETS, Data
from serving.runtime.kubernetes.reflector import Reflector
from serving.runtime.ports import RuntimeUnavailableError

FILLING_PAUSES_S = (0.0, 0.1, 0.3, 1.0, 3.0)
"""The waits before each attempt to fill an empty Secret: another process may be quicker."""


class SharedSecret:
    """See the module."""

    def __init__(self, api: KubernetesApi, name: str, on_change: Callable[[bytes | None], None]) -> None:
        """Prepare to use a Secret; `on_change` is called with each new value, None if the Secret is empty."""
        self.name = name
        self.value: bytes | None = None
        self._api = api
        self._on_change = on_change
        self._reflector: Reflector[Data] | None = None

    async def fill(self, value: bytes) -> bytes:
        """Put a value into the Secret if it is empty; return its value after that.

        The Secret itself must exist: a right to create one could not be limited to its name.

        Raises:
            RuntimeUnavailableError: the API server cannot be reached or refuses us, or there is no Secret.
        """
        for pause_s in FILLING_PAUSES_S:
            await asyncio.sleep(pause_s)
            if (secret := await self._api.get(SECRETS, Data, self.name)) is None:
                raise RuntimeUnavailableError(
                    f"there is no Secret {self.name} in namespace {self._api.namespace}; expected an empty one "
                    f"(kubectl create secret generic {self.name})"
                )
            if (held := _value(secret)) is not None:
                return held
            # Only the version that was empty is changed, so one of several processes succeeds.
            version, content = secret.metadata.resource_version, {"data": {"value": b64encode(value).decode()}}
            if await self._api.patch_unchanged(SECRETS, self.name, version, content) is not None:
                return value
        raise RuntimeUnavailableError(
            f"Secret {self.name} in namespace {self._api.namespace} is empty, but changes whenever this process fills it; "
            "expected nobody to change it meanwhile"
        )

    async def follow(self) -> None:
        """Keep `value` current from now on.

        Raises:
            ApiError: the API server does not allow it.
        """
        if self._reflector is None:
            fields = f"metadata.name={self.name}"
            reflector = Reflector(
                self._api,
                SECRETS,
                Data,
                on_list=self._on_list,
                on_change=lambda _, secret: self._take(secret),
                fields=fields,
            )
            await reflector.start()
            self._reflector = reflector

    async def close(self) -> None:
        """Stop following it."""
        if self._reflector is not None:
            await self._reflector.close()

    async def _on_list(self, found: dict[str, Data]) -> None:
        self._take(found.get(self.name))

    def _take(self, secret: Data | None) -> None:
        if secret is None:
            return  # nobody can fill it until it exists again: keep the last value
        if self.value != (value := _value(secret)):
            self.value = value
            self._on_change(value)


def _value(secret: Data) -> bytes | None:
    """Return the value in one of our Secrets: None if it is empty, no bytes if it has something else."""
    text = (secret.data or {}).get("value")
    with contextlib.suppress(ValueError):
        return b64decode(text, validate=True) if text else None
    return b""
