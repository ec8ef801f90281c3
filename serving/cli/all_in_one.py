"""A frontend in this process, perhaps with an engine, and what uses it: a server, a conversation, a question or a batch."""

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from foundation.exit_codes import INTERRUPTED
from serving.cli.batch import run_batch
from serving.cli.chat import ask_once, chat
from serving.cli.chat_client import AskError, ChatClient
from serving.cli.job import Job, job_identity
from serving.cli.ways import BatchInput, EchoOutput, StdinInput
from serving.frontend.http.listening import listen, listen_at
from serving.frontend.models import Models
from serving.frontend.server import serve_frontend
from serving.model.hub import model_name
from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.stopping import cancel_all, until_stopped
from serving.runtime.threads import in_thread
from serving.worker.engine import Engine
from serving.worker.loop import run_worker


async def run_all_in_one(job: Job, engine: Engine | None, stopping: asyncio.Event) -> int:
    """Serve or ask until done or until the event is set; return the process's exit code.

    An engine in this process gets its own private network.
    """
    with tempfile.TemporaryDirectory(prefix="dynamo-run-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        frontend, socket_path = job.frontend, folder / "frontend"
        listener = listen_at(socket_path) if job.asks_itself else listen(frontend.http_host, frontend.http_port)
        stack.enter_context(listener)
        network = (
            job.runtime
            if engine is None
            else RuntimeConfig(discovery_backend="auto", etcd_endpoints="", nats_server="", discovery_dir=name)
        )
        ending = asyncio.Event()  # the engine and the frontend stop after the way in
        async with await DistributedRuntime.connect(network, stopping=ending) as connected:
            models = Models(connected, frontend, job.router, job.disaggregation)
            serving = [serve_frontend(connected, frontend, models, listener)]
            if engine is not None:
                serving.append(run_worker(network, job.worker, engine, ending, default_name=job.default_name))
            return await _until_one_ends(_ask(job, models, socket_path, stopping), serving, stopping, ending)


async def _until_one_ends(
    ask: Coroutine[Any, Any, int],
    serve: Sequence[Coroutine[Any, Any, None]],
    stopping: asyncio.Event,
    ending: asyncio.Event,
) -> int:
    """Ask and serve until one of them ends, then end the others; return the exit code of asking."""
    asking, serving = asyncio.create_task(ask), [asyncio.create_task(each) for each in serve]
    tasks = [asking, *serving]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        stopping.set()
        if not asking.done():  # the engine or the frontend ended, so no answer will come
            asking.cancel()
        ending.set()
        await asyncio.wait(tasks)
    finally:
        await cancel_all(*tasks)
    for task in reversed(serving):  # the engine first: its error explains why the frontend has no model
        task.result()
    return 0 if asking.cancelled() else asking.result()


async def _ask(job: Job, models: Models, socket_path: Path, stopping: asyncio.Event) -> int:
    """Do what the way in does; return the process's exit code."""
    if not job.asks_itself:
        await stopping.wait()
        return 0
    if job.is_remote:
        print("Waiting for remote model..", file=sys.stderr)
    model, options = _wanted_model(job), _options(job)
    client = ChatClient("http://frontend", socket_path=str(socket_path), api_key=job.frontend.api_key)
    async with contextlib.aclosing(client):
        match job.way_in:
            case StdinInput():
                question = _ask_what_comes(client, model, options)
                return 0 if await until_stopped(stopping, question) else INTERRUPTED
            case BatchInput(file):
                return await run_batch(
                    client,
                    file,
                    job_identity(job),
                    stopping,
                    model=model,
                    options=options,
                    concurrency=job.launcher.batch_concurrency,
                    count=lambda name, text: _count(models, name, text),
                )
            case _:
                await chat(client, stopping, model=model, options=options)
                return 0


def _wanted_model(job: Job) -> str:
    """Return the name of the model to ask, empty for any."""
    path = job.model.model_path
    return job.model.model_name or (model_name(path) if path else "")


def _options(job: Job) -> dict[str, Any]:
    """Return the options of every request."""
    options: dict[str, Any] = {
        "temperature": job.launcher.temperature,
        "max_completion_tokens": job.launcher.max_tokens,
    }
    return options | {"nvext": {"ignore_eos": True}} if isinstance(job.way_out, EchoOutput) else options


async def _ask_what_comes(client: ChatClient, model: str, options: dict[str, Any]) -> None:
    text = await in_thread(sys.stdin.read)
    if not text.strip():
        raise AskError("standard input is empty (in=stdin is the default if standard input is not a terminal)")
    await ask_once(client, text, model=model, options=options)


def _count(models: Models, name: str, text: str) -> int:
    model = models.get(name)
    return 0 if model is None else len(model.text.tokenizer.encode(text, special=False))
