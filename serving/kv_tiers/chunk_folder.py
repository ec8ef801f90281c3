"""A folder of chunks, one file each; every call here blocks until the disk is done.

    FOLDER/lock                          held by the one worker that uses the folder
    FOLDER/5e/0123456789abcd.kv          the chunk with the key 0x5e0123456789abcd: a header, and its bytes
    FOLDER/5e/0123456789abcd.new         one that is being written; it is renamed when it is complete

Each chunk has its own file: evicting it means removing the file, a full disk only loses the chunk that did not fit, and no
file is ever rewritten, so that a crash leaves whole files and `.new` ones. Files are not synced to the disk: a power cut may
leave files with holes, which their checksums detect. Folders are opened by handle, and links are not followed. If somebody
removes or replaces the folder, its handle leads to the old one until `renew` opens the one at its path.
"""

import contextlib
import errno
import fcntl
import os
import re
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from serving.kv_tiers.tier import VERSION, ChunkFormat, FolderTakenError, TierError

MAGIC = b"dynabench-kv"
FILE_HEADER = struct.Struct("<12sIQQQ")
"""Magic, version, identity of the format, key, and bytes of the chunk."""

REMEDY = "choose one of your own with --kv-disk-folder"

NAME = re.compile(r"([0-9a-f]{14})\.(kv|new)")
FAN = re.compile(r"[0-9a-f]{2}")


class Found(NamedTuple):
    """The content of a folder."""

    keys: list[int]
    """Keys of chunks, the least recently used first."""
    num_removed: int
    """Our files that were removed because they were torn or of another format."""
    num_strange: int
    """Other people's files, which stay."""


class ChunkFolder:
    """See the module."""

    def __init__(self, path: Path, format: ChunkFormat) -> None:
        self.path = path
        self.num_renewals = 0
        """How often it was made again: files that were written before are elsewhere, or gone."""
        self._format = format
        self._handle = -1
        self._lock = -1

    def open(self) -> None:
        """Lock the folder, and create it if there is none.

        Raises:
            TierError: it is another worker's, a link, open to others, or cannot be used.
        """
        self._handle, self._lock = _locked(self.path)

    @property
    def is_lost(self) -> bool:
        """Whether somebody has removed or replaced the folder or its lock since we opened it.

        Raises:
            OSError: it cannot be looked at.
        """
        try:
            found = self.path.lstat(), os.stat("lock", dir_fd=self._handle, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return True
        return not all(map(os.path.samestat, found, (os.fstat(self._handle), os.fstat(self._lock))))

    def renew(self) -> Found:
        """Lock and scan the folder that is at the path now, and create it if there is none.

        Raises:
            TierError: as at the first opening; the lost folder stays open.
            OSError: it cannot be scanned.
        """
        for fresh, handle in zip(_locked(self.path), (self._handle, self._lock), strict=True):
            os.dup2(fresh, handle, inheritable=False)  # other threads may be using these numbers
            os.close(fresh)
        self.num_renewals += 1
        return self.scan()

    def scan(self) -> Found:
        """Return what is there; remove our files that are torn or of another format."""
        used: list[tuple[int, int]] = []
        num_removed = num_strange = 0
        for name in sorted(os.listdir(self._handle)):  # noqa: PTH208 (a handle, not a path)
            if name == "lock":
                continue
            if not FAN.fullmatch(name):
                num_strange += 1
                continue
            try:
                with self._fan(name) as fan:
                    for entry in os.listdir(fan):  # noqa: PTH208
                        match = NAME.fullmatch(entry)
                        key = int(name + match[1], 16) if match else 0
                        if match and match[2] == "kv" and (used_ns := self._when_used(fan, entry, key)):
                            used.append((used_ns, key))
                        elif match and _remove(fan, entry):
                            num_removed += 1
                        else:
                            num_strange += 1
            except OSError:  # not a folder, or one that cannot be opened
                num_strange += 1
        return Found([key for _, key in sorted(used)], num_removed, num_strange)

    def read(self, key: int, memory: memoryview) -> str:
        """Read a chunk; return what is wrong with it, "" if it is right.

        Raises:
            OSError: it cannot be read (FileNotFoundError: it is not there).
        """
        fan, name = _place(key)
        with self._fan(fan) as folder, _closing(_open_file(folder, name)) as file:
            if os.fstat(file).st_size != self._num_bytes:
                return "it has another size"
            header = bytearray(FILE_HEADER.size)
            num_read = os.readv(file, [header, memory]) - FILE_HEADER.size
            while 0 <= num_read < len(memory) and (more := os.readv(file, [memory[num_read:]])):
                num_read += more
            if num_read != len(memory):
                return "it ends too early"
            if header != self._header(key):
                return "it is of another format"
            os.utime(file)  # so that the order of use survives a restart
        return self._format.find_fault(memory, key)

    def write(self, key: int, chunk: memoryview) -> None:
        """Write a chunk, either completely or not at all.

        Raises:
            OSError: it cannot be written.
        """
        fan, name = _place(key)
        new = name.removesuffix("kv") + "new"
        with contextlib.suppress(FileExistsError):
            os.mkdir(fan, 0o700, dir_fd=self._handle)
        with self._fan(fan) as folder:
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                with _closing(os.open(new, flags, 0o600, dir_fd=folder)) as file:
                    num_written = os.writev(file, [self._header(key), chunk]) - FILE_HEADER.size
                    while num_written < len(chunk):  # a full disk may report that only now
                        if num_written < 0 or not (more := os.write(file, chunk[num_written:])):
                            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                        num_written += more
                os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                _remove(folder, new)
                raise

    def remove(self, key: int) -> None:
        """Remove a chunk, which may already be gone.

        Raises:
            OSError: it cannot be removed.
        """
        fan, name = _place(key)
        with contextlib.suppress(FileNotFoundError), self._fan(fan) as folder:
            os.unlink(name, dir_fd=folder)

    def close(self) -> None:
        """Unlock the folder; its files stay."""
        for handle in (self._lock, self._handle):
            if handle >= 0:
                os.close(handle)
        self._lock = self._handle = -1

    @property
    def _num_bytes(self) -> int:
        return FILE_HEADER.size + self._format.chunk_bytes

    def _header(self, key: int) -> bytes:
        return FILE_HEADER.pack(MAGIC, VERSION, self._format.identity, key, self._format.chunk_bytes)

    def _when_used(self, folder: int, name: str, key: int) -> int:
        """Return when a chunk was last used (ns), 0 if the file is not a chunk of ours."""
        try:
            with _closing(_open_file(folder, name)) as file:
                facts = os.fstat(file)
                is_ours = os.read(file, FILE_HEADER.size) == self._header(key)
        except OSError:
            return 0
        return facts.st_mtime_ns if is_ours and facts.st_size == self._num_bytes else 0

    @contextlib.contextmanager
    def _fan(self, name: str) -> Iterator[int]:
        with _closing(_enter(name, self._handle)) as handle:
            yield handle


def _locked(path: Path) -> tuple[int, int]:
    """Open a folder that is ours alone; return its handle and that of its lock.

    Raises:
        TierError: see `ChunkFolder.open`.
    """
    with contextlib.ExitStack() as opened:
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = _enter(path)
            opened.callback(os.close, handle)
            facts = os.fstat(handle)
            if facts.st_uid != os.getuid():
                raise TierError(f"{path}: the folder for KV belongs to user {facts.st_uid}; {REMEDY}")
            if facts.st_mode & 0o022:
                raise TierError(f"{path}: other users can write to the folder for KV (to fix: chmod 700 {path})")
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            lock = os.open("lock", flags, 0o600, dir_fd=handle)
            opened.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FolderTakenError(
                f"{path}: another worker keeps its KV in this folder; use one folder for each worker"
            ) from error
        except OSError as error:
            why = "it is a symbolic link" if path.is_symlink() else error.strerror
            raise TierError(f"{path}: the folder for KV cannot be used: {why}; {REMEDY}") from error
        opened.pop_all()
    return handle, lock


def _place(key: int) -> tuple[str, str]:
    text = f"{key:016x}"
    return text[:2], text[2:] + ".kv"


def _enter(path: Path | str, within: int | None = None) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)


def _open_file(folder: int, name: str) -> int:
    """Open one of our files.

    Raises:
        OSError: there is none, or it is a link, a pipe, a folder or another user's.
    """
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    facts = os.fstat(file)
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.getuid():
        os.close(file)
        raise PermissionError(errno.EPERM, "not a regular file of this user")
    return file


def _remove(folder: int, name: str) -> bool:
    """Remove a file or link; return whether that succeeded."""
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _closing(handle: int) -> Iterator[int]:
    try:
        yield handle
    finally:
        os.close(handle)
