"""Discovery without a server: a folder with a lease file for each process of this host.

    {id}.lease   locked and touched by its process        {id}.sock   where it takes requests
    {id}.json    its keys, replaced as a whole            {id}.zmq    where it publishes events
    token        the folder's processes prove that they know it when they call each other over TCP

A lease whose lock is free belonged to a process that died; the first process to see it removes it. A lease not touched
for its time to live belongs to a process that hangs; it is ignored until it is touched again. If somebody removed one
of our files, the next touch creates it again. Files that others put there are ignored.
"""

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from serving.runtime.alarm import Alarm
from serving.runtime.ports import OnChange, RuntimeUnavailableError, Stop, changes, guarded
from serving.runtime.private_folder import PrivateFolder
from serving.runtime.world import world

log = logging.getLogger(__name__)

POLL_S = 0.2
MAX_BEAT_S = 1.0
MAX_KEYS_BYTES = 16 << 20
"""More than any process registers."""

MAX_SHARED_BYTES = 4096

ORPHAN_S = 60.0
"""How long a file without a lease is left alone: its process may be about to create its lease again."""

SUFFIXES = ("json", "sock", "zmq", "tmp", "new", "lease")
"""The files a process leaves behind; the lease is removed last."""

SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Failures of our process, not of the file."""

Restore = Callable[[], Awaitable[None]]


class FolderDiscovery:
    """See the module."""

    outages = None
    """It needs no server."""

    def __init__(self, path: Path, instance_id: int, *, lease_ttl_s: float) -> None:
        """Take a lease in the folder, creating the folder if there is none.

        Raises:
            RuntimeUnavailableError: the folder cannot be used or is not ours alone, or another process has our id.
        """
        self._folder = PrivateFolder(path)
        self._id = f"{instance_id:x}"
        self._ttl_s = lease_ttl_s
        self._keys: dict[str, bytes] = {}
        self._is_written = True
        self._watches: list[tuple[str, OnChange]] = []
        self._known: dict[str, bytes] = {}
        self._read: dict[str, tuple[tuple[int, int], dict[str, bytes]]] = {}  # id -> version of its file, and its keys
        self._touched: dict[str, tuple[int, float]] = {}  # id -> its lease's time stamp, and when we first saw that
        self._alarms: dict[str, Alarm] = {}
        self._files: dict[str, Restore] = {f"{self._id}.lease": self._restore_lease, f"{self._id}.json": self._restore}
        try:
            if f"{self._id}.lease" in self._folder.names():
                raise RuntimeUnavailableError(
                    f"another process in {path} already has the id {self._id}; start this one again"
                )
            self._lock = self._take_lease()
            self._remove_orphans()
        except OSError as error:
            raise RuntimeUnavailableError(
                f"the discovery folder {path} cannot be used: {error.strerror}; choose another with --discovery-dir"
            ) from error
        self._beating = asyncio.create_task(self._beat())
        self._polling: asyncio.Task[None] | None = None

    def keep(self, path: Path, restore: Restore) -> None:
        """Call `restore` whenever this file, one of ours in the folder, is gone."""
        self._files[path.name] = restore

    def share(self, name: str, data: bytes) -> bytes:
        """Return the content of a file that all processes share; create it with this content if there is none.

        Raises:
            OSError: it can neither be read nor created.
            ValueError: it is too large.
        """
        try:
            return self._folder.read(name, max_bytes=MAX_SHARED_BYTES)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                self._folder.create(name, data, by_way_of=f"{self._id}.tmp")
            return self._folder.read(name, max_bytes=MAX_SHARED_BYTES)

    async def put(self, key: str, value: bytes) -> None:
        """Register a key."""
        self._keys[key] = value
        self._write()

    async def delete(self, key: str) -> None:
        """Remove one of our keys."""
        if self._keys.pop(key, None) is not None:
            self._write()

    async def claim(self, name: str) -> int | None:
        """See `Discovery`; the file holds a term and the id of its holder, and is locked while it is read and written."""
        try:
            handle = self._folder.open(f"claim-{name}", os.O_CREAT | os.O_RDWR)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                text = os.pread(handle, MAX_SHARED_BYTES, 0).decode(errors="replace")
                term, holder, *_ = *text.split(), "", ""
                last = int(term) if term.isdecimal() else 0
                if holder == self._id:
                    return last
                if _is_id(holder) and self._is_alive(holder):
                    return None
                fresh = max(last + 1, int(world().wall_s()))  # higher also if a cleaner removed the file
                os.pwrite(handle, f"{fresh:<20} {self._id:<16}".encode(), 0)
                return fresh
            finally:
                os.close(handle)
        except BlockingIOError:  # another process is asking at this moment
            return None
        except OSError as error:
            raise RuntimeUnavailableError(
                f"cannot read who holds {name} from {self._folder.path}: {error.strerror}"
            ) from error

    async def watch(self, prefix: str, on_change: OnChange) -> Stop:
        """Report the keys below a prefix, now and as they change."""
        entry = (prefix, guarded(on_change, "a key in discovery"))
        self._poll()
        self._watches.append(entry)
        for key, value in list(self._known.items()):
            if key.startswith(prefix):
                entry[1](key, value)
        if self._polling is None:
            self._polling = asyncio.create_task(self._poll_for_ever())
        return lambda: self._watches.remove(entry) if entry in self._watches else None

    async def close(self) -> None:
        """Remove our lease and keys."""
        tasks = [task for task in (self._beating, self._polling) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._watches.clear()
        self._remove(self._id)
        os.close(self._lock)
        self._folder.close()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(min(self._ttl_s / 4, MAX_BEAT_S))
            try:
                self._folder.reopen_if_replaced()
            except (OSError, RuntimeUnavailableError) as error:
                self._has_trouble("this process cannot stay in discovery", error)
                continue
            self._is_well("this process cannot stay in discovery")
            for name, restore in list(self._files.items()):
                await self._touch(name, restore)
            if not self._is_written:
                self._write()

    async def _touch(self, name: str, restore: Restore) -> None:
        trouble = f"{name} of this process was removed and cannot be created again"
        try:
            try:
                self._folder.touch(name)
            except FileNotFoundError:
                await restore()
        except OSError as error:
            self._has_trouble(trouble, error)
        else:
            self._is_well(trouble)

    def _take_lease(self) -> int:
        fresh = f"{self._id}.new"
        self._folder.remove(fresh)
        lock = self._folder.open(fresh, os.O_CREAT | os.O_EXCL | os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._folder.rename(fresh, f"{self._id}.lease")  # locked before anyone sees it
        except OSError:
            os.close(lock)
            raise
        return lock

    async def _restore_lease(self) -> None:
        lost, self._lock = self._lock, self._take_lease()
        os.close(lost)

    async def _restore(self) -> None:
        if self._keys:
            self._write()

    def _write(self) -> None:
        """Write our keys; if that fails now, try again with every touch of the lease."""
        content = msgspec.json.encode({key: value.decode() for key, value in self._keys.items()})
        trouble = "this process cannot register what it serves, so others do not see it yet"
        try:
            self._folder.replace(f"{self._id}.json", content, by_way_of=f"{self._id}.tmp")
            self._is_written = True
            self._is_well(trouble)
        except OSError as error:
            self._is_written = False
            self._has_trouble(trouble, error)

    def _remove_orphans(self) -> None:
        """Remove the files of dead processes whose leases somebody removed."""
        names = self._folder.names()
        for name in names:
            id, _, suffix = name.partition(".")
            if suffix not in SUFFIXES or not _is_id(id) or f"{id}.lease" in names:
                continue
            with contextlib.suppress(FileNotFoundError):  # another starting process was quicker
                if world().wall_s() - self._folder.stat(name).st_ctime > ORPHAN_S:
                    self._folder.remove(name)

    def _remove(self, id: str) -> None:
        self._folder.remove(*(f"{id}.{suffix}" for suffix in SUFFIXES))

    async def _poll_for_ever(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            self._poll()

    def _poll(self) -> None:
        trouble = "other processes cannot be read; what was known of them stays in use"
        try:
            found = self._find()
        except OSError as error:
            self._has_trouble(trouble, error)
            return
        self._is_well(trouble)
        before, self._known = self._known, found
        for key, value in changes(before, found):
            for prefix, on_change in list(self._watches):
                if key.startswith(prefix):
                    on_change(key, value)

    def _find(self) -> dict[str, bytes]:
        """Return the keys of every live process."""
        found: dict[str, bytes] = {}
        parts = (name.partition(".") for name in self._folder.names())
        ids = dict.fromkeys(id for id, _, suffix in parts if suffix == "lease" and _is_id(id))
        for id in ids:
            if self._is_alive(id):
                keys = self._read_keys(id)
                # A key that ends in an id is that process's, whoever else claims it.
                found |= {key: value for key, value in keys.items() if key not in found or key.endswith(f"/{id}")}
        self._read = {id: seen for id, seen in self._read.items() if id in ids}
        self._touched = {id: seen for id, seen in self._touched.items() if id in ids}
        return found

    def _is_alive(self, id: str) -> bool:
        if id == self._id:
            return True
        try:
            handle = self._folder.open(f"{id}.lease")
        except OSError as error:
            if error.errno in SHORTAGES:
                raise
            return False  # just removed, or no lease
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return self._is_fresh(id, os.fstat(handle).st_ctime_ns)
        else:
            self._remove(id)  # its process died
            return False
        finally:
            os.close(handle)

    def _is_fresh(self, id: str, stamp: int) -> bool:
        now = world().now()  # our own clock: the wall clock may jump
        seen = self._touched.get(id)
        if seen is None or seen[0] != stamp:
            self._touched[id] = (stamp, now)
            return True
        return now - seen[1] < self._ttl_s

    def _read_keys(self, id: str) -> dict[str, bytes]:
        name = f"{id}.json"
        try:
            facts = self._folder.stat(name)
        except FileNotFoundError:
            return {}  # not written yet, or just removed
        version = (facts.st_mtime_ns, facts.st_ino)
        seen = self._read.get(id)
        if seen is not None and seen[0] == version:
            return seen[1]
        keys: dict[str, bytes] = {}
        try:
            texts = msgspec.json.decode(self._folder.read(name, max_bytes=MAX_KEYS_BYTES), type=dict[str, str])
            keys = {key: value.encode() for key, value in texts.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            if isinstance(error, OSError) and error.errno in SHORTAGES:
                raise
            log.warning("%s is not a valid file of keys and is ignored: %s", self._folder.path / name, error)
        self._read[id] = (version, keys)
        return keys

    def _has_trouble(self, what: str, error: Exception) -> None:
        reason = f"{error.strerror or error} ({self._folder.path})" if isinstance(error, OSError) else str(error)
        self._alarm(what).update(f"{what}; trying again: {reason}")

    def _is_well(self, what: str) -> None:
        self._alarm(what).update("")

    def _alarm(self, what: str) -> Alarm:
        return self._alarms.setdefault(what, Alarm(log, f"resolved: {what}"))


def _is_id(text: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{1,16}", text) is not None
