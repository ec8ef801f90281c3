"""Which data-parallel ranks run in this instance, as vLLM's arguments say.

internal    -dp 8                                             all run here, and this server chooses between them
hybrid      -dp 8 -dpl 4 -dpr 4                               four run here; something in front chooses the host
external    -dp 8 --data-parallel-rank 5                      one runs here; something in front chooses the rank
"""

from collections.abc import Mapping
from typing import Any

from serving.stand_in.config import RanksConfig


def ranks_of(given: Mapping[str, Any]) -> tuple[RanksConfig, int]:
    """Return the ranks, and how many run here.

    Raises:
        ValueError: the arguments contradict each other, or need engines on other hosts.
    """
    size, local = given.get("data_parallel_size", 1), given.get("data_parallel_size_local")
    rank, start = given.get("data_parallel_rank"), given.get("data_parallel_start_rank")
    is_external = given.get("data_parallel_external_lb", False) or rank is not None
    is_hybrid = given.get("data_parallel_hybrid_lb", False) or start is not None
    if size < 1:
        raise ValueError(f"--data-parallel-size {size}: expected at least 1")
    if is_external and is_hybrid:
        raise ValueError("--data-parallel-hybrid-lb and --data-parallel-external-lb: expected one of them")
    if is_external:
        return _external(size, rank, local)
    if is_hybrid and local is None:
        raise ValueError("--data-parallel-hybrid-lb: expected --data-parallel-size-local with it")
    local, first = size if local is None else local, start or 0
    if local < 1:
        raise ValueError(f"--data-parallel-size-local {local}: expected at least 1")
    _check_number("--data-parallel-start-rank", first, size)
    if local < size and not is_hybrid:
        raise ValueError(
            f"--data-parallel-size-local {local}: the other {size - local} ranks would be on other hosts, from where none can "
            "join a stand-in; leave it out, or use --data-parallel-hybrid-lb"
        )
    return RanksConfig(size=size, first=first, is_external=is_hybrid and local == 1 < size), local


def _external(size: int, rank: int | None, local: int | None) -> tuple[RanksConfig, int]:
    if rank is None:
        raise ValueError("--data-parallel-external-lb: expected --data-parallel-rank with it")
    if local not in (1, None):
        raise ValueError(f"--data-parallel-size-local {local}: expected 1 with --data-parallel-rank")
    _check_number("--data-parallel-rank", rank, size)
    return RanksConfig(size=size, first=rank, is_external=size > 1), 1


def _check_number(flag: str, number: int, size: int) -> None:
    if not 0 <= number < size:
        raise ValueError(f"{flag} {number}: expected from 0 to {size - 1} with --data-parallel-size {size}")
