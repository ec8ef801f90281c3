"""Scheduled events of workers as text: `at TIME: ACTION, ACTION; at TIME: ACTION`.

    +2 decode               two more workers in the pool (the name may be left out if there is one pool)
    -1                      one worker fewer: it leaves according to drain_policy
    =4 decode               four workers in the pool
    kill worker 3           its process dies, its requests continue elsewhere, and another worker replaces it
    lose worker 3           the same, without a replacement
    drain worker 3          it accepts no more requests and leaves according to drain_policy
    slow worker 3 x2        each of its steps takes twice as long from then on ...
    slow worker 3 x2 for 60s ... or for that time

Workers are numbered from 0 in the order in which they were requested.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

MAX_EVENTS = 10_000
MAX_WORKERS = 10_000
"""Maximum size of a pool, in events as in settings."""
UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}

_NUMBER = r"(\d{1,9}(?:\.\d{1,9})?)"
_TIME = rf"{_NUMBER} ?(ms|s|min|m|h)?"
_AT = re.compile(rf"at {_TIME} ?: ?(.+)", re.DOTALL)
_RESIZE = re.compile(r"([+=-]) ?(\d{1,5})(?: ([A-Za-z][A-Za-z0-9_-]*))?")
_TO_WORKER = re.compile(r"(kill|lose|drain) worker (\d{1,6})")
_SLOW = re.compile(rf"slow worker (\d{{1,6}}) x ?{_NUMBER}(?: for {_TIME})?")


@dataclass(frozen=True, slots=True)
class Resize:
    """Change the size of a pool."""

    sign: str
    """`+`, `-` or `=`."""
    count: int
    pool: str | None
    """None means the only pool."""

    def size(self, before: int) -> int:
        """Return the pool's size after this event, given its size before."""
        return self.count if self.sign == "=" else max(before + (self.count if self.sign == "+" else -self.count), 0)


@dataclass(frozen=True, slots=True)
class Kill:
    """Let a worker die."""

    worker: int
    is_replaced: bool


@dataclass(frozen=True, slots=True)
class Drain:
    """Let a worker finish its requests and leave."""

    worker: int


@dataclass(frozen=True, slots=True)
class Slow:
    """Make a worker's steps take `factor` times as long, temporarily or permanently."""

    worker: int
    factor: float
    duration_s: float | None


@dataclass(frozen=True, slots=True)
class FleetEvent:
    """An action at one time."""

    time_s: float
    action: Resize | Kill | Drain | Slow
    text: str
    """The action's original text."""


def parse_fleet_events(text: str) -> tuple[FleetEvent, ...]:
    """Parse events; return them in order of time.

    Raises:
        ValueError: an event is not understood.
    """
    events = [event for part in text.split(";") if part.strip() for event in _at(part.strip())]
    if len(events) > MAX_EVENTS:
        raise ValueError(f"events has {len(events):,} entries; expected at most {MAX_EVENTS:,}")
    return tuple(sorted(events, key=lambda event: event.time_s))


def pool_of(action: Resize, known: Mapping[str, object]) -> str:
    """Return the name of the pool that is resized.

    Raises:
        ValueError: there is no such pool, or several match.
    """
    if action.pool is None and len(known) == 1:
        return next(iter(known))
    if action.pool in known and action.pool is not None:
        return action.pool
    named = f"pool {action.pool!r} is unknown" if action.pool else f"{action.sign}{action.count} does not name a pool"
    raise ValueError(f"events: {named}; expected one of {', '.join(known)}")


def _at(part: str) -> Iterator[FleetEvent]:
    match = _AT.fullmatch(" ".join(part.split()))
    if match is None:
        raise ValueError(f"events: {part!r} is not understood; expected 'at TIME: ACTION', such as 'at 60s: +2 decode'")
    number, unit, actions = match.groups()
    for action in actions.split(","):
        yield FleetEvent(float(number) * UNITS[unit or ""], _action(action.strip()), action.strip())


def _action(text: str) -> Resize | Kill | Drain | Slow:
    if match := _RESIZE.fullmatch(text):
        sign, count, pool = match.groups()
        if int(count) > MAX_WORKERS:
            raise ValueError(f"events: {text!r} is too many; expected at most {MAX_WORKERS:,} workers")
        return Resize(sign, int(count), pool)
    if match := _TO_WORKER.fullmatch(text):
        verb, number = match[1], int(match[2])
        return Drain(number) if verb == "drain" else Kill(number, is_replaced=verb == "kill")
    if (match := _SLOW.fullmatch(text)) and float(match[2]):
        worker, factor, lasts, unit = match.groups()
        return Slow(int(worker), float(factor), float(lasts) * UNITS[unit or ""] if lasts else None)
    raise ValueError(
        f"events: {text!r} is not understood; expected +N POOL, -N POOL, =N POOL, kill worker N, lose worker N, drain worker N, or "
        "slow worker N xFACTOR (for TIME)"
    )
