"""Discovery without a server: a folder with a lease file for each process of this host.

A process holds a lock on its lease file and touches it. A lease whose lock is free belonged to a process that died,
and is removed by whoever sees it first; a lease not touched for its time to live belongs to a process that hangs,
and is ignored until it is touched again. The keys lie beside the lease in one JSON file, replaced as a whole.
"""

import asyncio
import fcntl
import os
import time
from pathlib import Path

import msgspec

from serving.runtime.ports import OnChange, RuntimeUnavailableError, Stop

POLL_S = 0.2


class FolderDiscovery:
    """See the module."""

    def __init__(self, folder: Path, instance_id: int, *, lease_ttl_s: float) -> None:
        """Take a lease in the folder, making the folder if there is none.

        Raises:
            RuntimeUnavailableError: the folder belongs to somebody else or cannot be written.
        """
        self._folder = folder
        self._lease = folder / f"{instance_id:x}.lease"
        self._keys_file = folder / f"{instance_id:x}.json"
        self._ttl_s = lease_ttl_s
        self._keys: dict[str, bytes] = {}
        self._watches: list[tuple[str, OnChange]] = []
        self._known: dict[str, bytes] = {}
        self._read: dict[str, tuple[tuple[int, int], dict[str, bytes]]] = {}
        self._touched: dict[str, tuple[int, float]] = {}  # lease -> its time stamp, and when we first saw that
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_uid != os.getuid():
                raise RuntimeUnavailableError(
                    f"the discovery folder {folder} belongs to another user; name one with --discovery-dir"
                )
            fresh = folder / f"{instance_id:x}.new"
            self._lock = os.open(fresh, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            fresh.rename(self._lease)  # locked before anyone can see it
        except OSError as error:
            raise RuntimeUnavailableError(
                f"the discovery folder {folder} cannot be used: {error.strerror}; name one with --discovery-dir"
            ) from error
        self._beating = asyncio.create_task(self._beat())
        self._polling: asyncio.Task[None] | None = None

    async def put(self, key: str, value: bytes) -> None:
        """Register a key."""
        self._keys[key] = value
        self._write()

    async def delete(self, key: str) -> None:
        """Take a key of ours out."""
        if self._keys.pop(key, None) is not None:
            self._write()

    async def watch(self, prefix: str, on_change: OnChange) -> Stop:
        """Tell of keys below a prefix, now and as they change."""
        entry = (prefix, on_change)
        self._poll()
        self._watches.append(entry)
        for key, value in list(self._known.items()):
            if key.startswith(prefix):
                on_change(key, value)
        if self._polling is None:
            self._polling = asyncio.create_task(self._poll_for_ever())
        return lambda: self._watches.remove(entry) if entry in self._watches else None

    async def close(self) -> None:
        """Remove our lease and keys."""
        self._beating.cancel()
        if self._polling is not None:
            self._polling.cancel()
        self._watches.clear()
        _remove(self._lease)
        os.close(self._lock)

    def _write(self) -> None:
        fresh = self._keys_file.with_suffix(".tmp")
        fresh.write_bytes(msgspec.json.encode({key: value.decode() for key, value in self._keys.items()}))
        fresh.rename(self._keys_file)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / 4)
            try:
                os.utime(self._lease)
            except FileNotFoundError:  # the folder was wiped: come back
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                os.close(self._lock)
                fresh = self._lease.with_suffix(".new")
                self._lock = os.open(fresh, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                fresh.rename(self._lease)
                self._write()

    async def _poll_for_ever(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            self._poll()

    def _poll(self) -> None:
        found: dict[str, bytes] = {}
        for lease in sorted(self._folder.glob("*.lease")):
            if self._is_alive(lease):
                found |= self._read_keys(lease.with_suffix(".json"))
        before, self._known = self._known, found
        changes = [(key, None) for key in before if key not in found]
        changes += [(key, value) for key, value in found.items() if before.get(key) != value]  # type: ignore[misc]
        for key, value in changes:
            for prefix, on_change in list(self._watches):
                if key.startswith(prefix):
                    on_change(key, value)

    def _is_alive(self, lease: Path) -> bool:
        if lease == self._lease:
            return True
        try:
            handle = os.open(lease, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return self._is_fresh(lease.name, os.fstat(handle).st_mtime_ns)
        else:
            _remove(lease)  # its process died
            return False
        finally:
            os.close(handle)

    def _is_fresh(self, name: str, stamp: int) -> bool:
        now = time.monotonic()  # our own clock: the wall clock may jump
        seen = self._touched.get(name)
        if seen is None or seen[0] != stamp:
            self._touched[name] = (stamp, now)
            return True
        return now - seen[1] < self._ttl_s

    def _read_keys(self, path: Path) -> dict[str, bytes]:
        try:
            facts = path.stat()
            version = (facts.st_mtime_ns, facts.st_ino)
            seen = self._read.get(path.name)
            if seen is None or seen[0] != version:
                keys = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
                self._read[path.name] = seen = (version, {key: value.encode() for key, value in keys.items()})
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return {}  # not written yet, just removed, or not ours
        return seen[1]


def _remove(lease: Path) -> None:
    """Remove what a process left: keys and sockets first, the lease last."""
    for suffix in (".json", ".sock", ".zmq", ".tmp", ".lease"):
        lease.with_suffix(suffix).unlink(missing_ok=True)
