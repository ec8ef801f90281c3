"""Runs of cached blocks: the cache is kept in stretches of one chain, never block by block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mocker.chain import BlockChain

if TYPE_CHECKING:
    from mocker.sequence import Sequence


class Run:
    """Physical blocks that hold blocks `start` to `stop` of a chain and share one fate.

    `holders` are the sequences that use them, in order of arrival (a dict for its order; an unheld run
    waits in the free queue). Of several copies of one content the oldest is `primary`: the one found.
    A `sealed` run does not grow, as blocks of other sequences may follow its end.
    """

    __slots__ = ("chain", "holders", "primary", "sealed", "start", "stop")

    def __init__(self, chain: BlockChain, start: int, stop: int, *, primary: bool = True) -> None:
        self.chain = chain
        self.start = start
        self.stop = stop
        self.holders: dict[Sequence, None] = {}
        self.primary = primary
        self.sealed = False

    def __repr__(self) -> str:
        return f"Run({self.start}:{self.stop}, holders={len(self.holders)}, primary={self.primary})"
