"""The user's own engines in a Python file: `out=pystr:FILE` (whole chat requests) and `out=pytok:FILE` (token ids).

The file is run once, like a program, with its arguments in `sys.argv`. It defines `async def generate(request)`, an async
generator, which runs in its own event loop so that it may block without harm to the server. In virtual time it runs in
the server's.
"""

import asyncio
import contextlib
import inspect
import runpy
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

from serving.model.card import ModelCard, ModelType
from serving.model.files import ModelFiles
from serving.runtime.messages import CallError
from serving.runtime.server import GeneratorService, RequestDialect
from serving.runtime.threads import in_thread
from serving.runtime.world import world
from serving.worker.config import ModelRunConfig, WorkerConfig
from serving.worker.engine import EngineCall, EngineError, EngineLoad, EngineTraits
from serving.worker.kv_events import KvEventPublisher
from serving.worker.own_engines import dialect, without_none

CAPACITY = 128
"""Items of an answer that may be queued before the engine has to wait."""

END = object()


def standard_arguments(path: Path, worker: WorkerConfig, run: ModelRunConfig, http_port: int) -> list[str]:
    """Return the arguments that every file finds in `sys.argv`, before those given after `--`."""
    optional = {"--model-path": worker.model_path, "--model-name": worker.model_name}
    words = [path.name, *(word for flag, value in optional.items() if value for word in (flag, value))]
    words += ["--http-port", str(http_port), "--tensor-parallel-size", str(run.tensor_parallel_size)]
    words += [
        "--base-gpu-id",
        str(run.base_gpu_id),
        "--num-nodes",
        str(run.num_nodes),
        "--node-rank",
        str(run.node_rank),
    ]
    optional = {
        "--model-config": worker.model_config,
        "--leader-addr": run.leader_addr,
        "--extra-engine-args": str(run.extra_engine_args or ""),
    }
    return words + [word for flag, value in optional.items() if value for word in (flag, value)]


class OwnLoop:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self.ended: Future[BaseException | None] = Future()
        """What ended the loop; None if it was stopped."""
        self.ended.set_running_or_notify_cancel()  # who stops waiting for it does not cancel it
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Run the loop."""
        self._thread.start()

    async def read(self, items: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """Run a generator in the loop, and yield in the caller's loop what it yields or raises."""
        inbox: asyncio.Queue[Any] = asyncio.Queue(CAPACITY)
        work = asyncio.run_coroutine_threadsafe(_feed(items, inbox, asyncio.get_running_loop()), self._loop)
        try:
            while (item := await inbox.get()) is not END:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            work.cancel()

    def close(self) -> None:
        """Stop the loop."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
        else:
            self._loop.close()

    def _run(self) -> None:
        """Run until one of the loop's tasks exits or stops it."""
        error: BaseException | None = None
        try:
            self._loop.run_forever()
        except BaseException as raised:
            error = raised
        self.ended.set_result(error)


async def _feed(
    items: AsyncGenerator[Any, None], inbox: "asyncio.Queue[Any]", theirs: asyncio.AbstractEventLoop
) -> None:
    """Pass on what a generator yields, no faster than it is read."""
    last: object = END
    try:
        async for item in items:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(inbox.put(item), theirs))
    except Exception as error:
        last = error
    finally:
        await items.aclose()
    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(inbox.put(last), theirs))


class OwnEngine:
    """See `serving.worker.engine.Engine`."""

    def __init__(
        self,
        kind: Literal["pystr", "pytok"],
        file: str,
        worker: WorkerConfig,
        run: ModelRunConfig,
        arguments: Sequence[str],
        *,
        http_port: int,
    ) -> None:
        self._path = Path(file).expanduser()
        if not self._path.is_file():
            raise ValueError(f"out={kind}:{file}: there is no such file")
        self._argv = [*standard_arguments(self._path, worker, run, http_port), *arguments]
        self._is_text = kind == "pystr"
        self.calls = (EngineCall("runpy.run_path", {"path_name": str(self._path), "sys.argv": self._argv}),)
        self.traits = EngineTraits(
            model_type=ModelType.Chat if self._is_text else ModelType.Backend,
            block_size=run.kv_cache_block_size or 16,
        )
        self.service = GeneratorService(self.generate, lambda: self._dialect)
        self._dialect: RequestDialect | None = None
        self._own_loop = None if world().is_virtual else OwnLoop(self._path.name)
        self._function: Callable[[dict[str, Any]], AsyncGenerator[Any, None]]

    async def start(self, files: ModelFiles) -> None:
        """See `Engine`."""
        await in_thread(self._run_file)
        if self._own_loop is not None:
            self._own_loop.start()

    def publish_to(self, publishers: Sequence[KvEventPublisher]) -> None:
        """See `Engine`."""

    def registered_as(self, card: ModelCard) -> None:
        """See `RegisteredEngine`."""
        self._dialect = None if self._is_text else dialect(card)

    async def generate(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Answer a request with what the file's `generate` yields, each item checked."""
        items = self._function(request)
        async with contextlib.aclosing(items if self._own_loop is None else self._own_loop.read(items)) as found:
            while True:
                try:
                    item = await anext(found)
                except StopAsyncIteration:
                    return
                except Exception as error:
                    raise CallError(
                        "a python exception was caught while processing the async generator: "
                        f"{type(error).__name__}: {error}",
                        "engine",
                    ) from error
                yield self._checked(item)

    def load(self, rank: int) -> EngineLoad:
        """See `Engine`."""
        return EngineLoad(num_running=self.service.num_running)

    async def failed(self) -> None:
        """See `Engine`."""
        if self._own_loop is None:
            await asyncio.Event().wait()  # it ends with ours
            return
        error = await asyncio.wrap_future(self._own_loop.ended)
        why = "it was stopped" if error is None else f"{type(error).__name__}: {error}"
        raise EngineError(f"the event loop of {self._path} has ended, so nothing is answered any more ({why})")

    async def close(self) -> None:
        """See `Engine`."""
        if self._own_loop is not None:
            self._own_loop.close()

    def _run_file(self) -> None:
        sys.argv = self._argv
        sys.path.insert(0, str(self._path.resolve().parent))
        try:
            names = runpy.run_path(str(self._path), run_name="__main__")
            if callable(initialize := names.get("initialize")):
                initialize(self._argv)
        except SystemExit as error:
            raise EngineError(f"{self._path} exited while it was loaded, with {error.code!r}") from error
        except Exception as error:
            raise EngineError(f"{self._path} cannot be loaded: {type(error).__name__}: {error}") from error
        function = names.get("generate")
        if not inspect.isasyncgenfunction(function):
            raise EngineError(f"{self._path} defines no async generator `async def generate(request)` with a yield")
        self._function = function

    def _checked(self, item: Any) -> Any:
        wanted = "choices" if self._is_text else "token_ids"
        if isinstance(item, dict) and isinstance(item.get(wanted), list):
            return without_none(item)
        raise CallError(
            "critical error: invalid response object from python async generator; application-logic-mismatch: "
            f"expected a dict with a list {wanted!r}, not {str(item)[:100]}",
            "engine",
        )
