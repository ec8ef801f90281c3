"""The keys of all live processes, found by watching their Leases and their pods' readiness.

A process's keys are read when its Lease names another version of them than the last one read.
"""

import asyncio
import logging
from collections.abc import Callable

import msgspec

from serving.runtime.kubernetes.api import ApiError, KubernetesApi
from serving.runtime.kubernetes.names import APP, APP_NAME, PROCESS, process_object, process_of
from serving.runtime.kubernetes.objects import CONFIG_MAPS, ENDPOINT_SLICES, LEASES, Data, EndpointSlice, Lease
from serving.runtime.kubernetes.presence import Presence
from serving.runtime.kubernetes.reflector import Reflector
from serving.runtime.ports import changes
from serving.runtime.stopping import cancel_all
from serving.runtime.world import world

log = logging.getLogger(__name__)

MAX_FETCHES = 16

Keys = dict[str, bytes]


class Record(msgspec.Struct, frozen=True):
    """The keys of a process."""

    version: int = 0
    keys: Keys = {}


NOTHING = Record()


class Others:
    """See the module."""

    def __init__(self, api: KubernetesApi, own: str, tell: Callable[[str, bytes | None], None]) -> None:
        """Prepare to watch as the process with this id; `tell` is called with each key that changes, and its value."""
        self.keys: Keys = {}
        self._api = api
        self._own = own
        self._tell = tell
        self._presence = Presence(own)
        self._living: frozenset[str] = frozenset()
        self._records: dict[str, Record] = {}
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._fetches = asyncio.Semaphore(MAX_FETCHES)
        self._settling: asyncio.Handle | None = None
        self._slices = Reflector(
            api,
            ENDPOINT_SLICES,
            EndpointSlice,
            on_list=self._on_slices,
            on_change=self._on_slice,
            labels=f"{APP}={APP_NAME}",
        )
        self._leases = Reflector(api, LEASES, Lease, on_list=self._on_leases, on_change=self._on_lease, labels=PROCESS)

    async def start(self) -> None:
        """Report the keys that are there now, and changes from then on.

        Raises:
            ApiError: the API server does not allow it.
        """
        await self._slices.start()
        try:
            await self._leases.start()
        except BaseException:
            self._slices.stop()
            raise

    def stop(self) -> None:
        """Stop watching."""
        for reflector in (self._slices, self._leases):
            reflector.stop()
        for task in self._fetching.values():
            task.cancel()
        if self._settling is not None:
            self._settling.cancel()

    async def close(self) -> None:
        """Stop watching, and wait until that is done."""
        self.stop()
        await asyncio.gather(self._slices.close(), self._leases.close(), cancel_all(*self._fetching.values()))

    def check(self, renewed: str) -> None:
        """Restart the watches if they did not show our last Lease renewal: then they show nothing."""
        own = self._presence.processes.get(self._own)
        if own is None or own.renewed != renewed:
            self._slices.cut()
            self._leases.cut()

    async def _on_slices(self, found: dict[str, EndpointSlice]) -> None:
        self._presence.on_slices(found)
        self._settle()

    def _on_slice(self, name: str, found: EndpointSlice | None) -> None:
        self._presence.on_slice(name, found)
        self._settle_soon()

    async def _on_leases(self, found: dict[str, Lease]) -> None:
        records, _ = await self._api.list(CONFIG_MAPS, Data, labels=PROCESS)
        # By their names, which are unique: anyone can give a label twice.
        now, leases = world().now(), {id: lease for name, lease in found.items() if (id := process_of(name))}
        for id in [id for id in self._presence.processes if id not in leases]:
            self._forget(id)
        for id, lease in leases.items():
            self._presence.on_lease(now, id, lease)
        for name, record in records.items():
            if (id := process_of(name)) in leases:
                self._take(id, record)
        self._settle()

    def _on_lease(self, name: str, lease: Lease | None) -> None:
        if not (id := process_of(name)):
            return
        if lease is None:
            self._forget(id)
        else:
            self._presence.on_lease(world().now(), id, lease)
            has_news = self._presence.processes[id].version != self._records.get(id, NOTHING).version
            if has_news and id not in self._fetching:
                self._fetching[id] = asyncio.create_task(self._fetch(id))
        # Others are compared with us, so our own renewals show who is late with theirs.
        if lease is None or id == self._own or id not in self._living:
            self._settle_soon()

    async def _fetch(self, id: str) -> None:
        """Read the keys of a process until they are current; if that fails, its next renewal triggers another try."""
        wanted = None
        try:
            while (process := self._presence.processes.get(id)) is not None and process.version != wanted:
                wanted = process.version
                async with self._fetches:
                    record = await self._api.get(CONFIG_MAPS, Data, process_object(id))
                if record is not None and id in self._presence.processes:
                    self._take(id, record)
                    self._settle_soon()
        except ApiError as error:
            log.debug("the keys of process %s could not be read: %s", id, error)
        finally:  # at once: a later version starts another fetch
            del self._fetching[id]

    def _take(self, id: str, record: Data) -> None:
        version, texts = record.metadata.version, {}
        try:
            texts = msgspec.json.decode((record.data or {}).get("keys", "{}"), type=dict[str, str])
        except ValueError as error:
            log.warning("ConfigMap %s has no valid keys and is ignored: %s", record.metadata.name, error)
        # Whatever version it names: a read that was overtaken differs from the Lease, which starts another one.
        self._records[id] = Record(version, {key: text.encode() for key, text in texts.items()})

    def _forget(self, id: str) -> None:
        self._presence.forget(id)
        self._records.pop(id, None)

    def _settle_soon(self) -> None:
        """Settle once for all that happens in this turn of the loop."""
        if self._settling is None:
            self._settling = asyncio.get_running_loop().call_soon(self._settle)

    def _settle(self) -> None:
        """Report the changes."""
        self._settling = None
        living = self._presence.living()
        self._living = frozenset(living)
        found = {
            key: value
            for id in living
            for key, value in self._records.get(id, NOTHING).keys.items()
            if self._may_have(id, key)
        }
        before, self.keys = self.keys, found
        for key, value in changes(before, found):
            self._tell(key, value)

    def _may_have(self, id: str, key: str) -> bool:
        """Return whether a process may register a key: not one that ends in the id of another."""
        owner = key.rpartition("/")[2]
        return owner == id or owner not in self._presence.processes
