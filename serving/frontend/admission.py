"""Which requests may pass: those with the key, unless the process is shutting down or has too many in progress.

This sheds load that one frontend process cannot hold. If all workers are full or busy, the router rejects the request.
"""

import hmac
from collections.abc import Iterable

from serving.frontend.api.errors import ApiError
from serving.frontend.config import FrontendConfig


class KeyAndRoom:
    """See `Admission`: our key, and room for one more request."""

    def __init__(self, config: FrontendConfig) -> None:
        self._key = config.api_key.encode()
        self._limit = config.max_inflight_requests

    def refusal(
        self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]], *, num_open: int, is_draining: bool
    ) -> ApiError | None:
        """See `Admission`."""
        if self._key and not self._has_key(headers):
            unauthorized = {"www-authenticate": "Bearer"}
            return ApiError(401, "no valid API key was given", code="invalid_api_key", headers=unauthorized)
        if method == "POST" and is_draining:
            return ApiError(503, "this server is shutting down", headers={"connection": "close"})
        if method == "POST" and num_open >= self._limit:
            return ApiError(429, f"{self._limit} requests are in progress; retry later")
        return None

    def _has_key(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Return whether the key was given, as a bearer token or as Anthropic's clients do."""
        given = {name: value for name, value in headers if name in (b"authorization", b"x-api-key")}
        scheme, _, token = given.get(b"authorization", b"").partition(b" ")
        is_bearer = scheme.lower() == b"bearer" and hmac.compare_digest(token, self._key)
        return is_bearer or hmac.compare_digest(given.get(b"x-api-key", b""), self._key)
