"""A list of objects that is kept current.

    listing --> watching --ends, or breaks--> pause --> watching again from the last version seen
       ^           |
       +-- pause --+ the server no longer knows that version (410), a change cannot be processed, or the caller
                     reports a missed one

While the server is away, the last known objects stay in use. Pauses grow until a watch lasts.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Generic

from foundation.text import one_line
from serving.runtime.alarm import Alarm
from serving.runtime.kubernetes.api import ApiError, GoneError, Kind, KubernetesApi
from serving.runtime.kubernetes.objects import Resource
from serving.runtime.stopping import cancel_all
from serving.runtime.world import world

log = logging.getLogger(__name__)

RETRY_S = 0.3
MAX_RETRY_S = 5.0
STEADY_S = 1.0
"""The shortest life of a watch that works."""


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
            on_list: is called with all of them, at the start and whenever changes may have been missed; if it fails,
                the list is read again.
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
        self._pause_s = RETRY_S
        self._task: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._alarm = Alarm(log, f"{resource.name} can be read again")

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
        self._alarm.update("")

    async def _follow(self) -> None:
        while True:
            try:
                if not self._version:
                    await self._list()
                await self._watch()
            except GoneError:
                self._version = ""
            except ApiError as error:
                self._warn(error)
            except Exception as error:
                self._version = ""  # the same watch would bring it again
                self._warn(error)
            await asyncio.sleep(self._pause_s * world().entropy.uniform(0.5, 1.0))
            self._pause_s = min(2 * self._pause_s, MAX_RETRY_S)

    async def _watch(self) -> None:
        """Process changes until the watch ends, or is cut."""
        started_s = world().now()
        self._watching = asyncio.create_task(self._process())
        await asyncio.wait([self._watching])
        is_cut = self._watching.cancelled()
        if is_cut or world().now() - started_s >= STEADY_S:
            self._pause_s = RETRY_S
        if not is_cut:
            self._watching.result()

    async def _process(self) -> None:
        async for what, read in self._api.watch(self._resource, self._kind, self._version, **self._selector):
            self._version = read.metadata.resource_version or self._version
            self._alarm.update("")
            if what == "DELETED":
                self._on_change(read.metadata.name, None)
            elif isinstance(read, self._kind):
                self._on_change(read.metadata.name, read)

    def _warn(self, error: Exception) -> None:
        what = f"{self._resource.name} cannot be read; what was known of them stays in use"
        self._alarm.update(f"{what}: {one_line(error)}")
