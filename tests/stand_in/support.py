"""A stand-in in the test's own process, and a client of it."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx

from serving.engines.mock.engine import EngineConfig
from serving.stand_in.config import ApiConfig, StandInConfig
from serving.stand_in.server import serve_stand_in
from serving.stand_in.vllm.app import VllmServer


def client_of(server: VllmServer) -> httpx.AsyncClient:
    """Return a client of a server that no socket is in front of."""
    transport = httpx.ASGITransport(server.app)
    return httpx.AsyncClient(transport=transport, base_url="http://here", timeout=30)


@contextlib.asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Run a stand-in with these settings of `StandInConfig`, whose usage says what was cached; yield a client."""
    engine, api = EngineConfig(block_size=16, num_gpu_blocks=256), ApiConfig(enable_prompt_tokens_details=True)
    defaults = {"model": "tiny", "engine": engine, "api": api}
    stopping = asyncio.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    url = "http://{}:{}".format(*listener.getsockname())
    serving = asyncio.create_task(serve_stand_in(StandInConfig(**(defaults | settings)), stopping, listener))
    try:
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            yield client
    finally:
        stopping.set()
        await serving
