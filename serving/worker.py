"""A worker process: one engine, served to a frontend over a Unix socket. It ends when its standard input does."""

import asyncio
import json
import signal
import sys
from typing import Any

import msgspec
import uvloop

from serving.engines.mock import MockEngine
from serving.wire import Command, Frames, Generate, StepFrame, frame, wait_closed


class WorkerSettings(msgspec.Struct):
    """What a worker is told on the command line, as JSON."""

    socket: str
    engine: dict[str, Any]
    kv_events: bool = True


async def serve(settings: WorkerSettings) -> None:
    """Serve one frontend until it disconnects."""
    done = asyncio.Event()

    async def session(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def publish(step: StepFrame) -> None:
            writer.write(frame(step))

        engine = MockEngine(settings.engine, publish, kv_events=settings.kv_events)
        frames = Frames(Command)
        stepping = asyncio.create_task(engine.run(writer.drain))
        try:
            while data := await reader.read(1 << 20):
                for command in frames.feed(data):
                    if isinstance(command, Generate):
                        engine.generate(command)
                    else:
                        engine.cancel(command.id)
                if stepping.done():
                    await stepping
        except (ConnectionError, asyncio.CancelledError):
            pass  # the frontend is gone, or the launcher wants us gone: nobody is left to tell
        finally:
            stepping.cancel()
            await wait_closed(writer)
            done.set()

    server = await asyncio.start_unix_server(session, settings.socket)
    async with server:
        watch = asyncio.create_task(stdin_closed())
        await asyncio.wait([watch, asyncio.create_task(done.wait())], return_when=asyncio.FIRST_COMPLETED)


async def stdin_closed() -> None:
    """Return once standard input ends: the process that started this one closed it or died."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


def main() -> None:
    """Run a worker from JSON settings in the first argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides when to stop
    settings = msgspec.convert(json.loads(sys.argv[1]), WorkerSettings)
    uvloop.run(serve(settings))


if __name__ == "__main__":
    main()
