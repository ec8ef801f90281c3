"""Which fault befalls which request: a function of the settings, their seed and the request's number or id."""

from typing import NamedTuple

from serving.stand_in.faults.config import FaultConfig
from serving.stand_in.faults.values import drawn

PLACES = 8
"""A stream is cut or stalls after up to so many events."""


class Fault(NamedTuple):
    """What befalls one request."""

    key: str | int = 0
    """Its number, or its id."""
    kind: str = ""
    """`disconnect`, `cut`, `stall`, or the status that it gets; empty if it is none of these."""
    status: int = 0
    place: int = 0
    """After how many events of its answer; a whole answer is cut, or stops, in its middle."""
    stall_s: float = 0.0
    first_byte_s: float = 0.0
    """What is added before the first byte (s)."""


def fault_of(config: FaultConfig, key: str | int) -> Fault:
    """Return what befalls a request."""
    seed = config.seed
    first_byte_s = config.first_byte.time_s(seed, "first_byte", key) if config.first_byte is not None else 0.0
    kind = _kind(config, drawn(seed, "kind", key))
    return Fault(
        key,
        kind,
        status=int(kind) if kind.isdecimal() else 0,
        place=1 + int(drawn(seed, "place", key) * PLACES),
        stall_s=config.stall.time_s if kind == "stall" and config.stall is not None else 0.0,
        first_byte_s=first_byte_s,
    )


def _kind(config: FaultConfig, number: float) -> str:
    """Return what a number from 0 up to 1 stands for, if each fault has a part of that range as large as its share."""
    kinds = dict(sorted(config.statuses.items()))
    kinds |= {"disconnect": config.disconnect, "cut": config.cut, "stall": config.stall.share if config.stall else 0.0}
    for kind, share in kinds.items():
        if number < share:
            return kind
        number -= share
    return ""


def num_good_blocks(config: FaultConfig, key: str | int, num_blocks: int) -> int | None:
    """Return how many blocks of a prompt's KV can be read before one cannot; None if all can."""
    if not config.kv_load or drawn(config.seed, "kv_load", key) >= config.kv_load:
        return None
    return int(drawn(config.seed, "kv_load place", key) * num_blocks)
