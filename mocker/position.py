"""Where a sequence is: the tokens computed when an iteration begins.

While its prompt is computed, and while it waits, they are counted (`num_computed`, `num_known`). While it decodes they are
a function of the iteration, in closed form, so that no iteration touches a sequence:

    iteration                   origin + c - 1   origin + c   origin + c + 1
    tokens computed before it   c - 1            c            c + 1
    tokens known then           c                c + 1        c + 2            the one that it computes included

With speculative decoding, an iteration would add a random number of tokens. The count never falls, so that the iteration
at which something is reached can always be bisected.

One token is also assumed where an iteration is carried out: `Running.schedule` gives a decode one token, `Decoding.grow`
gives it at most one block, `StepTimes` lets what it reads grow by one token, and each gap in a `GapLog` ends with one token.
"""

from bisect import bisect_right
from collections.abc import Callable
from typing import Final, TypeVar

NEVER: Final = 1 << 62


class Position:
    """The position of one sequence."""

    __slots__ = ("decoding", "last_iteration", "num_computed", "num_known", "num_total", "origin")

    def __init__(self, num_known: int, num_total: int) -> None:
        """Begin with a prompt of which nothing is computed."""
        self.num_known = num_known  # prompt and output tokens; kept only while not decoding
        self.num_computed = 0  # likewise
        self.num_total = num_total  # at which it ends
        self.decoding = False
        self.origin = 0
        self.last_iteration = NEVER  # the one that samples its last token; set while it decodes

    def computed(self, iteration: int) -> int:
        """Count the tokens that are computed when an iteration begins."""
        return iteration - self.origin if self.decoding else self.num_computed

    def known(self, iteration: int) -> int:
        """Count the tokens that are known when all iterations before one have ended."""
        return iteration - self.origin + 1 if self.decoding else self.num_known

    def begin_decoding(self, iteration: int) -> None:
        """Let an iteration compute the last known token, and each following one the token that this brings."""
        self.decoding = True
        self.origin = iteration - self.num_known
        self.last_iteration = self.origin + self.num_total - 2

    def end_decoding(self, num_computed: int) -> None:
        """Count from now on; the caller sets what is known."""
        self.decoding = False
        self.num_computed = num_computed

    def delay(self, iteration: int) -> None:
        """Compute nothing in an iteration; a last token in flight is not late."""
        self.origin += 1
        if self.last_iteration >= iteration:
            self.last_iteration += 1


P = TypeVar("P", bound=Position)


class Total:
    """The tokens that decoding sequences have computed, summed without touching each."""

    __slots__ = ("_origins", "num_sequences")

    def __init__(self) -> None:
        self.num_sequences = 0
        self._origins = 0

    def add(self, position: Position) -> None:
        """Count one that decodes from now on."""
        self.num_sequences += 1
        self._origins += position.origin

    def remove(self, position: Position) -> None:
        """Count it no longer."""
        self.num_sequences -= 1
        self._origins -= position.origin

    def computed(self, iteration: int) -> int:
        """Count the tokens that are computed when an iteration begins."""
        return self.num_sequences * iteration - self._origins


def starting(decodes: list[P], iteration: int, size: int) -> list[P]:
    """Return the decodes whose token in an iteration is the first of a block."""
    return [p for p in decodes if (iteration - p.origin) % size == 0]


def starting_or_filling(decodes: list[P], iteration: int, size: int) -> list[P]:
    """Return the decodes whose token in an iteration is the first or the last of a block."""
    return [p for p in decodes if (iteration - p.origin + 1) % size < 2]


def num_full(decodes: list[P], iteration: int, size: int) -> list[int]:
    """Count, for each decode, the blocks that are full when an iteration begins."""
    return [(iteration - p.origin) // size for p in decodes]


def num_started(decodes: list[P], first: int, stop: int, size: int) -> int:
    """Count the blocks that decodes start in iterations `first` to `stop`, exclusive."""
    begin, end = first - 1, stop - 1  # ceil((i - origin) / size) = (i - 1 - origin) // size + 1
    return sum([(end - p.origin) // size - (begin - p.origin) // size for p in decodes])


def num_within(amount: Callable[[int], int], most: int, limit: int) -> int:
    """Return for how many iterations, at most `limit`, an amount that never falls is at most `most`."""
    return bisect_right(range(1, limit + 1), most, key=amount)
