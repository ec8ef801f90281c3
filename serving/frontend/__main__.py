"""A frontend process: HTTP on a loopback port, workers over Unix sockets. It ends when its standard input does."""

import asyncio
import json
import random
import signal
import socket
import sys
from typing import Any

import msgspec
import uvicorn
import uvloop

from serving.frontend.app import Frontend, make_app
from serving.frontend.links import WorkerPool
from serving.router import Router, RouterConfig
from serving.worker import stdin_closed


class FrontendSettings(msgspec.Struct):
    """What a frontend is told on the command line, as JSON."""

    file_descriptor: int
    """Listening socket, inherited."""
    model: str
    block_size: int
    router_mode: str
    router: dict[str, Any]
    seed: int
    worker_sockets: list[str]


async def serve(settings: FrontendSettings) -> None:
    """Serve HTTP until standard input ends."""
    router = Router(
        settings.router_mode,
        msgspec.convert(settings.router, RouterConfig),
        block_size=settings.block_size,
        rng=random.Random(f"router {settings.seed}"),
    )
    pool = WorkerPool(router, asyncio.get_running_loop().time)
    for number, path in enumerate(settings.worker_sockets):
        await pool.connect(number, path)
    frontend = Frontend(pool, model=settings.model, block_size=settings.block_size)
    config = uvicorn.Config(
        make_app(frontend),
        log_level="warning",
        access_log=False,
        http="httptools",
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    listener = socket.socket(fileno=settings.file_descriptor)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await asyncio.wait([serving, asyncio.create_task(stdin_closed())], return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    pool.close()
    await serving


def main() -> None:
    """Run a frontend from JSON settings in the first argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides when to stop
    settings = msgspec.convert(json.loads(sys.argv[1]), FrontendSettings)
    uvloop.run(serve(settings))


if __name__ == "__main__":
    main()
