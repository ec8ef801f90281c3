"""The labels of lines that are by arm, and by pool if an arm has several."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from reports.record.pools import DraftUse, EncoderUse

PoolUse = TypeVar("PoolUse", DraftUse, EncoderUse)


def labelled(uses: Mapping[str, Sequence[PoolUse]]) -> list[tuple[str, PoolUse]]:
    """Return each pool's use with the name of its line: that of the arm, and of the pool if there are several."""
    return [(f"{arm}: {use.name}" if len(pools) > 1 else arm, use) for arm, pools in uses.items() for use in pools]
