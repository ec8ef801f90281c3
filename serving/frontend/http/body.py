"""A request's body: read within its own limits, and within the process's budget for all bodies together."""

import asyncio
import re
from types import TracebackType

from starlette.requests import Request

from serving.frontend.api.errors import ApiError

FREE_BYTES = 64 * 1024
"""The start of each body that the budget does not count: small requests pass while large ones are rejected."""

BODY_TIMEOUT_S = 60.0


class BodyBudget:
    """Bytes of bodies that a process may hold at once."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self.num_held = 0

    def reserve(self, num_bytes: int) -> None:
        """Count some bytes.

        Raises:
            ApiError: there is no room for them.
        """
        self.check(num_bytes)
        self.num_held += num_bytes

    def release(self, num_bytes: int) -> None:
        """Stop counting some bytes."""
        self.num_held -= num_bytes

    def check(self, num_bytes: int) -> None:
        """Check that there is room.

        Raises:
            ApiError: there is no room.
        """
        if self.num_held + num_bytes > self._limit:
            message = f"the bodies of other requests fill {self._limit >> 20} MiB; retry later (--max-buffered-mb)"
            raise ApiError(503, message, headers={"connection": "close"})  # the rest of the body is not read

    def share(self) -> "Share":
        """Return a share for one body, to be used as a context."""
        return Share(self)


class Share:
    """One body's share of the budget; it is released at the end of the context, however that ends."""

    __slots__ = ("_budget", "_num_bytes")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._num_bytes = 0

    def __enter__(self) -> "Share":
        return self

    def __exit__(
        self, type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._budget.release(self._num_bytes)

    def expect(self, size: int) -> None:
        """Reject a body that there is no room for, before any of it is read.

        Raises:
            ApiError: there is no room.
        """
        if size > FREE_BYTES:
            self._budget.check(size - FREE_BYTES)

    def grow(self, size: int) -> None:
        """Reserve as much as a body of this size needs.

        Raises:
            ApiError: there is no room.
        """
        more = size - FREE_BYTES - self._num_bytes
        if more > 0:
            self._budget.reserve(more)
            self._num_bytes += more


async def read_body(request: Request, share: Share, max_bytes: int) -> bytearray:
    """Return a request's body.

    Raises:
        ApiError: it is not JSON, too large, too slow, or there is no room for it.
    """
    _check_content_type(request.headers.get("content-type", "application/json").lower())
    too_large = ApiError(413, f"the body is larger than {max_bytes >> 20} MiB")
    length = int(request.headers.get("content-length", 0))  # only digits: the parser has checked
    if length > max_bytes:
        raise too_large
    share.expect(length)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                if len(body) + len(chunk) > max_bytes:
                    raise too_large
                share.grow(len(body) + len(chunk))
                body += chunk
    except TimeoutError as error:
        raise ApiError(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from error
    return body


def _check_content_type(content_type: str) -> None:
    media_type, _, parameters = content_type.partition(";")
    charset = re.search(r"charset\s*=\s*\"?([\w-]+)", parameters)
    if media_type.strip() not in ("application/json", "application/octet-stream", "") or (
        charset is not None and charset[1] not in ("utf-8", "utf8", "us-ascii")
    ):
        raise ApiError(415, f"the content type must be application/json in UTF-8, not {content_type[:100]}")
