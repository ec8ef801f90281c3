"""Settings of the self-test's server."""

from dataclasses import dataclass

from foundation.settings import CheckedSettings, Count, NotNegative, Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class SelftestConfig(CheckedSettings):
    """Settings of the self-test's server."""

    requests: Count = 500
    """Requests to send."""

    rate: Positive = 97.0
    """Requests per second, at equal distances."""

    ttft_ms: NotNegative = 50.0
    """Time until the first token (ms)."""

    itl_ms: NotNegative = 10.0
    """Time between chunks (ms)."""

    tokens: Count = 32
    """Tokens of an answer."""

    tokens_per_chunk: Count = 1
    """Tokens that come together."""

    clients: Count = 1
    """Client processes."""
