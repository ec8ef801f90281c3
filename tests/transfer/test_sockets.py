"""This host's connections."""

import asyncio
import socket

import uvloop

from serving.transfer.sockets import SILENCE_S, connect, listen


def test_both_ends_send_without_delay_and_detect_that_the_other_host_is_gone():
    async def main():
        listener = await listen("127.0.0.1", 0)
        ours, theirs = await asyncio.gather(connect(listener.host, listener.port), listener.accept())
        for each in (ours, theirs):
            option = each.socket.getsockopt
            assert option(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert option(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert option(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == SILENCE_S
            each.close()
        listener.close()

    uvloop.run(main())
