"""The first step in which two schedulers differ."""

from collections.abc import Sequence
from typing import NamedTuple

from mocker.step_log import Row, StepLog

MOST_NAMED = 4
"""Requests of a step that a message names."""


class Difference(NamedTuple):
    """The first step in which two schedulers differ."""

    start_s: float
    """When that step was closed by the first one (s)."""
    engine: int
    """In which engine, from 0 on, in the order in which they started."""
    step: int
    """Its number in this engine, from 0 on."""
    what: str
    """What differs."""
    left: str
    """What the first scheduler did."""
    right: str
    """What the second one did."""


def first_difference(left: Sequence[StepLog], right: Sequence[StepLog]) -> Difference | None:
    """Return where two runs of the same engines part first, None if nowhere."""
    found = [
        difference
        for engine, (ours, theirs) in enumerate(zip(left, right, strict=True))
        if (difference := _parting(engine, ours.rows, theirs.rows)) is not None
    ]
    return min(found, default=None)


def _parting(engine: int, left: list[Row], right: list[Row]) -> Difference | None:
    step = 0
    for ours, theirs in zip(left, right, strict=False):
        if (what := _what_differs(ours, theirs)) is not None:
            return Difference(ours.start_s, engine, step, *what)
        if ours.num_steps != theirs.num_steps:
            return _one_goes_on(engine, step, ours, theirs, left, right)
        step += ours.num_steps
    if len(left) != len(right):
        row = max(left, right, key=len)[min(len(left), len(right))]
        ends = ("another step", "no more steps")
        return Difference(row.start_s, engine, step, "its end", *(ends if len(left) > len(right) else ends[::-1]))
    return None


def _what_differs(ours: Row, theirs: Row) -> tuple[str, str, str] | None:
    """Return what differs in the first steps of two rows, and what each scheduler did."""
    if ours.preempted != theirs.preempted:
        return "who is preempted", _named(ours.preempted), _named(theirs.preempted)
    if ours.tokens != theirs.tokens:
        left, right = (dict(zip(row.tokens[::2], row.tokens[1::2], strict=True)) for row in (ours, theirs))
        if left == right:
            return "the order of requests", _named([*left]), _named([*right])
        differing = [number for number in left | right if left.get(number) != right.get(number)]
        return "the tokens that are computed", _tokens(left, differing), _tokens(right, differing)
    if ours.num_free != theirs.num_free:
        return "free KV blocks", f"{ours.num_free:,} blocks are free", f"{theirs.num_free:,} blocks are free"
    return None


def _one_goes_on(engine: int, step: int, ours: Row, theirs: Row, left: list[Row], right: list[Row]) -> Difference:
    """Describe the step in which one scheduler goes on as before, and the other does something else."""
    step += min(ours.num_steps, theirs.num_steps)
    is_left = ours.num_steps < theirs.num_steps
    row, rows, other = (ours, left, theirs) if is_left else (theirs, right, ours)
    place = next(place for place, each in enumerate(rows) if each is row) + 1
    same = Row(row.start_s, other.tokens, (), 0)
    if place == len(rows):
        said = ("no more steps", "another step")
        return Difference(ours.start_s, engine, step, "its end", *(said if is_left else said[::-1]))
    following = rows[place]
    pair = (following, same) if is_left else (same, following)
    what = _what_differs(*pair)
    assert what is not None, "rows that follow each other differ"
    return Difference(following.start_s, engine, step, *what)


def _tokens(tokens: dict[int, int], wanted: list[int]) -> str:
    said = [f"{tokens.get(number, 0):,} tokens of request {number}" for number in wanted[:MOST_NAMED]]
    return ", ".join(said) + _more(wanted)


def _named(numbers: Sequence[int]) -> str:
    if not numbers:
        return "nobody"
    word = "request" if len(numbers) == 1 else "requests"
    return f"{word} {', '.join(map(str, numbers[:MOST_NAMED]))}{_more(numbers)}"


def _more(numbers: Sequence[int]) -> str:
    return f" and {len(numbers) - MOST_NAMED} more" if len(numbers) > MOST_NAMED else ""
