"""A stand-in for vLLM in a thread of the test's process, for tests that do not run in a loop themselves."""

import asyncio
import contextlib
import socket
import threading

import httpx

from serving.stand_in.server import serve_stand_in
from tests.support.waiting import PATIENCE_S


@contextlib.contextmanager
def served_in_thread(config):
    """Run a stand-in; give a client of it."""
    listener = socket.create_server(("127.0.0.1", 0))
    url = "http://{}:{}".format(*listener.getsockname())
    loop, stopping = asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=[serve_stand_in(config, stopping, listener)])
    thread.start()
    try:
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
            yield client
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join()
        loop.close()
