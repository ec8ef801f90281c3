"""Serving the engines that come with us: the mocker and the echo engines."""

import asyncio
from dataclasses import dataclass
from typing import Literal

import numpy as np

from serving.engines.echo import echo_core, echo_full
from serving.engines.mock import EngineConfig, MockEngine, serve_ranks
from serving.kv_events import KvEventPublisher, WorkerReports
from serving.model_card import BYTES_CONTEXT, ModelFiles, ModelType
from serving.runtime.address import EndpointAddress
from serving.runtime.distributed import DistributedRuntime
from serving.tokenizer import load
from serving.worker import register_llm


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Settings of a worker."""

    endpoint: str = "dyn://dynamo.backend.generate"
    """Where it serves: dyn://namespace.component.endpoint; missing parts get defaults."""

    model_path: str = ""
    """Folder or Hugging Face id with the model's tokenizer (none: tokens are bytes of UTF-8)."""

    model_name: str = ""
    """Name that clients ask for (default: the folder's or repository's)."""

    context_length: int | None = None
    """Tokens a sequence may reach (default: the model's)."""

    migration_limit: int = 0
    """How often a request may go on at another worker when its own is lost (0 to 1023)."""

    kv_events: bool = True
    """Report KV events, if the engine can; otherwise routers predict what the worker holds."""

    drain_s: float = 30.0
    """How long requests in progress may take to finish once the process was asked to end (s)."""

    def __post_init__(self) -> None:
        """Refuse values without a meaning."""
        if not 0 <= self.migration_limit <= 1023:
            raise ValueError(f"migration_limit must be from 0 to 1023, not {self.migration_limit}")
        if self.context_length is not None and self.context_length < 1:
            raise ValueError(f"context_length must be at least 1, not {self.context_length}")

    @property
    def address(self) -> EndpointAddress:
        """Where it serves."""
        return EndpointAddress.parse(self.endpoint)


async def serve_mocker(runtime: DistributedRuntime, worker: WorkerConfig, engine: EngineConfig) -> None:
    """Serve the mocker until the process is asked to end, then drain.

    Raises:
        ModelError: the model's files cannot be had, or the endpoint serves another model.
    """
    files = await asyncio.to_thread(ModelFiles.read, worker.model_path)
    vocabulary = (await asyncio.to_thread(load, files)).speakable()
    address = worker.address
    has_events = worker.kv_events and engine.enable_prefix_caching
    publishers = [KvEventPublisher(runtime, address, rank) for rank in range(engine.dp_size)] if has_events else []
    engines = [
        MockEngine(engine, publisher=publishers[rank] if publishers else None, vocabulary=np.asarray(vocabulary))
        for rank in range(engine.dp_size)
    ]
    stepping = [asyncio.create_task(each.run()) for each in engines]
    reports = WorkerReports(
        runtime, address, publishers, lambda rank: engines[rank].report(runtime.instance_id, rank), engine.dp_size
    )
    await reports.start()
    limit = engine.max_model_len or min(engine.num_usable_blocks * engine.block_size, BYTES_CONTEXT)
    await register_llm(
        ModelType.Backend,
        runtime.endpoint(address),
        worker.model_path,
        worker.model_name or (None if worker.model_path else "mock"),
        context_length=worker.context_length or (limit if not worker.model_path else None),
        kv_cache_block_size=engine.block_size,
        migration_limit=worker.migration_limit,
        has_kv_events=has_events,
        num_ranks=engine.dp_size,
    )
    await runtime.serve(address, serve_ranks(engines))
    stopping = asyncio.create_task(runtime.stopping.wait())
    await asyncio.wait([stopping, *stepping], return_when=asyncio.FIRST_COMPLETED)
    for task in stepping:
        if task.done():
            await task  # an engine failed: its error ends the process
    await runtime.drain()
    for task in stepping:
        task.cancel()
    await reports.close()


async def serve_echo(runtime: DistributedRuntime, worker: WorkerConfig, kind: Literal["core", "full"]) -> None:
    """Serve an echo engine until the process is asked to end, then drain.

    Raises:
        ModelError: the model's files cannot be had, or the endpoint serves another model.
    """
    endpoint = runtime.endpoint(worker.address)
    await register_llm(
        ModelType.Backend if kind == "core" else ModelType.Chat,
        endpoint,
        worker.model_path,
        worker.model_name or None,
        context_length=worker.context_length,
        migration_limit=worker.migration_limit,
    )
    await endpoint.serve_endpoint(echo_core if kind == "core" else echo_full)
