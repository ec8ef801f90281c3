"""A TLS connection that is lost."""

import asyncio
import logging

import pytest
import uvloop

from serving.runtime.tls import expect_lost_connections

FATAL = "Fatal error on SSL protocol"


class Watched(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
        self.when_made()

    def when_made(self):
        pass


async def lost(loop, address):
    """Return the transport of a connection that was closed after it was made."""
    transport, _ = await loop.create_connection(Watched, *address)
    transport.abort()
    await asyncio.sleep(0)
    return transport


async def given_up(loop, address):
    """Return the transport of a connection that was given up while it was made."""
    protocol = Watched()
    connecting = asyncio.ensure_future(loop.create_connection(lambda: protocol, *address))
    protocol.when_made = connecting.cancel
    await asyncio.wait([connecting])
    assert connecting.cancelled() and not protocol.transport.is_closing()
    return protocol.transport


def reported(caplog, make, message=FATAL, error=None):
    """Return what is logged when uvloop's TLS meets an error, or else what a write to the transport raises."""

    async def main():
        expect_lost_connections()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
        transport = await make(loop, server.sockets[0].getsockname())
        if error is None:
            with pytest.raises(RuntimeError) as raised:
                transport.set_write_buffer_limits()
        loop.call_exception_handler(
            {"message": message, "exception": error or raised.value, "transport": transport, "protocol": None}
        )
        server.close()

    with caplog.at_level(logging.INFO):
        uvloop.run(main())
    return caplog.text


@pytest.mark.parametrize("make", [lost, given_up])
def test_a_lost_tls_connection_is_not_reported_as_a_bug(caplog, make):
    assert not reported(caplog, make)


@pytest.mark.parametrize("make", [lost, given_up])
def test_another_error_is_reported(caplog, make):
    assert FATAL in reported(caplog, make, error=RuntimeError("invalid state"))


def test_an_error_of_something_else_is_reported(caplog):
    assert "Task exception" in reported(caplog, lost, "Task exception was never retrieved")
