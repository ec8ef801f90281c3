"""A TLS connection that is lost."""

import asyncio
import logging

import uvloop

from serving.runtime.tls import expect_lost_connections

FATAL = "Fatal error on SSL protocol"


def reported(caplog, *, is_closed, message=FATAL):
    """Return what is logged when uvloop cannot write to a transport."""

    async def main():
        expect_lost_connections()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
        transport, protocol = await loop.create_connection(asyncio.Protocol, *server.sockets[0].getsockname())
        if is_closed:
            transport.abort()
        error = RuntimeError("unable to perform operation")
        loop.call_exception_handler(
            {"message": message, "exception": error, "transport": transport, "protocol": protocol}
        )
        transport.abort()
        server.close()

    with caplog.at_level(logging.INFO):
        uvloop.run(main())
    return caplog.text


def test_a_lost_tls_connection_is_not_reported_as_a_bug(caplog):
    assert not reported(caplog, is_closed=True)


def test_an_error_on_an_open_connection_is_reported(caplog):
    assert FATAL in reported(caplog, is_closed=False)


def test_other_errors_are_reported(caplog):
    assert "Task exception" in reported(caplog, is_closed=True, message="Task exception was never retrieved")
