"""How much one connection may use: bytes for a request's head and for the framing of its body, and seconds."""

from collections.abc import Iterable
from dataclasses import dataclass

from serving.frontend.api.errors import ApiError

MAX_URI_BYTES = 8 * 1024
MAX_HEADER_BYTES = 16 * 1024
MAX_HEADERS = 100
MAX_HEAD_BYTES = MAX_URI_BYTES + MAX_HEADER_BYTES + 4 * MAX_HEADERS + 64
"""A request's line and headers as sent: including `: ` and the line end of each header, the method and the version."""

OVERHEAD_BYTES = 64 * 1024
OVERHEAD_RATIO = 2
"""Chunk sizes, extensions and trailers may add up to 64 KiB plus twice the body; a chunk of 3 bytes needs 5 more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one connection."""

    head_timeout_s: float = 10.0
    """From the first byte of a request to the end of its headers, and from connecting to the first byte."""

    idle_timeout_s: float = 75.0
    """From an answer to the next request."""

    unread_timeout_s: float = 60.0
    """How long an answer may wait for its client to read."""

    linger_s: float = 5.0
    linger_bytes: int = 64 << 20
    """How much is still read and discarded of a request that was answered before its end."""

    max_pipelined: int = 16
    """Requests that may wait for their turn before we stop parsing."""


def check_head(url: bytes, headers: Iterable[tuple[bytes, bytes]]) -> int:
    """Check a request's head; return the length of its body, 0 if the head does not say.

    Raises:
        ApiError: the head is over a limit, or the body comes in an unknown form.
    """
    if len(url) > MAX_URI_BYTES:
        raise _too_long_uri()
    num_headers = num_bytes = length = 0
    for name, value in headers:
        num_headers += 1
        num_bytes += len(name) + len(value)
        if name == b"content-length":
            length = int(value)
        elif name == b"transfer-encoding" and value.lower() != b"chunked":
            raise ApiError(501, f"transfer-encoding {value[:100].decode('latin-1')} is not supported, only chunked")
    if num_bytes > MAX_HEADER_BYTES or num_headers > MAX_HEADERS:
        raise _too_many_headers()
    return length


def head_excess(url: bytes) -> ApiError:
    """Return the error for a head of more than `MAX_HEAD_BYTES`."""
    return _too_long_uri() if len(url) > MAX_URI_BYTES else _too_many_headers()


def body_excess(num_fed: int, num_body: int) -> ApiError | None:
    """Return the error if too many of the bytes after a head are not body."""
    if num_fed - num_body <= OVERHEAD_BYTES + OVERHEAD_RATIO * num_body:
        return None
    return ApiError(400, f"chunk sizes, chunk extensions and trailers take up more than {OVERHEAD_BYTES} bytes")


def _too_long_uri() -> ApiError:
    return ApiError(414, f"the address is longer than {MAX_URI_BYTES} bytes")


def _too_many_headers() -> ApiError:
    return ApiError(431, f"more than {MAX_HEADERS} headers, or more than {MAX_HEADER_BYTES} bytes of headers")
