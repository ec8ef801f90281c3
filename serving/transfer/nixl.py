"""NIXL, NVIDIA's library for moving KV, with UCX and memory of the host.

A posted transfer cannot be cancelled: if it is released while its owner does not answer, it writes when the owner
recovers (seen with UCX over TCP). So NIXL never writes into an agent's memory but into *stages*, from which the data
are copied. A stage whose transfer was given up is not reused before that transfer has ended.

On one host, UCX copies out of the other process (`process_vm_readv`), which also works while it is being closed, or
when another process has its id. So every read ends with a check of the owner's *sign of life*, which contains the
owner's id.

The library is called in one separate thread, because some calls copy before they return.
"""

import asyncio
import base64
import contextlib
import ipaddress
import itertools
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from foundation.extras import install
from serving.transfer.agent import MAX_NOTICE_BYTES, Piece, TransferError
from serving.transfer.memory import Memory, portions
from serving.transfer.way import OnNotice, OnTurn, OwnerAddress
from serving.transfer.wire import ID_BYTES

log = logging.getLogger(__name__)

INSTALL = f"{install('nixl')} (without torch: pip install --no-deps nixl nixl-cu12)"

STAGE_BYTES = 8 << 20
MAX_STAGES = 8
MAX_STAGES_OF_ONE = 2
"""Stages for one owner, so that an owner that does not answer leaves stages for the others."""

NUM_LOOKS, LOOK_S = 10, 0.0001
"""How often the library's thread checks a transfer before other work has a turn there."""

POLL_S = 0.001
"""The pause after that."""

NOTICE_POLL_S = 0.01
"""How often notices are fetched."""

MAX_OWNERS = 256
"""Owners known to the library at once; beyond that, the one used longest ago is forgotten."""

NOTICE = b"n"
"""Put before each notice: the library drops empty ones."""

Places = list[tuple[int, int]]
"""Addresses in an owner's process, and sizes."""

Result = TypeVar("Result")


class NixlAddress(OwnerAddress, frozen=True, tag="nixl"):
    """The data that the library needs."""

    metadata: Annotated[str, msgspec.Meta(max_length=1 << 16)]
    """The metadata of the owner's agent, in base 64."""
    base: Annotated[int, msgspec.Meta(ge=1)]
    """The start of its memory in its process."""
    sign_of_life: Annotated[int, msgspec.Meta(ge=1)]


@dataclass(slots=True, eq=False)
class Known:
    """An owner that the library knows."""

    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_STAGES_OF_ONE))
    num_users: int = 0
    """Transfers that the library has not ended."""
    is_lost: bool = False


class Nixl:
    """The way through NIXL."""

    address_kind = NixlAddress

    def __init__(self, host: str) -> None:
        """Prepare it.

        Args:
            host: if this is a loopback address, UCX listens at no other.
        """
        self._host = host
        self._library: Any = None
        self._errors: tuple[type[Exception], ...] = ()
        self._memory: Memory | None = None
        self._life: mmap.mmap | None = None
        self._stages: mmap.mmap | None = None
        self._free = list(range(0, MAX_STAGES * STAGE_BYTES, STAGE_BYTES))  # the starts of stages
        self._num_free = asyncio.Semaphore(MAX_STAGES)
        self._registered: list[Any] = []
        self._known: dict[str, Known] = {}  # by id, the one used longest ago first
        self._meeting = asyncio.Lock()
        self._under_way: set[asyncio.Task[None]] = set()
        self._polling: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-nixl")

    async def open(self, memory: Memory, on_notice: OnNotice, *, id: str) -> NixlAddress:
        """Register the memory.

        Raises:
            TransferError: the package is not installed, or cannot run here.
        """
        self._memory = memory
        self._life = mmap.mmap(-1, mmap.PAGESIZE)
        self._life[:ID_BYTES] = bytes.fromhex(id)
        self._stages = mmap.mmap(-1, MAX_STAGES * STAGE_BYTES)
        metadata = await self._call(lambda: self._start(id))
        self._polling = asyncio.create_task(self._poll(on_notice))
        return NixlAddress(
            id=id,
            num_bytes=len(memory.view),
            metadata=base64.b64encode(metadata).decode(),
            base=_address(memory.view),
            sign_of_life=_address(self._life),
        )

    def reaches(self, owner: NixlAddress) -> bool:
        """Return true: only a try can show it."""
        return True

    async def read(self, owner: NixlAddress, pieces: Sequence[Piece], on_turn: OnTurn) -> None:
        """Read through stages."""
        assert self._memory is not None
        view = self._memory.view
        for lot in portions(pieces, STAGE_BYTES):

            def take(data: memoryview, lot: list[Piece] = lot) -> None:
                for _, target, num_bytes in lot:
                    view[target : target + num_bytes] = data[:num_bytes]
                    data = data[num_bytes:]

            await self._fetch(owner, [(owner.base + piece.source, piece.num_bytes) for piece in lot], take, on_turn)
        await self._see_alive(owner, on_turn)

    async def notify(self, owner: NixlAddress, notice: bytes, on_turn: OnTurn) -> None:
        """Leave a notice, which the library sends after the read that shows that the owner is alive."""
        await self._see_alive(owner, on_turn, NOTICE + notice)

    async def close(self) -> None:
        """Remove our sign of life, then release everything."""
        if self._life is not None:
            self._life[:ID_BYTES] = bytes(ID_BYTES)
        tasks = [*filter(None, [self._polling]), *self._under_way]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        tasks.clear()
        self._polling = None  # references in a cancelled task would keep the library and its sockets alive
        if self._library is not None:
            await self._call(self._stop)
        self._thread.shutdown()

    async def _see_alive(self, owner: NixlAddress, on_turn: OnTurn, notice: bytes = b"") -> None:
        said: list[bytes] = []
        sign = [(owner.sign_of_life, ID_BYTES)]
        await self._fetch(owner, sign, lambda data: said.append(bytes(data)), on_turn, notice)
        if said != [bytes.fromhex(owner.id)]:
            if (known := self._known.get(owner.id)) is not None:
                known.is_lost = True  # `_release` forgets it
            raise TransferError("the owner is gone", "lost")

    async def _fetch(
        self,
        owner: NixlAddress,
        places: Places,
        take: Callable[[memoryview], None],
        on_turn: OnTurn,
        notice: bytes = b"",
    ) -> None:
        """Fetch data from an owner's process through a stage, when it is our turn to have one."""
        known = await self._meet(owner)
        await known.slots.acquire()
        try:
            await self._num_free.acquire()
        except BaseException:
            known.slots.release()
            raise
        on_turn()
        stage = self._free.pop()
        known.num_users += 1
        carrying = asyncio.create_task(self._carry(owner.id, places, stage, notice))
        self._under_way.add(carrying)
        try:
            await asyncio.shield(carrying)
            assert self._stages is not None
            with memoryview(self._stages) as stages, stages[stage : stage + sum(size for _, size in places)] as data:
                take(data)
        finally:  # at once, or when the library ends a transfer that was given up
            carrying.add_done_callback(lambda done: self._release(owner.id, known, stage, done))

    async def _carry(self, name: str, places: Places, stage: int, notice: bytes) -> None:
        """Fill a stage; this ends once the library no longer writes there."""
        transfer, state = await self._call(lambda: self._post(name, places, stage, notice))
        try:
            while state == "PROC":
                await asyncio.sleep(POLL_S)
                state = await self._call(lambda: self._look(transfer))
        finally:
            if state == "PROC":  # only when everything is closed
                await self._call(transfer.release)
        if state != "DONE":
            raise TransferError(f"NIXL could not read from the owner ({state})", "lost")

    def _release(self, id: str, known: Known, stage: int, carrying: asyncio.Task[None]) -> None:
        self._under_way.discard(carrying)
        self._free.append(stage)
        self._num_free.release()
        known.slots.release()
        known.num_users -= 1
        if carrying.cancelled() or carrying.exception() is not None:
            known.is_lost = True
        if known.is_lost and not known.num_users and self._known.get(id) is known:
            del self._known[id]
            self._thread.submit(self._forget, id)

    async def _meet(self, owner: NixlAddress) -> Known:
        """Return our record of an owner, after introducing it to the library."""
        async with self._meeting:
            known = self._known.pop(owner.id, None)
            if known is None:
                await self._make_room()
                try:
                    await self._call(lambda: self._introduce(owner))
                except BaseException:  # after giving up, the thread may still introduce it
                    self._thread.submit(self._forget, owner.id)
                    raise
                known = Known()
            self._known[owner.id] = known
            if known.is_lost:
                raise TransferError("the connection to the owner broke", "lost")
            return known

    async def _make_room(self) -> None:
        unused = [id for id, known in self._known.items() if not known.num_users]
        for id in unused[: max(0, len(self._known) + 1 - MAX_OWNERS)]:
            del self._known[id]
            await self._call(partial(self._forget, id))

    async def _poll(self, on_notice: OnNotice) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                found = await self._call(lambda: self._library.get_new_notifs())
            except TransferError as error:
                log.warning("KV notices could not be fetched: %s", error)
                await asyncio.sleep(1.0)
                continue
            for notice in itertools.chain.from_iterable(found.values()):
                if notice.startswith(NOTICE) and len(notice) <= len(NOTICE) + MAX_NOTICE_BYTES:
                    loop.call_soon(on_notice, notice[len(NOTICE) :])
            await asyncio.sleep(NOTICE_POLL_S)

    async def _call(self, work: Callable[[], Result]) -> Result:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except self._errors as error:
            raise TransferError(f"NIXL: {error}", "lost") from error

    # The rest runs in the library's thread.

    def _start(self, name: str) -> bytes:
        assert self._memory is not None
        with _environment(self._host):
            try:
                from nixl._api import nixl_agent, nixl_agent_config, nixlBind
            except ImportError as error:
                raise TransferError(f"the package nixl cannot be loaded ({error}): {INSTALL}", "refused") from error
            kinds = [kind for kind in vars(nixlBind).values() if isinstance(kind, type)]
            self._errors = (RuntimeError, *(kind for kind in kinds if issubclass(kind, Exception)))
            # The library's own thread never rests. On one host it has nothing to do: readers copy themselves.
            config = nixl_agent_config(enable_prog_thread=not _is_loopback(self._host), backends=["UCX"])
            self._library = nixl_agent(name, config)
        for memory in (self._memory.view, self._life, self._stages):
            assert memory is not None
            place = (_address(memory), len(memory), 0, "")
            self._registered.append(self._library.register_memory([place], "DRAM"))
        metadata: bytes = self._library.get_agent_metadata()
        return metadata

    def _stop(self) -> None:
        for registered in self._registered:
            self._library.deregister_memory(registered)
        for id in self._known:
            self._forget(id)
        self._library = None

    def _introduce(self, owner: NixlAddress) -> None:
        """Introduce an owner to the library, by its id."""
        name = self._library.add_remote_agent(_decoded(owner))
        name = name.decode() if isinstance(name, bytes) else name
        if name != owner.id:
            if name not in self._known:
                self._forget(name)
            raise TransferError(f"the owner's metadata belongs to another agent, {name[:80]!r}", "refused")

    def _post(self, name: str, places: Places, stage: int, notice: bytes) -> tuple[Any, str]:
        at, targets = _address(self._stages) + stage, []
        for _, num_bytes in places:
            targets.append((at, num_bytes, 0))
            at += num_bytes
        sources = [(address, num_bytes, 0) for address, num_bytes in places]
        library = self._library
        ends = library.get_xfer_descs(targets, "DRAM"), library.get_xfer_descs(sources, "DRAM")
        transfer = library.initialize_xfer("READ", *ends, name, notice)
        state = library.transfer(transfer)
        return transfer, self._look(transfer) if state == "PROC" else self._ended(transfer, state)

    def _look(self, transfer: Any) -> str:
        """Return the state of a transfer, after a pause if it has not ended yet."""
        for _ in range(NUM_LOOKS):
            state = str(self._library.check_xfer_state(transfer))
            if state != "PROC":
                return self._ended(transfer, state)
            time.sleep(LOOK_S)
        return "PROC"

    def _ended(self, transfer: Any, state: str) -> str:
        transfer.release()
        return state

    def _forget(self, name: str) -> None:
        with contextlib.suppress(*self._errors):
            self._library.remove_remote_agent(name)


def _address(memory: Any) -> int:
    """Return the address of the start of memory."""
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def _decoded(owner: NixlAddress) -> bytes:
    try:
        return base64.b64decode(owner.metadata, validate=True)
    except ValueError as error:
        raise TransferError(f"the owner's metadata is not base 64: {error}", "refused") from error


@contextlib.contextmanager
def _environment(host: str) -> Iterator[None]:
    """Set the environment that the library reads while it starts."""
    wanted = {"NIXL_LOG_LEVEL": "ERROR"}  # else it writes to the standard output
    if _is_loopback(host):
        wanted["UCX_NET_DEVICES"] = "lo"
    ours = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
