"""The settings of a frontend."""

import os
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from foundation.settings import Positive, Wait, check_settings
from serving.model.card import Migrations
from serving.router import check_live_mode

Port = Annotated[int, Meta(ge=0, le=65535)]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendConfig:
    """Settings of a frontend."""

    http_host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all (then set an API key)."""

    http_port: Port = 8080
    """Port to listen on (0: any free one)."""

    http_workers: Annotated[int, Meta(ge=1, le=64)] = 1
    """Frontend processes that share the port."""

    router_mode: str = "round-robin"
    """How requests are spread over the workers of a model."""

    migration_limit: Migrations | None = None
    """How often a request may continue on another worker after losing its own (none: as its worker registered)."""

    namespace: str = field(default_factory=lambda: os.environ.get("DYN_NAMESPACE", ""))
    """Serve only the models of this namespace (none: all). Environment: DYN_NAMESPACE."""

    api_key: str = field(default="", repr=False)
    """Key that clients must send as a bearer token (none: no key needed). Environment: DYN_API_KEY."""

    cors_allow_origins: str = ""
    """Origins whose web pages may call, such as https://app.example.com, separated by commas; * for all (none: only
    this server's)."""

    max_inflight_requests: Annotated[int, Meta(ge=1, le=1 << 20)] = 4096
    """Requests in progress in one frontend process beyond which it answers 429."""

    max_body_mb: Annotated[int, Meta(ge=1, le=1024)] = 45
    """Largest request body (MiB)."""

    max_buffered_mb: Annotated[int, Meta(ge=1, le=1 << 20)] = 256
    """Memory for request bodies in one frontend process (MiB), beyond which it answers 503; the first 64 KiB of each are not counted."""

    prepare_timeout_s: Positive = 10.0
    """How long a model's chat template and tokenizer may take for one request; beyond it the request gets 400 (s)."""

    drain_s: Wait = 30.0
    """How long requests in progress may take to finish after the process is asked to end (s)."""

    write_timeout_s: Positive = 60.0
    """How long a client may leave its answer unread before its connection is closed (s)."""

    max_kept_responses: Annotated[int, Meta(ge=0, le=1 << 20)] = 4096
    """Responses (/v1/responses) that are kept, so that requests can continue them; the oldest make room. Several frontend
    processes keep none."""

    max_kept_responses_mb: Annotated[int, Meta(ge=1, le=1 << 20)] = 128
    """Memory for kept responses and the conversations that led to them (MiB)."""

    strict: bool = False
    """Refuse every unknown field of a request and of the messages and other objects in it, also those whose value asks for
    nothing (null, false, empty)."""

    allow_kv_transfer_params: bool = False
    """Let clients direct disaggregated requests, as proxies in front of vLLM do: they may ask prefill workers directly,
    and send kv_transfer_params that name hosts for decode workers to read KV from."""

    seed: int = 0
    """Seed of the router's random choices."""

    def __post_init__(self) -> None:
        """Read the key from the environment (as a default, --help would show it), and reject invalid values."""
        object.__setattr__(self, "api_key", self.api_key or os.environ.get("DYN_API_KEY", ""))
        check_settings(self)
        check_live_mode(self.router_mode)
        if self.max_buffered_mb < self.max_body_mb:
            raise ValueError(
                f"max_buffered_mb must be at least max_body_mb ({self.max_body_mb}), not {self.max_buffered_mb}"
            )
        for origin in filter(None, map(str.strip, self.cors_allow_origins.split(","))):
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise ValueError(f"cors_allow_origins: {origin!r} must begin with http:// or https://, or be *")
