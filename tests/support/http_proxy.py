"""An HTTP proxy, for requests and for tunnels."""

import asyncio
import contextlib
import threading

from tests.support.waiting import PATIENCE_S


@contextlib.contextmanager
def http_proxy(seen, *, refusal=b""):
    """Serve a proxy; `seen` gets the head of each request to it. It refuses all with `refusal`, if there is one."""
    started, found = threading.Event(), {}

    async def on_client(reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            seen.append(head.decode())
            if refusal:
                writer.write(refusal)
                await writer.drain()
            else:
                await lead(head, reader, writer)
        writer.close()

    async def lead(head, reader, writer):
        method, place, _ = head.split(b" ", 2)
        address = place.decode() if method == b"CONNECT" else place.decode().split("/")[2]
        host, _, port = address.rpartition(":")
        there, back = await asyncio.open_connection(host, int(port))
        if method == b"CONNECT":
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            back.write(head.replace(b"http://" + address.encode(), b"", 1))
        await asyncio.gather(passed(reader, back), passed(there, writer))

    async def passed(reader, writer):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve():
        server = await asyncio.start_server(on_client, "127.0.0.1", 0)
        found.update(port=server.sockets[0].getsockname()[1], loop=asyncio.get_running_loop(), stop=asyncio.Event())
        started.set()
        await found["stop"].wait()
        server.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(PATIENCE_S)
    try:
        yield f"127.0.0.1:{found['port']}"
    finally:
        found["loop"].call_soon_threadsafe(found["stop"].set)
        thread.join()
