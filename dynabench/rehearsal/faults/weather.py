"""What is wrong now."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Hashable

CALM_S = 15.0
"""After what time without faults nothing is wrong (s)."""


class Weather:
    """See the module. Faults overlap: what several of them do ends with the last of them."""

    def __init__(self) -> None:
        self.delays: list[float] = []
        """The longest additional delays of faults that are in force (s)."""
        self.slow: dict[str, float] = {}
        """How much longer all messages of a program take at most (s)."""
        self._num_faults = 0
        self._calm_s = 0.0  # when the last ended
        self._amounts: dict[Hashable, list[float]] = {}
        self._held = Counter[Hashable]()

    def begin(self) -> None:
        """A fault has begun."""
        self._num_faults += 1

    def end(self) -> None:
        """A fault has ended."""
        self._num_faults -= 1
        self._calm_s = asyncio.get_running_loop().time()

    @property
    def is_calm(self) -> bool:
        """Whether nothing has been wrong for `CALM_S`."""
        return not self._num_faults and asyncio.get_running_loop().time() - self._calm_s >= CALM_S

    def add(self, what: Hashable, amount: float, set_: Callable[[float], object]) -> Callable[[], None]:
        """Add to what is wrong: `set_` is called with the sum of all amounts; return what takes this one away."""
        amounts = self._amounts.setdefault(what, [])

        def end() -> None:
            amounts.remove(amount)
            set_(sum(amounts))

        amounts.append(amount)
        set_(sum(amounts))
        return end

    def hold(self, what: Hashable, begin: Callable[[], object], end: Callable[[], object]) -> Callable[[], None]:
        """Begin something, unless it has begun; return what ends it, unless something else still holds it."""
        self._held[what] += 1
        if self._held[what] == 1:
            begin()

        def release() -> None:
            self._held[what] -= 1
            if not self._held[what]:
                end()

        return release

    def delay(self, sender: str, receiver: str, rng: random.Random) -> float:
        """Return how long a message takes (s): 0.2 to 0.7 ms, and one in a hundred longer while delays are in force.

        Each message of a program that is slow takes longer.
        """
        usual = 0.0002 + 0.0005 * rng.random()
        if slow_s := self.slow.get(sender):
            usual += slow_s * rng.random()
        return usual + max(self.delays) * rng.random() if self.delays and rng.random() < 0.01 else usual
