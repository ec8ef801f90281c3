"""Which requests may pass, as in vLLM: below /v1, those with one of the keys."""

import hmac
from collections.abc import Iterable

from serving.frontend.api.errors import ApiError


class Keys:
    """See `Admission`."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = [key.encode() for key in keys]

    def refusal(
        self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]], *, num_open: int, is_draining: bool
    ) -> ApiError | None:
        """See `Admission`."""
        if not self._keys or method == "OPTIONS" or not path.startswith("/v1"):
            return None
        scheme, _, token = dict(headers).get(b"authorization", b"").partition(b" ")
        is_known = [hmac.compare_digest(token, key) for key in self._keys]  # all of them: the time tells nothing
        if scheme.lower() == b"bearer" and any(is_known):
            return None
        return ApiError(401, "Unauthorized")
