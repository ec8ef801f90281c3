"""What is wrong now."""

import asyncio
import random

CALM_S = 15.0
"""After what time without faults nothing is wrong (s)."""


class Weather:
    """What is wrong now."""

    def __init__(self) -> None:
        self.delays: list[float] = []
        """The longest additional delays of faults that are in force (s)."""
        self.slow: dict[str, float] = {}
        """Programs all of whose messages take longer, and how much longer at most (s)."""
        self.num_faults = 0
        """Faults in force."""
        self._calm_s = 0.0  # when the last ended

    def begin(self) -> None:
        """A fault has begun."""
        self.num_faults += 1

    def end(self) -> None:
        """A fault has ended."""
        self.num_faults -= 1
        self._calm_s = asyncio.get_running_loop().time()

    def is_calm(self, for_s: float) -> bool:
        """Return whether nothing has been wrong for a time (s)."""
        return not self.num_faults and asyncio.get_running_loop().time() - self._calm_s >= for_s

    def delay(self, sender: str, receiver: str, rng: random.Random) -> float:
        """Return how long a message takes (s): 0.2 to 0.7 ms, and one in a hundred longer while delays are in force.

        Each message of a program that is slow takes longer.
        """
        usual = 0.0002 + 0.0005 * rng.random()
        if sender in self.slow:
            usual += self.slow[sender] * rng.random()
        return usual + max(self.delays) * rng.random() if self.delays and rng.random() < 0.01 else usual
