"""How a client measures, and what the self-test's server does."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from foundation.settings import Count, NotNegative, Positive, Share, Whole, check

MAX_FAILED_SHARE = 0.01
"""Share of failed requests above which a run is not valid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """What `dynabench run` measures, and how it sends requests."""

    url: str | None = None
    """Measure this OpenAI endpoint (http://host:port) instead of a stack of our own."""

    prompts: Literal["tokens", "text", "chat"] = "tokens"
    """Send token ids; text, the workload's own or about as many words; or the same as chat messages (for endpoints without /v1/completions)."""

    clients: Annotated[int, Meta(ge=1, le=64)] = 1
    """Processes that send requests, sharing one schedule, for rates that one cannot reach."""

    warmup_requests: Whole | None = None
    """Requests of the workload's lengths, with prompts of their own, that are sent before a run and left out of it (default: 8 for each worker that runs a model, as the first of a size take longer there; else none)."""

    timeout_s: Positive = 600.0
    """Time after which a request counts as failed (s)."""

    max_failed_share: Share = MAX_FAILED_SHARE
    """Share of the requests that may fail; with more a run is not valid, and the exit code is 1."""

    def __post_init__(self) -> None:
        """Refuse settings without a meaning."""
        check(self)
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, not {self.url!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SelftestConfig:
    """What the server of the self-test does."""

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

    def __post_init__(self) -> None:
        """Refuse settings without a meaning."""
        check(self)
