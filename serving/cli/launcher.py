"""What `dynamo-run` does once it knows what: an engine, or workers found on the network, and what asks them."""

import asyncio
import contextlib
import dataclasses
import sys
import tempfile
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.cli.batch import run_batch
from serving.cli.chat import ask_once, chat
from serving.cli.chat_client import AskError, ChatClient
from serving.cli.commands import engine_settings
from serving.engines.echo import Echo
from serving.engines.mock import EngineConfig, Mocker
from serving.engines.own import OwnEngine
from serving.frontend.config import FrontendConfig
from serving.frontend.models import Models
from serving.frontend.server import listen, listen_at, run_frontends, serve_frontend
from serving.model.files import ModelFiles, model_name
from serving.router import RouterConfig
from serving.runtime.address import EndpointAddress
from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import DistributedRuntime
from serving.worker.config import ModelRunConfig, WorkerConfig
from serving.worker.engine import Engine, in_thread, make_engine
from serving.worker.loop import serve_engine

FILES = ("pystr", "pytok")
CHAT_TEMPERATURE = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherConfig:
    """What to serve, and to whom."""

    model_path: str = ""
    """Folder, Hugging Face id or GGUF file of the model (the mocker reads only its tokenizer)."""

    model_name: str = ""
    """Name that clients ask for (default: the folder's, file's or repository's)."""

    model_config: str = ""
    """Folder or Hugging Face id with the tokenizer and config.json, where a GGUF file lacks them."""

    context_length: int | None = None
    """Worker: tokens a sequence may reach (default: the model's)."""

    kv_gpu_cache_usage_weight: float | None = None
    """Of guides before August 2025; has no effect."""

    kv_waiting_requests_weight: float | None = None
    """Of guides before August 2025; has no effect."""

    temperature: float = CHAT_TEMPERATURE
    """in=text, stdin, batch: of the answers."""

    max_tokens: int | None = None
    """in=text, stdin, batch: longest answer (default: what the context leaves)."""

    batch_concurrency: int = 64
    """in=batch: requests in progress at a time."""

    def __post_init__(self) -> None:
        """Refuse values without a meaning."""
        if self.batch_concurrency < 1:
            raise ValueError(f"--batch-concurrency must be at least 1, not {self.batch_concurrency}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"--max-tokens must be at least 1, not {self.max_tokens}")
        if not 0 <= self.temperature <= 2:
            raise ValueError(f"--temperature must be from 0 to 2, not {self.temperature}")


@dataclass(frozen=True)
class Job:
    """Everything that was asked for."""

    way_in: str
    way_out: str
    launcher: LauncherConfig
    frontend: FrontendConfig
    model_run: ModelRunConfig
    router: RouterConfig
    runtime: RuntimeConfig
    arguments: Sequence[str]

    @property
    def is_remote(self) -> bool:
        """Whether the engines are workers on the network."""
        return self.way_out == "dyn" or self.way_out.startswith("dyn://")

    @property
    def asks_itself(self) -> bool:
        """Whether the way in asks questions of its own."""
        return self.way_in in ("text", "stdin") or self.way_in.startswith("batch:")


def make(job: Job) -> Engine:
    """Make the engine of a job; nothing is loaded yet.

    Raises:
        ValueError: the settings do not fit it.
    """
    kind, _, file = job.way_out.partition(":")
    worker = _worker(job, job.way_in if job.way_in.startswith("dyn://") else "dyn://")
    if kind == "mocker":
        return Mocker(worker, _simulated(job.model_run))
    if kind in ("echo_core", "echo_full"):
        return Echo("core" if kind == "echo_core" else "full")
    if kind in FILES:
        return OwnEngine(kind, file, worker, job.model_run, job.arguments, http_port=job.frontend.http_port)  # type: ignore[arg-type]
    return make_engine(kind, worker, job.model_run, job.arguments)


async def carry_out(job: Job, engine: Engine | None, stopping: asyncio.Event) -> int:
    """Do a job until it is done or the process is asked to end; return the exit code."""
    if job.way_in == "none":
        assert engine is not None
        await _without_input(job, engine, stopping)
        return 0
    if job.way_in.startswith("dyn://"):
        assert engine is not None
        worker = _worker(job, job.way_in)
        async with await DistributedRuntime.connect(job.runtime, drain_s=worker.drain_s) as connected:
            connected.stopping = stopping
            await serve_engine(connected, worker, engine, default_name=_default_name(job))
        return 0
    if engine is None and job.way_in == "http":
        await run_frontends(_frontend(job), job.router, job.runtime, stopping)
        return 0
    return await _all_in_one(job, engine, stopping)


async def _without_input(job: Job, engine: Engine, stopping: asyncio.Event) -> None:
    """Run an engine that nobody asks: a node that follows another."""
    waiting = asyncio.create_task(stopping.wait())
    running = asyncio.create_task(_run_until_it_fails(job, engine))
    try:
        await asyncio.wait([waiting, running], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
    finally:
        await _cancel([waiting, running])
        await engine.close()


async def _run_until_it_fails(job: Job, engine: Engine) -> None:
    await engine.start(await asyncio.to_thread(ModelFiles.read, job.launcher.model_path, job.launcher.model_config))
    engine.publish_to([])
    await engine.failed()


async def _all_in_one(job: Job, engine: Engine | None, stopping: asyncio.Event) -> int:
    """Serve, or ask, from one process; an engine of ours is on a network of its own."""
    with tempfile.TemporaryDirectory(prefix="dynamo-run-") as folder, contextlib.ExitStack() as stack:
        if job.asks_itself:
            listener = stack.enter_context(listen_at(Path(folder) / "frontend"))
        else:
            listener = stack.enter_context(listen(job.frontend.http_host, job.frontend.http_port))
        network = (
            job.runtime if engine is None else RuntimeConfig(etcd_endpoints="", nats_server="", discovery_dir=folder)
        )
        ending = asyncio.Event()  # the engine and the frontend outlive the way in
        async with await DistributedRuntime.connect(network) as connected:
            connected.stopping = ending
            frontend = _frontend(job)
            models = Models(connected, frontend, job.router)
            serving = [asyncio.create_task(serve_frontend(connected, frontend, models, listener))]
            if engine is not None:
                serving.append(asyncio.create_task(_serve_here(network, job, engine, ending)))
            asking = asyncio.create_task(_ask(job, models, Path(folder) / "frontend", stopping))
            try:
                await asyncio.wait([asking, *serving], return_when=asyncio.FIRST_COMPLETED)
                stopping.set()
                if not asking.done():  # something else ended: the question has no answer
                    asking.cancel()
                ending.set()
                results = await asyncio.gather(asking, *serving, return_exceptions=True)
            finally:
                await _cancel([asking, *serving])
    for result in reversed(results):
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result
    code = results[0]
    return code if isinstance(code, int) else 0


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel what is not done, and wait until it has given back what it holds."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _serve_here(network: RuntimeConfig, job: Job, engine: Engine, ending: asyncio.Event) -> None:
    worker = _worker(job, "dyn://")
    async with await DistributedRuntime.connect(network, drain_s=worker.drain_s) as connected:
        connected.stopping = ending
        await serve_engine(connected, worker, engine, default_name=_default_name(job))


async def _ask(job: Job, models: Models, path: Path, stopping: asyncio.Event) -> int:
    """Do what the way in does; return the process's exit code."""
    if not job.asks_itself:
        await stopping.wait()
        return 0
    launcher = job.launcher
    options: dict[str, Any] = {"temperature": launcher.temperature, "max_completion_tokens": launcher.max_tokens}
    if job.way_out.startswith("echo_"):
        options["nvext"] = {"ignore_eos": True}
    wanted = (
        (launcher.model_name or model_name(launcher.model_path)) if launcher.model_path or launcher.model_name else ""
    )
    client = ChatClient("http://frontend", socket_path=str(path), api_key=job.frontend.api_key)
    try:
        if job.is_remote:
            print("Waiting for remote model..", file=sys.stderr)
        if job.way_in == "text":
            await chat(client, stopping, model=wanted, options=options)
            return 0
        if job.way_in == "stdin":
            return await _unless_stopped(stopping, _ask_what_comes(client, wanted, options))
        return await run_batch(
            client,
            Path(job.way_in.removeprefix("batch:")),
            stopping,
            model=wanted,
            options=options,
            concurrency=launcher.batch_concurrency,
            count=lambda name, text: _count(models, name, text),
        )
    finally:
        await client.close()


async def _ask_what_comes(client: ChatClient, model: str, options: dict[str, Any]) -> None:
    text = await in_thread(sys.stdin.read)
    if not text.strip():
        raise AskError("standard input holds no question (in=stdin is the default where it is no terminal)")
    await ask_once(client, text, model=model, options=options)


async def _unless_stopped(stopping: asyncio.Event, work: Coroutine[Any, Any, None]) -> int:
    working = asyncio.create_task(work)
    stopped = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait([working, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return 130
        await working
        return 0
    finally:
        stopped.cancel()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


def _count(models: Models, name: str, text: str) -> int:
    model = models.get(name)
    return 0 if model is None else len(model.text.tokenizer.encode(text, special=False))


def _default_name(job: Job) -> str:
    kind, _, file = job.way_out.partition(":")
    return Path(file).stem if kind in FILES else "mock"


def _frontend(job: Job) -> FrontendConfig:
    if job.way_out.startswith("dyn://"):
        return dataclasses.replace(job.frontend, namespace=EndpointAddress.parse(job.way_out).namespace)
    return job.frontend


def _worker(job: Job, endpoint: str) -> WorkerConfig:
    launcher = job.launcher
    return WorkerConfig(
        endpoint=endpoint,
        model_path=launcher.model_path,
        model_name=launcher.model_name,
        model_config=launcher.model_config,
        context_length=launcher.context_length,
        migration_limit=job.frontend.migration_limit or 0,
        drain_s=job.frontend.drain_s,
    )


def _simulated(model_run: ModelRunConfig) -> EngineConfig:
    engine = EngineConfig()
    if model_run.kv_cache_block_size is not None:
        engine = dataclasses.replace(engine, block_size=model_run.kv_cache_block_size)
    if model_run.extra_engine_args is not None:
        engine = engine_settings(model_run.extra_engine_args, engine)
    return engine
