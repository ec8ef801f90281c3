"""A list of objects that is kept current.

    listing --> watching --ends, or breaks--> watching again from the last version seen
       ^           |
       +-----------+ the server no longer knows that version (410), or the caller reports a missed change

While the server is away, the last known objects stay in use.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Generic

from serving.runtime.kubernetes.api import ApiError, GoneError, Kind, KubernetesApi
from serving.runtime.kubernetes.objects import Resource
from serving.runtime.stopping import cancel_all

log = logging.getLogger(__name__)

RETRY_S = 0.3
MAX_RETRY_S = 5.0


class Reflector(Generic[Kind]):
    """See the module."""

    def __init__(
        self,
        api: KubernetesApi,
        resource: Resource,
        kind: type[Kind],
        *,
        on_list: Callable[[dict[str, Kind]], Awaitable[None]],
        on_change: Callable[[str, Kind | None], None],
        labels: str = "",
        fields: str = "",
    ) -> None:
        """Prepare to follow the objects that a selector matches.

        Args:
            api: where they are.
            resource: what they are.
            kind: the type as which they are read.
            on_list: is called with all of them, at the start and whenever changes may have been missed; if it raises
                `ApiError`, the list is read again.
            on_change: is called with the name of one that changed, and the object, None if it is gone.
            labels: selector by labels.
            fields: selector by fields.
        """
        self._api = api
        self._resource = resource
        self._kind: type[Kind] = kind
        self._on_list = on_list
        self._on_change = on_change
        self._selector = {"labels": labels, "fields": fields}
        self._version = ""
        self._task: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._trouble = ""

    async def start(self) -> None:
        """Read the list, and follow it from now on; if the server is away, do so once it is back.

        Raises:
            ApiError: the server refuses it for good.
        """
        try:
            await self._list()
        except ApiError as error:
            if not error.is_passing:
                raise
        self._task = asyncio.create_task(self._follow())

    def cut(self) -> None:
        """Read the list again: something was missed."""
        self._version = ""
        if self._watching is not None:
            self._watching.cancel()

    def stop(self) -> None:
        """Stop following it."""
        for task in (self._task, self._watching):
            if task is not None:
                task.cancel()

    async def close(self) -> None:
        """Stop following it, and wait until that is done."""
        await cancel_all(*(task for task in (self._task, self._watching) if task is not None))

    async def _list(self) -> None:
        found, version = await self._api.list(self._resource, self._kind, **self._selector)
        await self._on_list(found)
        self._version = version
        self._say(None)

    async def _follow(self) -> None:
        pause_s = RETRY_S
        while True:
            try:
                if not self._version:
                    await self._list()
                self._watching = asyncio.create_task(self._watch())
                await asyncio.wait([self._watching])
                if not self._watching.cancelled():
                    self._watching.result()
                pause_s = RETRY_S
            except GoneError:
                self._version = ""
            except ApiError as error:
                self._say(error)
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, MAX_RETRY_S)

    async def _watch(self) -> None:
        async for what, read in self._api.watch(self._resource, self._kind, self._version, **self._selector):
            self._version = read.metadata.resource_version
            self._say(None)
            if what == "DELETED":
                self._on_change(read.metadata.name, None)
            elif isinstance(read, self._kind):
                self._on_change(read.metadata.name, read)

    def _say(self, error: ApiError | None) -> None:
        """Log a trouble once, until it is over or changes."""
        text = str(error or "")
        if text != self._trouble:
            self._trouble = text
            if text:
                log.warning("%s cannot be read; what was known of them stays in use: %s", self._resource.name, text)
            else:
                log.info("%s can be read again", self._resource.name)
