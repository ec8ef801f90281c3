"""A folder that only this user can change, and its files.

It is kept open, and files are accessed through that handle: somebody who may write its parent can neither lead us
elsewhere with a symbolic link nor swap in another folder. Only sockets have to be named by their paths.
"""

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from serving.runtime.ports import RuntimeUnavailableError
from serving.runtime.world import world

REMEDY = "choose your own with --discovery-dir (mkdir -m 700 FOLDER)"

MAX_SOCKET_BYTES = 107 if sys.platform == "linux" else 103
"""The room in `sockaddr_un`."""


class PrivateFolder:
    """See the module."""

    def __init__(self, path: Path, *, what: str = "the discovery folder", remedy: str = REMEDY) -> None:
        """Open the folder, creating it if there is none.

        Args:
            path: where it is.
            what: how a message names it.
            remedy: what a message says to do if it cannot be used.

        Raises:
            RuntimeUnavailableError: it is a link, somebody else's or open to others, or cannot be used.
        """
        self.path = path
        self._what = what
        self._remedy = remedy
        self._handle = self._open()

    def reopen_if_replaced(self) -> None:
        """Open the folder that is at the path now, if it is no longer the one that was opened.

        Raises:
            RuntimeUnavailableError: as at the first opening.
        """
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(self.path.lstat(), os.fstat(self._handle)):
                return
        replaced, self._handle = self._handle, self._open()
        os.close(replaced)

    def names(self) -> list[str]:
        """Return the names of everything in it, in order."""
        return sorted(os.listdir(self._handle))  # noqa: PTH208 (a handle, not a path)

    def stat(self, name: str) -> os.stat_result:
        """Return the facts about a file, or about the link itself."""
        return os.stat(name, dir_fd=self._handle, follow_symlinks=False)

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Open a file.

        Raises:
            OSError: there is none, or it is a link, a pipe, a folder or another user's.
        """
        handle = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=self._handle)
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.getuid():
            os.close(handle)
            raise PermissionError("not a regular file of this user")
        return handle

    def read(self, name: str, *, max_bytes: int) -> bytes:
        """Return the content of a file.

        Raises:
            OSError: it cannot be read.
            ValueError: it is larger than that.
        """
        with os.fdopen(self.open(name), "rb") as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise ValueError(f"more than {max_bytes} bytes")
        return data

    def replace(self, name: str, data: bytes, *, by_way_of: str) -> None:
        """Replace a file as a whole, or leave the old one unchanged.

        It is not synced to the disk: no process that a file here describes survives a power cut.
        """
        self.remove(by_way_of)
        try:
            with os.fdopen(self.open(by_way_of, os.O_CREAT | os.O_EXCL | os.O_WRONLY), "wb") as file:
                file.write(data)
            self.rename(by_way_of, name)
        except OSError:
            self.remove(by_way_of)
            raise

    def create(self, name: str, data: bytes, *, by_way_of: str) -> None:
        """Create a file as a whole, unless there is one; it is for later processes, too, and survives a power cut.

        Raises:
            OSError: there is one (FileExistsError), or it cannot be written.
        """
        self.remove(by_way_of)
        try:
            with os.fdopen(self.open(by_way_of, os.O_CREAT | os.O_EXCL | os.O_WRONLY), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file)
            os.link(by_way_of, name, src_dir_fd=self._handle, dst_dir_fd=self._handle)
        finally:
            self.remove(by_way_of)

    def rename(self, name: str, new_name: str) -> None:
        """Give a file another name."""
        os.rename(name, new_name, src_dir_fd=self._handle, dst_dir_fd=self._handle)

    def touch(self, name: str) -> None:
        """Set a file's last change to now, so that cleaners of temporary files leave it; its time of writing stays."""
        os.utime(name, ns=(world().wall_ns(), self.stat(name).st_mtime_ns), dir_fd=self._handle, follow_symlinks=False)

    def remove(self, *names: str) -> None:
        """Remove files that may be there; what cannot be removed stays: it is not one of our files."""
        for name in names:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._handle)

    def close(self) -> None:
        """Close the folder."""
        os.close(self._handle)

    def _open(self) -> int:
        path = self.path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path.is_symlink():
                raise self._refusal("is a symbolic link")
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise self._refusal(f"cannot be used: {error.strerror}") from error
        facts = os.fstat(handle)
        if facts.st_uid == os.getuid() and not facts.st_mode & 0o022:
            return handle
        os.close(handle)
        mode = stat.S_IMODE(facts.st_mode)
        open_to_others = f"can be written by others (mode {mode:o}; chmod 700 {path} fixes it)"
        raise self._refusal(open_to_others if facts.st_uid == os.getuid() else f"belongs to user {facts.st_uid}")

    def _refusal(self, why: str) -> RuntimeUnavailableError:
        return RuntimeUnavailableError(f"{self._what} {self.path} {why}; {self._remedy}")


def socket_name(path: Path, *, remedy: str = "choose a shorter --discovery-dir or TMPDIR") -> str:
    """Return a path as the name of a socket; a message says that remedy.

    Raises:
        RuntimeUnavailableError: the system does not allow a name of this length.
    """
    name = str(path)
    if (length := len(os.fsencode(name))) > MAX_SOCKET_BYTES:
        raise RuntimeUnavailableError(
            f"the name of the socket {name} has {length} bytes and the system allows {MAX_SOCKET_BYTES}: {remedy}"
        )
    return name


@contextlib.contextmanager
def for_us_alone() -> Iterator[None]:
    """Make files created within, such as sockets, private to this user. Nothing may wait within."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
