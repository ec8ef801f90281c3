"""TCP connections whose ends have both proven that they know the cluster's token (`serving/runtime/proof.py`)."""

import asyncio
import socket
from collections.abc import Callable

from serving.runtime.proof import NONCE_BYTES, Handshake, ProofError
from serving.runtime.world import world
from serving.transfer.agent import TransferError
from serving.transfer.stream import Stream

MIN_TOKEN_BYTES = 16
BACKLOG = 1024

SILENCE_S = 30
"""The silence after which the system checks whether the other host is still there."""

MAX_PROOF_BYTES = 256
"""The most that is read at once before the other side has proven itself."""

Token = Callable[[], bytes]


async def listen(host: str, port: int = 0) -> socket.socket:
    """Listen at a port of this host, by default a free one.

    Raises:
        OSError, UnicodeError: this host has no such address, or the port is in use.
    """
    loop = asyncio.get_running_loop()
    family, _, _, _, place = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


async def connect(host: str, port: int) -> socket.socket:
    """Connect to a port.

    Raises:
        OSError: nobody answers there.
    """
    loop = asyncio.get_running_loop()
    try:
        places = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"{host!r} is not a host name: {error}") from error
    for number, (family, _, _, _, place) in enumerate(places):
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            await loop.sock_connect(connection, place)
        except BaseException as error:
            connection.close()
            if not isinstance(error, OSError) or number + 1 == len(places):
                raise
        else:
            return connection
    raise OSError(f"{host!r} has no address")


async def prove(stream: Stream, place: str, token: bytes, *, is_caller: bool) -> None:
    """Prove that we know the token, and check that the other side does; `place` is both sides' name for this address.

    Raises:
        TransferError: it does not, or finds that we do not.
        OSError: it hung up.
    """
    set_options(stream.socket)
    handshake = Handshake(token, place, world().entropy.randbytes(NONCE_BYTES), is_caller=is_caller)
    is_asked = False
    try:
        await stream.send(handshake.start())
        while not handshake.is_over:
            if answer := handshake.feed(await stream.receive_some(MAX_PROOF_BYTES)):
                is_asked = True
                await stream.send(answer)
    except ProofError as error:
        raise TransferError(f"{place} is not trusted: {error}", "refused") from error
    except ConnectionError as error:
        if not is_asked:
            raise
        raise TransferError(f"{place} hung up on this agent's proof: does it have another token?", "refused") from error
    stream.put_back(handshake.rest)


def set_options(connection: socket.socket) -> None:
    """Send without delay, and detect that the other host is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S)
