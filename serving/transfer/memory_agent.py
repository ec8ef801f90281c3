"""The agent: memory, and the ways in which it is reached."""

import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from serving.runtime.world import world
from serving.transfer.agent import MAX_NOTICE_BYTES, AgentAddress, Piece, TransferError
from serving.transfer.links import Deadlines
from serving.transfer.memory import Memory, runs
from serving.transfer.way import OnNotice, OwnerAddress, Way

log = logging.getLogger(__name__)

SEVERAL = "auto"
"""The transport of an address that lists several."""

MAX_WAYS = 8


class MemoryAgent:
    """See `Agent`."""

    def __init__(self, num_bytes: int, ways: Sequence[Way[Any]], on_notice: OnNotice) -> None:
        """Prepare an agent.

        Args:
            num_bytes: the size of its memory.
            ways: how it and others reach each other, the best first; those that cannot be opened are left out, except
                for the last one.
            on_notice: is called in the loop, with each notice.
        """
        self._num_bytes = num_bytes
        self._ways = list(ways)
        self._on_notice = on_notice
        self._memory: Memory | None = None
        self._address: AgentAddress = {}
        self._deadlines = Deadlines()

    @property
    def address(self) -> AgentAddress:
        """How others reach it, once started."""
        return self._address

    @property
    def memory(self) -> memoryview:
        """Its own memory, writable."""
        assert self._memory is not None, "an agent has no memory before it is started"
        return self._memory.view

    async def start(self) -> None:
        """Allocate memory and start to serve it.

        Raises:
            TransferError: this is not possible here.
        """
        id = world().token_hex(16)
        self._memory = Memory(self._num_bytes, has_handle=any(way.needs_handle for way in self._ways))
        try:
            addresses = [await self._open(way, self._memory, id) for way in list(self._ways)]
        except BaseException:
            await self.close()
            raise
        several = [address for address in addresses if address is not None]
        self._address = several[0] if len(several) == 1 else {"transport": SEVERAL, "ways": several}

    async def read(self, owner: AgentAddress, pieces: Sequence[Piece], *, timeout_s: float) -> None:
        """Read pieces of another agent's memory into our own.

        Raises:
            TransferError: not all was read.
        """
        async with self._deadlines.within(timeout_s, "a read of KV") as begin:
            way, address = self._choose(owner)
            wanted = runs(pieces, source_bytes=address.num_bytes, target_bytes=len(self.memory))
            await way.read(address, wanted, begin)

    async def notify(self, owner: AgentAddress, notice: bytes, *, timeout_s: float) -> None:
        """Send another agent a notice.

        Raises:
            TransferError: it did not arrive.
        """
        if len(notice) > MAX_NOTICE_BYTES:
            raise TransferError(f"a notice of {len(notice)} bytes; expected at most {MAX_NOTICE_BYTES}", "refused")
        async with self._deadlines.within(timeout_s, "a notice") as begin:
            way, address = self._choose(owner)
            await way.notify(address, notice, begin)

    async def close(self) -> None:
        """End pending transfers, and release everything."""
        await self._deadlines.close()
        for way in self._ways:
            await way.close()
        if self._memory is not None:
            self._memory.close()

    async def _open(self, way: Way[Any], memory: Memory, id: str) -> AgentAddress | None:
        """Open a way and return its address; do without it if a later one reaches the same agents."""
        try:
            address: AgentAddress = msgspec.to_builtins(await way.open(memory, self._on_notice, id=id))
        except TransferError as error:
            if way is self._ways[-1]:
                raise
            log.warning("%s; KV travels over %s instead", error, _transport(self._ways[-1]))
            self._ways.remove(way)
            await way.close()
            return None
        return address

    def _choose(self, owner: AgentAddress) -> tuple[Way[Any], OwnerAddress]:
        """Return our best way to an owner, and its address by that way."""
        several = owner.get("ways") if owner.get("transport") == SEVERAL else [owner]
        offered = [one for one in several[:MAX_WAYS] if isinstance(one, dict)] if isinstance(several, list) else []
        found = [
            (way, _parsed(one, way)) for way in self._ways for one in offered if one.get("transport") == _transport(way)
        ]
        if not found:
            theirs = ", ".join(str(one.get("transport"))[:20] for one in offered) or "nothing known here"
            ours = ", ".join(map(_transport, self._ways))
            raise TransferError(f"the owner is reached by {theirs}, but this agent reads by {ours}", "refused")
        return next(((way, address) for way, address in found[:-1] if way.reaches(address)), found[-1])


def _transport(way: Way[Any]) -> str:
    return str(way.address_kind.__struct_config__.tag)


def _parsed(address: AgentAddress, way: Way[Any]) -> OwnerAddress:
    try:
        parsed: OwnerAddress = msgspec.convert(address, way.address_kind)
    except msgspec.ValidationError as error:
        raise TransferError(f"the owner's address is not valid for {_transport(way)}: {error}", "refused") from error
    return parsed
