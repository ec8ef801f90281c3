"""How a mocker shares requests with another worker: it computes their prompts, or generates their answers."""

from collections.abc import Callable, Coroutine
from collections.abc import Sequence as Several
from functools import partial
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from mocker import Engine, Sequence
from serving.engines.kv.exchange import KvExchange
from serving.engines.kv.owner import KvOwner, RoomCall
from serving.engines.kv.params import AGENT, Part, RemoteKv, WantedKv
from serving.engines.kv.reader import KvReader, Spoil
from serving.engines.mock.kv.passage import KvShape, Passage
from serving.engines.mock.live import Live
from serving.life.lease import LeaseConfig
from serving.model.card import Bootstrap, Role
from serving.runtime.messages import CallError
from serving.transfer.config import TransferRunConfig
from serving.worker.engine import KvTransfers


class Rank(Protocol):
    """The engine of a data-parallel rank; its loop is elsewhere."""

    engine: Engine

    def add(self, live: Live) -> None:
        """Queue a request.

        Raises:
            ValueError: it can never fit.
        """
        ...

    def end(self, sequence: Sequence) -> None:
        """Send the end of a request that the engine ended between steps."""
        ...

    def wake(self) -> None:
        """Check again whether there is something to do."""
        ...


class Handover(Protocol):
    """One side of sharing requests with other workers."""

    bootstrap: Bootstrap | None

    def begin(self, rank: Rank, live: Live, asked: Part) -> None:
        """Start our part of a request; another worker does the rest.

        Raises:
            ValueError: it is not for this worker, can never fit, or its KV parameters make no sense.
            CallError: the two workers cannot meet here.
        """
        ...

    def on_loads(self, rank: Rank, sequences: list[Sequence]) -> None:
        """Read the KV of sequences that have blocks now."""
        ...

    def on_finished(self, rank: Rank, live: Live) -> None:
        """Take over a request whose prompt was computed for another worker, including its end."""
        ...

    def cancel(self, rank: Rank, live: Live) -> None:
        """Cancel a request that was begun."""
        ...

    def spoil_loads(self, spoil: Spoil) -> None:
        """Make KV that others computed unreadable, on purpose."""
        ...

    def transfers(self) -> KvTransfers:
        """Return what was transferred."""
        ...

    async def close(self) -> None:
        """Release everything."""
        ...


Describe = Callable[[Live, RemoteKv], dict[str, Any]]
Find = Callable[[WantedKv], Coroutine[None, None, RemoteKv]]


def as_it_is(live: Live, kv: RemoteKv) -> dict[str, Any]:
    """Return where KV is, for a worker of ours."""
    found: dict[str, Any] = msgspec.to_builtins(kv)
    return found


class PrefillSide:
    """The prefill worker's side: it computes prompts and offers their KV."""

    def __init__(self, exchange: KvExchange, owner: KvOwner, describe: Describe = as_it_is) -> None:
        """Prepare it; `describe` returns what an answer says of its prompt's KV."""
        self.bootstrap: Bootstrap | None = Bootstrap({AGENT: owner.address})
        self._exchange = exchange
        self._owner = owner
        self._describe = describe
        self._numbers: dict[Rank, int] = {}

    def begin(self, rank: Rank, live: Live, asked: Part) -> None:
        """See `Handover`."""
        owner = self._owner
        if not asked.is_prefill:
            raise ValueError("do_remote_prefill is for a decode worker; this one was started with --role prefill")
        if owner.is_full:
            raise CallError("this prefill worker keeps the KV of too many prompts for others", "overloaded")
        live.sequence.is_remote_decode = True
        if asked.meeting is None:
            rank.add(live)
            return
        room = asked.meeting.bootstrap_room
        is_reader_there = owner.come(
            room, RoomCall(lambda: self._start(rank, live), lambda why: self._on_left(rank, live, why))
        )
        live.room = room
        if is_reader_there:
            self._start(rank, live)

    def on_loads(self, rank: Rank, sequences: list[Sequence]) -> None:
        """See `Handover`."""
        raise AssertionError("a prefill worker reads no KV")

    def on_finished(self, rank: Rank, live: Live) -> None:
        """See `Handover`."""
        sequence = live.sequence

        def on_offered(kv: RemoteKv) -> None:
            live.finish(kv_transfer_params=self._describe(live, kv))
            live.flush()

        def on_over() -> None:
            rank.engine.let_go(sequence)
            live.release()
            rank.wake()

        live.offer = self._owner.offer(
            live.keys,
            room=live.room,
            rank=self._numbers.setdefault(rank, len(self._numbers)),
            num_tokens=sequence.num_prompt,
            num_cached_tokens=sequence.cached_tokens,
            on_offered=on_offered,
            on_over=on_over,
        )

    def cancel(self, rank: Rank, live: Live) -> None:
        """See `Handover`."""
        if live.offer is not None:
            self._owner.withdraw(live.offer)
            return
        if live.is_queued:
            rank.engine.abort(live.sequence)
        if live.room is not None:
            self._owner.leave(live.room, "the prefill worker's call was cancelled")

    def spoil_loads(self, spoil: Spoil) -> None:
        """See `Handover`: it reads none."""

    def transfers(self) -> KvTransfers:
        """See `Handover`."""
        return self._exchange.counts._replace(num_held=self._owner.num_held, num_waiting=self._owner.num_waiting)

    async def close(self) -> None:
        """See `Handover`."""
        self._owner.close()
        await self._exchange.close()

    def _start(self, rank: Rank, live: Live) -> None:
        """Compute the prompt of a room whose reader is there."""
        try:
            rank.add(live)
        except ValueError as error:
            self.cancel(rank, live)
            live.stream.end(str(error), "invalid")

    def _on_left(self, rank: Rank, live: Live, why: str) -> None:
        self.cancel(rank, live)
        live.stream.end(why, "engine")


class DecodeSide:
    """The decode worker's side: it reads the KV of prompts and generates the rest."""

    def __init__(self, exchange: KvExchange, reader: KvReader, find: Find | None = None) -> None:
        """Prepare it; `find` asks where KV is, if requests only name it."""
        self.bootstrap: Bootstrap | None = None
        self._exchange = exchange
        self._reader = reader
        self._find = find
        self._numbers: dict[Rank, int] = {}

    def begin(self, rank: Rank, live: Live, asked: Part) -> None:
        """See `Handover`."""
        if asked.is_prefill:
            raise ValueError("do_remote_decode is for a prefill worker; this one was started with --role decode")
        sequence = live.sequence
        load = self._reader.expect(live.keys, sequence.num_prompt, kv=asked.kv, meeting=asked.meeting)
        if asked.wanted is not None:
            assert self._find is not None
            load.num_cached_tokens = asked.wanted.num_cached_tokens
            self._reader.find(load, self._find(asked.wanted))
        live.read(load)
        sequence.is_remote_prefill = True
        sequence.is_token_shipped = asked.meeting is not None
        try:
            rank.add(live)
        except ValueError:
            self._reader.give_up(load)
            raise

    def on_loads(self, rank: Rank, sequences: list[Sequence]) -> None:
        """See `Handover`."""
        number = self._numbers.setdefault(rank, len(self._numbers))
        for sequence in sequences:
            live = sequence.payload
            assert isinstance(live, Live) and live.load is not None
            on_arrived = partial(self._on_arrived, rank, sequence)
            self._reader.begin(live.load, sequence.num_cached_blocks, on_arrived, rank=number)

    def on_finished(self, rank: Rank, live: Live) -> None:
        """See `Handover`."""
        raise AssertionError("a decode worker offers no KV")

    def cancel(self, rank: Rank, live: Live) -> None:
        """See `Handover`."""
        rank.engine.abort(live.sequence)
        assert live.load is not None
        self._reader.give_up(live.load)

    def spoil_loads(self, spoil: Spoil) -> None:
        """See `Handover`."""
        self._reader.spoil = spoil

    def transfers(self) -> KvTransfers:
        """See `Handover`."""
        return self._exchange.counts._replace(
            num_waiting=self._reader.num_waiting, num_loading=self._reader.num_loading
        )

    async def close(self) -> None:
        """See `Handover`."""
        await self._reader.close()
        await self._exchange.close()

    def _on_arrived(self, rank: Rank, sequence: Sequence, num_valid_blocks: int | None) -> None:
        for over in rank.engine.arrive(sequence, num_valid_blocks):
            rank.end(over)
        rank.wake()


def owner_of(exchange: KvExchange, shape: KvShape, transfer: TransferRunConfig, lease: LeaseConfig) -> KvOwner:
    """Return the side of a started exchange that offers KV."""
    return KvOwner(
        exchange,
        lease,
        block_bytes=shape.size.block,
        num_gpus=shape.num_gpus,
        meeting_timeout_s=transfer.transfer_meeting_timeout_s,
    )


def reader_of(exchange: KvExchange, shape: KvShape, transfer: TransferRunConfig) -> KvReader:
    """Return the side of a started exchange that reads KV."""
    return KvReader(
        exchange,
        Passage(shape, transfer).move,
        block_bytes=shape.size.block,
        read_timeout_s=transfer.transfer_read_timeout_s,
        meeting_timeout_s=transfer.transfer_meeting_timeout_s,
    )


def hand_over(
    role: Role, exchange: KvExchange, shape: KvShape, transfer: TransferRunConfig, lease: LeaseConfig
) -> Handover:
    """Return a role's side of the hand-over, through a started exchange."""
    if role == "prefill":
        return PrefillSide(exchange, owner_of(exchange, shape, transfer, lease))
    return DecodeSide(exchange, reader_of(exchange, shape, transfer))


def block_keys(tokens: npt.NDArray[np.uint32], hashes: Several[int], *, num_full: int, block_size: int) -> list[int]:
    """Return names for a prompt's blocks: their sequence hashes, and a special one for a last block that is not full."""
    keys = list(hashes[:num_full])
    tail = tokens[num_full * block_size :]
    return [*keys, xxh3_64_intdigest(tail.tobytes(), keys[-1] if keys else 0)] if len(tail) else keys
