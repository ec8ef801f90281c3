"""What the answers of a simulated engine are like."""

from dataclasses import dataclass

from foundation.settings import Share, check


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerConfig:
    """Settings of a simulated engine's answers."""

    tool_call_share: Share = 0.0
    """Share of the answers that call a tool, of requests that offer some and leave the choice to the model."""

    def __post_init__(self) -> None:
        """Reject invalid values."""
        check(self)
