"""What a worker can do at most within limits, from how long its steps take."""

from typing import Protocol


class StepTimes(Protocol):
    """How long a step takes."""

    def step_s(
        self, prefill_tokens: int, num_decodes: int = 0, num_kv_tokens: int = 0, *, context_tokens: int = 0
    ) -> float:
        """Return the duration of a step (s).

        Args:
            prefill_tokens: prompt tokens that it computes.
            num_decodes: requests to each of which it brings a token.
            num_kv_tokens: the context of those, all together.
            context_tokens: tokens before the prompt tokens that it computes, of the same request.
        """
        ...
