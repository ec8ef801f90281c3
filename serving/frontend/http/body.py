"""A request's body: read within its own limits, and within the process's budget for all bodies together."""

import asyncio
import contextlib
import re
import zlib
from collections.abc import AsyncIterator, Iterator
from types import TracebackType

from starlette.requests import Request

from serving.frontend.api.errors import ApiError

FREE_BYTES = 64 * 1024
"""The start of each body that the budget does not count: small requests pass while large ones are rejected."""

BODY_TIMEOUT_S = 60.0

CODINGS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""The encodings of a body that are read, and zlib's number for each."""

PIECE_BYTES = 1 << 20
"""A body is decoded in pieces of this size, in a few milliseconds each; between them, others get a turn."""


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
        """Check that there is room."""
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
        """Reject a body that there is no room for, before any of it is read."""
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
        ApiError: it is not JSON, not encoded as it says, too large, too slow, or there is no room for it.
    """
    _check_content_type(request.headers.get("content-type", "application/json").lower())
    too_large = ApiError(413, f"the body is larger than {max_bytes >> 20} MiB")
    length = int(request.headers.get("content-length", 0))  # only digits: the parser has checked
    if length > max_bytes:
        raise too_large
    share.expect(length)
    body, decoder = bytearray(), _decoder(request.headers.get("content-encoding", "identity").lower())
    async with _in_time():
        async for chunk in request.stream():
            for piece in (chunk,) if decoder is None else decoder.pieces(chunk):
                if len(body) + len(piece) > max_bytes:
                    raise too_large
                share.grow(len(body) + len(piece))
                body += piece
                if decoder is not None:
                    await asyncio.sleep(0)
    if decoder is not None:
        decoder.end()
    return body


async def read_small_body(request: Request, max_bytes: int) -> bytearray:
    """Return a request's body as it was sent; so few bytes need no budget.

    Raises:
        ApiError: it is too large or too slow.
    """
    body = bytearray()
    async with _in_time():
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_bytes:
                raise ApiError(413, f"the body is longer than {max_bytes} bytes")
    return body


@contextlib.asynccontextmanager
async def _in_time() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            yield
    except TimeoutError as error:
        raise ApiError(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from error


class _Decoder:
    """Decodes a compressed body piece by piece: a few bytes may stand for gigabytes."""

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._inflate = self._next()

    def _next(self) -> "zlib._Decompress":
        return zlib.decompressobj(CODINGS[self._coding])

    def pieces(self, chunk: bytes) -> Iterator[bytes]:
        """Yield what a chunk stands for."""
        while chunk:
            if self._inflate.eof and self._coding == "deflate":
                raise self._broken()
            if self._inflate.eof:
                self._inflate = self._next()  # gzip may have any number of members (RFC 1952, 2.2)
            try:
                yield self._inflate.decompress(chunk, PIECE_BYTES)
            except zlib.error as error:
                raise self._broken() from error
            chunk = self._inflate.unconsumed_tail or self._inflate.unused_data

    def end(self) -> None:
        """Check that nothing is missing."""
        if not self._inflate.eof:
            raise self._broken()

    def _broken(self) -> ApiError:
        return ApiError(400, f"the body is not {self._coding}, as its content-encoding says")


def _decoder(coding: str) -> _Decoder | None:
    if coding in ("identity", ""):
        return None
    if coding not in CODINGS:
        message = f"content-encoding {coding[:100]} is not supported; expected gzip, deflate or none"
        raise ApiError(415, message, headers={"accept-encoding": "gzip, deflate"})
    return _Decoder(coding)


def _check_content_type(content_type: str) -> None:
    media_type, _, parameters = content_type.partition(";")
    charset = re.search(r"charset\s*=\s*\"?([\w-]+)", parameters)
    if media_type.strip() not in ("application/json", "application/octet-stream", "") or (
        charset is not None and charset[1] not in ("utf-8", "utf8", "us-ascii")
    ):
        raise ApiError(415, f"the content type must be application/json in UTF-8, not {content_type[:100]}")
