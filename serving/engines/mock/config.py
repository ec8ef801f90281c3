"""What the answers of a simulated engine are like."""

import re
from dataclasses import dataclass

from foundation.settings import Share, check_settings

OUTPUT_TOKENS = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(?::(\d{1,9}(?:\.\d{1,9})?))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerConfig:
    """Settings of a simulated engine's answers."""

    answers: str = "random"
    """What answers say: random words (random), the prompt again (echo), or what a file has: the lines of a text, or of a
    .jsonl with a prompt and its answer in each (its path)."""

    output_tokens: str = ""
    """Length of answers to requests that do not limit it: MEAN or MEAN:STDDEV in tokens (default: 16 to 271)."""

    tool_call_share: Share = 0.0
    """Share of the answers that call a tool, of requests that offer some and leave the choice to the model."""

    def __post_init__(self) -> None:
        """Reject invalid values."""
        check_settings(self)
        if not self.answers:
            raise ValueError("answers is empty; expected random, echo or the path of a file")
        if self.output_tokens and (OUTPUT_TOKENS.fullmatch(self.output_tokens) is None or self.lengths[0] < 1):
            raise ValueError(
                f"output_tokens is {self.output_tokens!r}; expected MEAN or MEAN:STDDEV, such as 200 or 200:50, with a mean "
                "of at least 1"
            )

    @property
    def lengths(self) -> tuple[float, float]:
        """Mean and standard deviation of `output_tokens`."""
        mean, _, deviation = self.output_tokens.partition(":")
        return float(mean), float(deviation or 0)
