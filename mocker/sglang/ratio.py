"""How much of their output limits running requests are expected to use: SGLang's new token ratio."""

from typing import Final

from mocker.sglang.config import INITIAL_RATIO, LEAST_SHARE, SglangConfig
from mocker.sglang.request import Request

NUM_STEPS_AHEAD: Final = 20
"""Decodes for which there should be room after a retraction."""


class NewTokenRatio:
    """Falls with each decode, and jumps when requests had to be retracted."""

    __slots__ = ("_decay", "_initial", "_least", "now")

    def __init__(self, config: SglangConfig) -> None:
        self._initial = min(INITIAL_RATIO * config.schedule_conservativeness, 1.0)
        self._least = min(self._initial * LEAST_SHARE, 1.0)
        self._decay = (self._initial - self._least) / config.new_token_ratio_decay_steps
        self.now = self._initial

    def decay(self, num_steps: int = 1) -> None:
        """Fall, once for each decode that needed no retraction."""
        for _ in range(num_steps):
            if self.now == self._least:
                return
            self.now = max(self.now - self._decay, self._least)

    def jump(self, stayed: list[Request]) -> None:
        """Follow from the requests that stayed when others were retracted."""
        num_generated = sum([request.generated for request in stayed])
        num_limit = sum([request.max_new for request in stayed])
        self.now = min(1.0, (num_generated + NUM_STEPS_AHEAD * len(stayed)) / (num_limit + 1))

    def reset(self) -> None:
        """Begin again: the engine is idle."""
        self.now = self._initial
