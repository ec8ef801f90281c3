"""TLS connections on uvloop's loop."""

import asyncio
import logging
from typing import Any

log = logging.getLogger(__name__)


def expect_lost_connections() -> None:
    """Log a TLS connection that is lost while it still has something to send as what it is, not as a fatal error.

    uvloop's TLS answers what it reads (with an alert or new keys) on a connection that is already closed, and reports
    that as a bug. The user of the connection learns of the loss from the connection itself.
    """
    asyncio.get_running_loop().set_exception_handler(_handle)


def _handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    transport: asyncio.BaseTransport | None = context.get("transport")
    is_lost = transport is not None and transport.is_closing() and isinstance(context.get("exception"), RuntimeError)
    if is_lost and "SSL" in context["message"]:
        log.debug("a TLS connection was lost: %s", context["exception"])
    else:
        loop.default_exception_handler(context)
