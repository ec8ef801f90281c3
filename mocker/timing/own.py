"""Step times of the user's own, from a class in a Python file: `--timing-file FILE.py`."""

import math

from mypy_extensions import mypyc_attr

from foundation.own_code import own_class
from mocker.timing.model import Knots, Load, Prefill, Ramp, TimingModel, slowest, verified


@mypyc_attr(allow_interpreted_subclasses=True)
class StepTimes:
    """A step-time model; a user's class derives from it and defines `step_s`."""

    lead_s = 0.0
    knots = Knots()

    def step_s(self, prefill_tokens: int, num_decodes: int, num_kv_tokens: int) -> float:
        """Return how long a step takes (s).

        Args:
            prefill_tokens: prompt tokens that it computes, of all sequences.
            num_decodes: sequences that get a token in it.
            num_kv_tokens: tokens of context that these read.
        """
        raise NotImplementedError

    def mixed(self, prefill: Prefill, num_decodes: int, num_kv_tokens: int) -> float:
        """Return the time of a step with prefill (s)."""
        return self._checked(prefill.num_tokens, num_decodes, num_kv_tokens)

    def decode(self, num_sequences: int, num_kv_tokens: int) -> Ramp:
        """Return the time of one step: how the next one differs is not known."""
        return Ramp(self._checked(0, num_sequences, num_kv_tokens), num_steps=1)

    def among(self, loads: list[Load]) -> float:
        """The slowest rank decides."""
        return slowest(self, loads)

    def verify(self, load: Load, num_drafts: int) -> float:
        """Each draft is like one more decode."""
        return verified(self, load, num_drafts)

    def _checked(self, prefill_tokens: int, num_decodes: int, num_kv_tokens: int) -> float:
        seconds = self.step_s(prefill_tokens, num_decodes, num_kv_tokens)
        if not 0 <= seconds < math.inf:
            raise ValueError(
                f"{type(self).__name__}.step_s({prefill_tokens}, {num_decodes}, {num_kv_tokens}) is {seconds!r}; expected seconds"
            )
        return float(seconds)


def own_times(name: str) -> TimingModel:
    """Return the model that a name refers to.

    Raises:
        ValueError: the file cannot be run, or has no such class.
    """
    try:
        return own_class(name, StepTimes)()
    except ValueError as error:
        raise ValueError(f"timing_file {error}") from error
