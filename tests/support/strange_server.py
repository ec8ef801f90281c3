"""A server that answers every request in one strange way."""

import asyncio
import contextlib
import json
import threading


@contextlib.contextmanager
def strange_server(answer, seen=None, *, heads=None, paths=None, tls=None):
    """Serve one behaviour: `answer(reader, writer)` after the request was read.

    `seen` gets what was asked, `heads` the headers, and `paths` where to. `tls` is the context of a server with a certificate.
    """
    started, stopping = threading.Event(), None
    port = 0

    async def serve():
        nonlocal port, stopping
        stopping = asyncio.Event()

        async def on_client(reader, writer):
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.split(b"\r\n")
                length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
                body = await reader.readexactly(length)
                if paths is not None and body:
                    paths.append(lines[0].split()[1].decode())
                if heads is not None and body:
                    heads.append(dict(line.decode().split(": ", 1) for line in lines[1:] if line))
                if seen is not None and body:
                    seen.append(json.loads(body))
                await answer(reader, writer)
            writer.close()

        server = await asyncio.start_server(on_client, "127.0.0.1", 0, ssl=tls)
        port = server.sockets[0].getsockname()[1]
        loops.append(asyncio.get_running_loop())
        started.set()
        await stopping.wait()
        server.close()

    loops = []
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    started.wait()
    try:
        yield f"http{'s' * bool(tls)}://127.0.0.1:{port}"
    finally:
        loops[0].call_soon_threadsafe(stopping.set)
        thread.join()


HEAD = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(text):
    data = text.encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


EVENT = 'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'
FINISH = 'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\n'
DONE = "data: [DONE]\n\n"


def usage(prompt, completion):
    return f'data: {{"choices":[],"usage":{{"prompt_tokens":{prompt},"completion_tokens":{completion}}}}}\n\n'


def says(*texts):
    """Make the behaviour of a server that answers with these events, each in a write of its own."""

    async def answer(reader, writer):
        writer.write(HEAD)
        for text in texts:
            writer.write(chunk(text))
            await writer.drain()
            await asyncio.sleep(0.002)
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    return answer


async def answers(reader, writer):
    writer.write(HEAD + chunk(EVENT) + chunk(FINISH + usage(16, 1) + DONE) + b"0\r\n\r\n")
    await writer.drain()
