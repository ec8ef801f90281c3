"""Start the processes of a local stack, and leave none behind.

Each child reads its standard input and ends when that does, so that even a killed launcher leaves no process.
"""

import asyncio
import json
import os
import shutil
import socket
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp

from mocker import EngineConfig
from serving.router import ROUTER_MODES, RouterConfig
from serving.router.policies import Kv

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 1.5


class LaunchError(Exception):
    """A stack that did not start, or a process of it that died."""


def listen(host: str, port: int) -> socket.socket:
    """Bind a listening socket.

    Raises:
        LaunchError: the port is taken, or may not be bound.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise LaunchError(
            f"port {port} on {host} cannot be used: {error.strerror}; name another with --http-port"
        ) from error
    listener.listen(1024)
    listener.set_inheritable(True)
    return listener


class LocalStack:
    """A frontend with its router, and mocker workers, as processes on this host; use as `async with`."""

    def __init__(
        self,
        *,
        mode: str,
        engine: EngineConfig,
        router: RouterConfig,
        num_workers: int,
        seed: int,
        model: str,
        host: str,
        port: int,
    ) -> None:
        self.model = model
        self._mode = mode
        self._engine = engine
        self._router = router
        self._num_workers = num_workers * engine.dp_size
        self._seed = seed
        self._listener = listen(host, port)
        self.url = f"http://{host}:{self._listener.getsockname()[1]}"
        self._folder = Path(tempfile.mkdtemp(prefix="dynabench-"))
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    async def __aenter__(self) -> Self:
        """Start everything and wait until it answers.

        Raises:
            LaunchError: a process died or did not answer in time.
        """
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._start()
        except TimeoutError as error:
            await self.stop()
            raise LaunchError(f"the stack did not answer within {START_TIMEOUT_S:g} s") from error
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def dead(self) -> list[str]:
        """Name the processes that have ended."""
        return [name for name, process in self._processes.items() if process.returncode is not None]

    async def stop(self) -> None:
        """End all processes and remove what they left."""
        for process in self._processes.values():
            if process.stdin is not None:
                process.stdin.close()
        ends = [asyncio.ensure_future(process.wait()) for process in self._processes.values()]
        if ends:
            await asyncio.wait(ends, timeout=STOP_TIMEOUT_S)
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()
        await asyncio.gather(*ends)
        self._processes.clear()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _start(self) -> None:
        wants_events = ROUTER_MODES[self._mode] is Kv and self._router.use_kv_events
        sockets = []
        for number in range(self._num_workers):
            path = str(self._folder / f"worker-{number}.sock")
            settings = {"socket": path, "engine": asdict(self._engine), "kv_events": wants_events}
            await self._spawn(f"worker {number}", "serving.worker", settings)
            sockets.append(path)
        while not all(Path(path).exists() for path in sockets):
            self._check()
            await asyncio.sleep(0.01)
        settings = {
            "file_descriptor": self._listener.fileno(),
            "model": self.model,
            "block_size": self._engine.block_size,
            "router_mode": self._mode,
            "router": asdict(self._router),
            "seed": self._seed,
            "worker_sockets": sockets,
        }
        await self._spawn("frontend", "serving.frontend", settings, fds=(self._listener.fileno(),))
        async with aiohttp.ClientSession() as session:
            asking = asyncio.ensure_future(_health(session, self.url))
            while not asking.done():
                self._check()
                await asyncio.wait([asking], timeout=0.05)
            await asking

    def _check(self) -> None:
        if dead := self.dead():
            raise LaunchError(f"{', '.join(dead)} ended while the stack was starting (see the messages above)")

    async def _spawn(self, name: str, module: str, settings: dict[str, object], fds: tuple[int, ...] = ()) -> None:
        self._processes[name] = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            json.dumps(settings),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            pass_fds=fds,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C reaches the launcher alone, which stops the others in order
        )


async def _health(session: aiohttp.ClientSession, url: str) -> None:
    async with session.get(f"{url}/health") as response:
        response.raise_for_status()
