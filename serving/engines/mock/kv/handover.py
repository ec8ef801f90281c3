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
from serving.engines.kv.notices import Notice
from serving.engines.kv.owner import KvOwner, RoomCall
from serving.engines.kv.params import AGENT, RemoteKv, RequestPart, WantedKv
from serving.engines.kv.reader import KvReader, OnUsed, Spoil
from serving.engines.mock.kv.passage import KvShape, Passage
from serving.engines.mock.live import Live
from serving.life.lease import LeaseConfig
from serving.model.card import Bootstrap, Role
from serving.runtime.messages import CallError
from serving.transfer.config import TransferRunConfig
from serving.worker.engine import KvTransfers


class HandoverRank(Protocol):
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


Describe = Callable[[Live, RemoteKv], dict[str, Any]]
Find = Callable[[WantedKv], Coroutine[None, None, RemoteKv]]


def as_it_is(live: Live, kv: RemoteKv) -> dict[str, Any]:
    """Return where KV is, for a worker of ours."""
    found: dict[str, Any] = msgspec.to_builtins(kv)
    return found


class PrefillSide:
    """The prefill worker's side: it computes prompts and offers their KV."""

    def __init__(self, owner: KvOwner, describe: Describe = as_it_is) -> None:
        """Prepare it; `describe` returns what an answer says of its prompt's KV."""
        self.owner = owner
        self._describe = describe
        self._numbers: dict[HandoverRank, int] = {}

    def begin(self, rank: HandoverRank, live: Live, asked: RequestPart) -> None:
        """Compute a prompt for another worker, perhaps once that has begun (see `Handover.begin`)."""
        owner = self.owner
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

    def on_finished(self, rank: HandoverRank, live: Live) -> None:
        """Offer the KV of a prompt that was computed, and end its request."""
        sequence = live.sequence

        def on_offered(kv: RemoteKv) -> None:
            live.finish(kv_transfer_params=self._describe(live, kv))
            live.flush()

        def on_over() -> None:
            rank.engine.release_kept(sequence)
            live.release()
            rank.wake()

        live.offer = self.owner.offer(
            live.keys,
            room=live.room,
            rank=self._numbers.setdefault(rank, len(self._numbers)),
            num_tokens=sequence.num_prompt,
            num_cached_tokens=sequence.cached_tokens,
            on_offered=on_offered,
            on_over=on_over,
        )

    def cancel(self, rank: HandoverRank, live: Live) -> None:
        """Cancel a request that was begun."""
        if live.offer is not None:
            self.owner.withdraw(live.offer)
            return
        if live.is_queued:
            rank.engine.abort(live.sequence)
        if live.room is not None:
            self.owner.leave(live.room, "the prefill worker's call was cancelled")

    def _start(self, rank: HandoverRank, live: Live) -> None:
        """Compute the prompt of a room whose reader is there."""
        try:
            rank.add(live)
        except ValueError as error:
            self.cancel(rank, live)
            live.stream.end(str(error), "invalid")

    def _on_left(self, rank: HandoverRank, live: Live, why: str) -> None:
        self.cancel(rank, live)
        live.stream.end(why, "engine")


class DecodeSide:
    """The decode worker's side: it reads the KV of prompts and generates the rest."""

    def __init__(self, reader: KvReader, find: Find | None = None) -> None:
        """Prepare it; `find` asks where KV is, if requests only name it."""
        self.reader = reader
        self._find = find
        self._numbers: dict[HandoverRank, int] = {}

    def begin(self, rank: HandoverRank, live: Live, asked: RequestPart) -> None:
        """Queue a request whose prompt's KV another worker has, or will have (see `Handover.begin`)."""
        sequence = live.sequence
        load = self.reader.expect(live.keys, sequence.num_prompt, kv=asked.kv, meeting=asked.meeting)
        if asked.wanted is not None:
            assert self._find is not None
            load.num_cached_tokens = asked.wanted.num_cached_tokens
            self.reader.find(load, self._find(asked.wanted))
        live.read(load)
        sequence.is_remote_prefill = True
        sequence.is_token_shipped = asked.meeting is not None
        try:
            rank.add(live)
        except ValueError:
            self.reader.give_up(load)
            raise

    def on_loads(self, rank: HandoverRank, sequences: list[Sequence]) -> None:
        """Read the KV of sequences that have blocks now."""
        number = self._numbers.setdefault(rank, len(self._numbers))
        for sequence in sequences:
            live = sequence.payload
            assert isinstance(live, Live) and live.load is not None
            on_arrived = partial(self._on_arrived, rank, sequence)
            self.reader.begin(live.load, sequence.num_cached_blocks, on_arrived, rank=number)

    def cancel(self, rank: HandoverRank, live: Live) -> None:
        """Cancel a request that was begun."""
        rank.engine.abort(live.sequence)
        assert live.load is not None
        self.reader.give_up(live.load)

    def _on_arrived(self, rank: HandoverRank, sequence: Sequence, num_valid_blocks: int | None) -> None:
        for over in rank.engine.end_load(sequence, num_valid_blocks):
            rank.end(over)
        rank.wake()


class Handover:
    """Both sides of sharing requests with other workers, or one of them."""

    def __init__(
        self, exchange: KvExchange, *, prefill: PrefillSide | None = None, decode: DecodeSide | None = None
    ) -> None:
        """Hand over through a started exchange."""
        self._exchange = exchange
        self._prefill = prefill
        self._decode = decode
        self.bootstrap: Bootstrap | None = None
        """Where a prefill worker of ours is met."""
        if prefill is not None and decode is None:
            self.bootstrap = Bootstrap({AGENT: prefill.owner.address})
        exchange.on_notice = self._on_notice

    def begin(self, rank: HandoverRank, live: Live, asked: RequestPart) -> None:
        """Start our part of a request; another worker does the rest.

        Raises:
            ValueError: it is not for this worker, can never fit, or its KV parameters make no sense.
            CallError: the two workers cannot meet here.
        """
        live.kv_name = asked.name
        side = self._prefill if asked.is_prefill else self._decode
        if side is None:
            does, needs = ("remote_decode", "prefill") if asked.is_prefill else ("remote_prefill", "decode")
            started = "decode" if asked.is_prefill else "prefill"
            raise ValueError(f"do_{does} is for a {needs} worker; this one was started with --role {started}")
        side.begin(rank, live, asked)

    def on_loads(self, rank: HandoverRank, sequences: list[Sequence]) -> None:
        """Read the KV of sequences that have blocks now."""
        assert self._decode is not None
        self._decode.on_loads(rank, sequences)

    def on_finished(self, rank: HandoverRank, live: Live) -> None:
        """Take over a request whose prompt was computed for another worker, including its end."""
        assert self._prefill is not None
        self._prefill.on_finished(rank, live)

    def cancel(self, rank: HandoverRank, live: Live) -> None:
        """Cancel a request that was begun."""
        side = self._prefill if live.sequence.is_remote_decode else self._decode
        assert side is not None
        side.cancel(rank, live)

    def spoil_loads(self, spoil: Spoil) -> None:
        """Make KV that others computed unreadable, on purpose."""
        if self._decode is not None:
            self._decode.reader.spoil = spoil

    def watch_loads(self, on_used: OnUsed) -> None:
        """Report what comes with KV that is used."""
        if self._decode is not None:
            self._decode.reader.on_used = on_used

    def offers(self, kv: RemoteKv) -> bool:
        """Return whether this KV is kept here for another worker."""
        return self._prefill is not None and self._prefill.owner.find(kv.remote_request_id) is not None

    def transfers(self) -> KvTransfers:
        """Return what was transferred."""
        found = self._exchange.counts
        if self._prefill is not None:
            owner = self._prefill.owner
            found = found._replace(num_held=owner.num_held, num_waiting=owner.num_waiting)
        if self._decode is not None:
            reader = self._decode.reader
            found = found._replace(num_waiting=found.num_waiting + reader.num_waiting, num_loading=reader.num_loading)
        return found

    async def close(self) -> None:
        """Release everything."""
        if self._prefill is not None:
            self._prefill.owner.close()
        if self._decode is not None:
            await self._decode.reader.close()
        await self._exchange.close()

    def _on_notice(self, notice: Notice) -> None:
        """Pass a notice on; each side ignores what is for the other."""
        if self._prefill is not None:
            self._prefill.owner.on_notice(notice)
        if self._decode is not None:
            self._decode.reader.on_notice(notice)


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
        return Handover(exchange, prefill=PrefillSide(owner_of(exchange, shape, transfer, lease)))
    return Handover(exchange, decode=DecodeSide(reader_of(exchange, shape, transfer)))


def block_keys(tokens: npt.NDArray[np.uint32], hashes: Several[int], *, num_full: int, block_size: int) -> list[int]:
    """Return names for a prompt's blocks: their sequence hashes, and a special one for a last block that is not full."""
    keys = list(hashes[:num_full])
    tail = tokens[num_full * block_size :]
    return [*keys, xxh3_64_intdigest(tail.tobytes(), keys[-1] if keys else 0)] if len(tail) else keys
