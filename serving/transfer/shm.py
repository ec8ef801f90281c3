"""Shared memory, between processes of one user on one host.

An owner's memory has no name. A process that connects to its Unix socket, in a folder that is this user's alone, gets
a handle and reads without the owner's help. That connection stays: it carries notices, and ends with the owner, so that
memory whose owner is gone is neither read nor kept.

    FOLDER/{id}.kv     an owner's socket; if nobody listens there, the next agent removes it
    FOLDER/{id}.new    the same, until the owner listens there

Readers read through the handle (`preadv`) instead of mapping it: the system copies just as fast, without this
process's interpreter lock, and nothing that an owner does can kill a reader with SIGBUS.
"""

import asyncio
import contextlib
import functools
import os
import socket
import stat
import struct
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from serving.runtime.memory.node import NODE
from serving.runtime.ports import RuntimeUnavailableError
from serving.runtime.private_folder import PrivateFolder, for_us_alone, socket_name
from serving.runtime.world import world
from serving.transfer.agent import Piece, TransferError
from serving.transfer.links import Link, Links, check_welcome
from serving.transfer.memory import SEALS, Memory, portions
from serving.transfer.owner import Owner
from serving.transfer.sockets import BACKLOG, SocketConnection, SocketListener
from serving.transfer.stream import CHUNK_BYTES, Stream
from serving.transfer.way import OnNotice, OnTurn, OwnerAddress
from serving.transfer.wire import ID_BYTES, WELCOME, leave_notice

if sys.platform == "linux":
    import fcntl

MAX_HALF_MADE_S = 60.0
THREADS = 2
"""Threads that copy for one agent; more would not be faster."""

LARGE_BYTES = 16 * CHUNK_BYTES
"""What a thread copies at a time: some 2 ms of work, for which a cancelled read has to wait."""


class ShmAddress(OwnerAddress, frozen=True, tag="shm"):
    """The path of its socket."""

    host: str
    """Identifies the host and its boot."""
    socket: str


class Shm:
    """The way through shared memory."""

    address_kind = ShmAddress
    needs_handle = True

    def __init__(self, folder: Path | None = None) -> None:
        """Prepare it.

        Args:
            folder: for our socket; nobody else may write there. By default, a folder of this user.
        """
        self._path = folder or _default_folder()
        self._id = b""
        self._memory: Memory | None = None
        self._folder: PrivateFolder | None = None
        self._name = ""
        self._owner: Owner | None = None
        self._links: Links[ShmAddress] = Links(self._dial)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kv-copy")

    async def open(self, memory: Memory, on_notice: OnNotice, *, id: str) -> ShmAddress:
        """Listen at our own socket.

        Raises:
            TransferError: this is not possible here.
        """
        if sys.platform != "linux":
            raise TransferError(f"shared memory for KV needs Linux, not {sys.platform}; choose tcp", "refused")
        if NODE.get() is not None:
            raise TransferError("nodes of a memory network share no memory for KV; choose tcp", "refused")
        self._memory, self._id, self._name = memory, bytes.fromhex(id), f"{id[:16]}.kv"
        path = self._path / self._name
        try:
            self._folder = PrivateFolder(
                self._path, what="the folder for sockets of KV", remedy=_remedy("folder of your own")
            )
            _remove_orphans(self._path, self._folder)
            listener = _listen(socket_name(path.with_suffix(".new"), remedy=_remedy("shorter folder")))
            self._folder.rename(path.with_suffix(".new").name, self._name)
        except RuntimeUnavailableError as error:
            raise TransferError(str(error), "refused") from error
        except OSError as error:
            why = f"a socket for KV cannot be created in {self._path}: {error.strerror}"
            raise TransferError(f"{why}; {_remedy('folder of your own')}", "refused") from error
        self._owner = Owner(memory.view, on_notice, id=id, welcome=self._welcome)
        self._owner.serve(listener)
        return ShmAddress(id=id, num_bytes=len(memory.view), host=_host(), socket=str(path))

    def reaches(self, owner: ShmAddress) -> bool:
        """Return whether it is on this host, and we see its socket."""
        return owner.host == _host() and Path(owner.socket).exists()

    async def read(self, owner: ShmAddress, pieces: Sequence[Piece], on_turn: OnTurn) -> None:
        """Copy from the owner's memory to ours: large amounts in a thread, small ones here at once."""
        loop = asyncio.get_running_loop()

        async def copy(link: Link) -> None:
            _check_silent(_socket_of(link.stream))
            for lot in portions(pieces, LARGE_BYTES):
                if sum(piece.num_bytes for piece in lot) >= len(lot) * CHUNK_BYTES:
                    await _to_its_end(loop.run_in_executor(self._threads, self._copy, link.handle, lot))
                    continue
                for small in portions(lot, CHUNK_BYTES):
                    self._copy(link.handle, small)
                    await asyncio.sleep(0)
            _check_silent(_socket_of(link.stream))  # memory whose owner is gone may contain anything

        await self._links.use(owner, copy, on_turn)

    async def notify(self, owner: ShmAddress, notice: bytes, on_turn: OnTurn) -> None:
        """Leave a notice."""
        await self._links.use(owner, lambda link: leave_notice(link.stream, notice), on_turn)

    async def close(self) -> None:
        """Hang up on everybody, and remove the socket."""
        self._links.close()
        if self._owner is not None:
            await self._owner.close()
        if self._folder is not None:
            self._folder.remove(self._name, f"{Path(self._name).stem}.new")
            self._folder.close()
            self._folder = None
        self._threads.shutdown()

    async def _welcome(self, stream: Stream, words: bytes) -> None:
        assert self._memory is not None
        connection = _socket_of(stream)
        _check_user(connection)
        socket.send_fds(connection, [words], [self._memory.handle])

    async def _dial(self, owner: ShmAddress) -> Link:
        if owner.host != _host():
            raise TransferError("the owner is on another host, where shared memory does not reach", "refused")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link = Link(Stream(SocketConnection(connection)))
        try:
            await asyncio.get_running_loop().sock_connect(connection, owner.socket)
            _check_user(connection)
            words, link.handle = await _receive_handle(connection, len(WELCOME) + ID_BYTES)
            check_welcome(words, owner.id)
            _check_memory(link.handle, owner.num_bytes)
            await link.stream.send(self._id)
        except BaseException:
            link.close()
            raise
        return link

    def _copy(self, handle: int, lot: list[Piece]) -> None:
        assert self._memory is not None
        for source, target, num_bytes in lot:
            with self._memory.view[target : target + num_bytes] as view:
                if os.preadv(handle, [view], source) != num_bytes:
                    raise ConnectionResetError("the owner's memory is shorter than it reported")


def _default_folder() -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"dynabench-kv-{os.getuid()}"


def _remedy(other: str) -> str:
    """Return what to do if our default folder cannot be used: no flag names it."""
    variable = "XDG_RUNTIME_DIR" if os.environ.get("XDG_RUNTIME_DIR") else "TMPDIR"
    return f"set {variable} to a {other}, or choose --transfer tcp"


@functools.cache
def _host() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _listen(name: str) -> SocketListener:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with for_us_alone():
            listener.bind(name)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return SocketListener(listener)


def _remove_orphans(path: Path, folder: PrivateFolder) -> None:
    """Remove the sockets of processes that were killed."""
    for name in folder.names():
        with contextlib.suppress(OSError, RuntimeUnavailableError):
            is_orphan = name.endswith(".kv") and _is_deserted(socket_name(path / name))
            if is_orphan or (name.endswith(".new") and folder.stat(name).st_mtime < world().wall_s() - MAX_HALF_MADE_S):
                folder.remove(name)


def _is_deserted(name: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.setblocking(False)
        try:
            caller.connect(name)
        except ConnectionRefusedError:
            return True
        return False


def _socket_of(stream: Stream) -> socket.socket:
    assert isinstance(stream.connection, SocketConnection)
    return stream.connection.socket


def _check_silent(connection: socket.socket) -> None:
    """Check that the other side is still there and has sent nothing unasked.

    Raises:
        ConnectionError: it is not, or has.
    """
    try:
        said = connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return
    raise ConnectionResetError("the other side sent data out of turn" if said else "the other side hung up")


def _check_user(connection: socket.socket) -> None:
    """Check that the process at the other end belongs to this user."""
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.getuid():
        raise TransferError(f"the process at the other end belongs to user {user}", "refused")


async def _receive_handle(connection: socket.socket, num_bytes: int) -> tuple[bytes, int]:
    """Return an owner's first message, and the handle that comes with it."""
    loop = asyncio.get_running_loop()
    is_there = asyncio.Event()
    loop.add_reader(connection, is_there.set)
    try:
        await is_there.wait()
    finally:
        loop.remove_reader(connection)
    words, handles, _, _ = socket.recv_fds(connection, num_bytes, 1, socket.MSG_CMSG_CLOEXEC)
    if not handles:
        raise ConnectionResetError("the other side sent no memory")
    return words, handles[0]


def _check_memory(handle: int, num_bytes: int) -> None:
    """Check that a handle is sealed memory: its maker could make reads of anything else block or fail."""
    facts = os.fstat(handle)
    try:
        seals = fcntl.fcntl(handle, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if not stat.S_ISREG(facts.st_mode) or seals & SEALS != SEALS or facts.st_size != num_bytes:
        raise TransferError(f"the other side sent something other than {num_bytes} bytes of sealed memory", "refused")


async def _to_its_end(waited: asyncio.Future[None]) -> None:
    """Wait for a thread even if nobody is waiting for us any more: it writes into memory."""
    was_cancelled = False
    while not waited.done():
        try:
            await asyncio.wait([waited])
        except asyncio.CancelledError:
            was_cancelled = True
    if was_cancelled:
        waited.exception()
        raise asyncio.CancelledError
    waited.result()
