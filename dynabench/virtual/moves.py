"""Requests that move with their KV from a rank that leaves: another rank reads the KV and continues the answer.

    decoding at one --taken out--> waits for blocks at another --KV on its way--> decoding there

The leaving rank stays until the KV is read. If it dies before that, the requests start again without their KV.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from dynabench.virtual.rank import Rank, number_of
from dynabench.virtual.traffic import Traffic
from mocker import Sequence as EngineSequence
from mocker.timing.kv_size import KvSize


@dataclass(slots=True)
class Move:
    """A request on its way."""

    source: Rank
    sequence: EngineSequence
    """The request's sequence at the other rank."""
    target: Rank | None = None
    """The rank that it was sent to; None while it waits at the router."""
    is_under_way: bool = False
    """Whether its KV is being read."""


class Moves:
    """The requests that are moving, by number."""

    def __init__(self, traffic: Traffic, kv_size: KvSize) -> None:
        self._traffic = traffic
        self._kv_size = kv_size
        self._moves: dict[int, Move] = {}

    def begin(self, number: int, sequence: EngineSequence, source: Rank) -> None:
        """Let the rank that gets this sequence read its KV from `source`."""
        sequence.is_remote_prefill = True
        source.num_readers += 1
        self._moves[number] = Move(source, sequence)

    def on_sent(self, number: int, target: Rank) -> None:
        """Note the rank that a request was sent to, if it is moving."""
        if (move := self._moves.get(number)) is not None:
            move.target = target

    def take(self, sequences: Sequence[EngineSequence]) -> list[EngineSequence]:
        """Start reading the KV of sequences that are moving, now that they have blocks; return the others."""
        others = []
        for sequence in sequences:
            number = number_of(sequence)
            move = self._moves.get(number)
            if move is not None and move.sequence is sequence:
                self._read(number, move)
            else:
                others.append(sequence)
        return others

    def _read(self, number: int, move: Move) -> None:
        assert move.target is not None
        move.is_under_way = True
        block_size = move.target.engine.config.block_size
        count = -(-move.sequence.num_prompt // block_size) - move.sequence.num_cached_blocks
        self._traffic.start(
            ("move", number),
            partial(self._end, number, move),
            source=move.source.number,
            target=move.target.number,
            num_bytes=self._kv_size.of(count),
            num_blocks=count,
        )

    def _end(self, number: int, move: Move) -> None:
        assert move.target is not None
        del self._moves[number]
        move.target.arrive(move.sequence, None)
        move.source.on_read()

    def drop(self, number: int) -> None:
        """Forget a request that will start again, if it is moving."""
        move = self._moves.pop(number, None)
        if move is not None:
            if move.is_under_way:
                self._traffic.drop(("move", number))
            move.source.on_read()

    def of(self, source: Rank) -> list[tuple[int, Move]]:
        """Return the moves whose KV is at a rank, with the requests' numbers."""
        return [(number, move) for number, move in self._moves.items() if move.source is source]
