"""TLS: what we trust and present, and connections on uvloop's loop."""

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Any

from serving.runtime.ports import RuntimeUnavailableError

log = logging.getLogger(__name__)

CLOSED = "the handler is closed"
"""How uvloop's error ends. A connection that was given up while it was made is closed without `is_closing()`."""


def context(server: str, ca: str, certificate: str = "", key: str = "") -> ssl.SSLContext:
    """Return a client's side of TLS: which authority it trusts (none: the system's), and the certificate it presents.

    Raises:
        RuntimeUnavailableError: a file cannot be read, or is not what it should be.
    """
    for file in filter(None, (ca, certificate, key)):
        check_readable(file, server)
    try:
        made = ssl.create_default_context(cafile=ca or None)
    except ssl.SSLError as error:
        raise RuntimeUnavailableError(f"{ca} is not a certificate; expected {server}'s authority in PEM") from error
    if certificate:
        try:
            made.load_cert_chain(certificate, key or None)
        except ssl.SSLError as error:
            raise RuntimeUnavailableError(
                f"{' and '.join(filter(None, (certificate, key)))} cannot be presented to {server} "
                f"({error.reason or error}); expected a certificate and its key in PEM"
            ) from error
    return made


def check_readable(file: str, server: str) -> None:
    """Refuse a file that a client would find unreadable only later, as a server that does not answer.

    Raises:
        RuntimeUnavailableError: it cannot be read.
    """
    try:
        Path(file).read_bytes()
    except OSError as error:
        raise RuntimeUnavailableError(
            f"{file} cannot be read ({error.strerror}); expected a file for {server}"
        ) from error


def expect_lost_connections() -> None:
    """Log a TLS connection that is lost while it still has something to send as what it is, not as a fatal error.

    uvloop's TLS answers what it reads (with an alert or new keys) on a connection that is already closed, and reports
    that as a bug. The user of the connection learns of the loss from the connection itself.
    """
    asyncio.get_running_loop().set_exception_handler(_handle)


def _handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    error = context.get("exception")
    if isinstance(error, RuntimeError) and str(error).endswith(CLOSED) and "SSL" in context["message"]:
        log.debug("a TLS connection was lost: %s", error)
    else:
        loop.default_exception_handler(context)
