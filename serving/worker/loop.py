"""Serve an engine: register its model, report its KV events and load, take requests, until asked to end."""

import asyncio
import logging
from collections.abc import Callable

import msgspec

from serving.model.context import BYTES_CONTEXT
from serving.model.files import ModelFiles
from serving.model.template import ChatTemplate
from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.server import AnswerStream, Service
from serving.runtime.stopping import cancel_all, until_stopped
from serving.supervision.process import report_ready
from serving.worker.config import WorkerConfig
from serving.worker.engine import Engine, HoldingEngine, RegisteredEngine, TransferringEngine
from serving.worker.kv_events import KvEventPublisher, serve_snapshots
from serving.worker.load_reports import LoadReport, LoadReporter
from serving.worker.registration import register_llm

log = logging.getLogger(__name__)


async def run_worker(
    network: RuntimeConfig, worker: WorkerConfig, engine: Engine, stopping: asyncio.Event, *, default_name: str = ""
) -> None:
    """Join the network and serve an engine there until the event is set, then drain.

    Raises:
        RuntimeUnavailableError: the network cannot be joined.
        ModelError, EngineError: as in `serve_engine`.
    """
    async with await DistributedRuntime.connect(network, drain_s=worker.drain_s, stopping=stopping) as runtime:
        await serve_engine(runtime, worker, engine, default_name=default_name)


async def serve_engine(
    runtime: DistributedRuntime, worker: WorkerConfig, engine: Engine, *, default_name: str = ""
) -> None:
    """Serve an engine until the process is asked to end, then drain.

    Args:
        runtime: connected to the network.
        worker: what to serve, and where.
        engine: is started and closed here.
        default_name: the name of a model without a path.

    Raises:
        ModelError: the model's files cannot be found or used, or the endpoint serves another model.
        EngineError: the engine did not start, or has failed for good.
    """
    try:
        await _serve(runtime, worker, engine, default_name)
    finally:
        await engine.close()


async def _serve(runtime: DistributedRuntime, worker: WorkerConfig, engine: Engine, default_name: str) -> None:
    files = await asyncio.to_thread(ModelFiles.read, worker.model_path, worker.model_config)
    ChatTemplate(files)  # fail now: a frontend could only reject it later, again and again
    for call in engine.calls:
        log.debug("starts the engine: %s", call)
    if isinstance(engine, TransferringEngine) and engine.needs_token:
        engine.transfer_with(await runtime.cluster_token())
    if not await until_stopped(runtime.stopping, engine.start(files)):
        return
    traits = engine.traits
    address = worker.address
    has_events = worker.kv_events and traits.has_kv_events
    ranks = range(traits.num_ranks)
    publishers = [KvEventPublisher(runtime, address, rank) for rank in ranks] if has_events else []
    engine.publish_to(publishers)
    await serve_snapshots(runtime, address, publishers)
    reports = LoadReporter(runtime, address, _reporter(runtime, engine, publishers), num_ranks=traits.num_ranks)
    await reports.start()
    context = worker.context_length or traits.context_length or (None if files.contents else BYTES_CONTEXT)
    card = await register_llm(
        traits.model_type,
        runtime.endpoint(address),
        worker.model_path,
        worker.model_name or (None if worker.model_path else default_name or None),
        context_length=context,
        kv_cache_block_size=traits.block_size,
        router_mode=worker.router_mode,
        migration_limit=worker.migration_limit,
        has_kv_events=has_events,
        num_ranks=traits.num_ranks,
        files=files,
        role=worker.role,
        bootstrap=traits.bootstrap,
        step_costs=traits.step_costs,
        guided_decoding=traits.guided_decoding,
        continues_constrained=traits.continues_constrained,
        has_embeddings=traits.has_embeddings,
        adapters=traits.adapters,
        tool_call_parser=worker.tool_call_parser or traits.tool_call_parser,
        reasoning_parser=worker.reasoning_parser,
    )
    if isinstance(engine, RegisteredEngine):
        engine.registered_as(card)
    await runtime.serve(address, _logged(engine.service) if log.isEnabledFor(logging.DEBUG) else engine.service)
    report_ready(f"{runtime.instance_id:x}")
    log.info("serving %s at %s", card.name, address)
    try:
        await _serve_until_over(runtime, engine)
    finally:
        await asyncio.gather(reports.close(), *(publisher.close() for publisher in publishers))


async def _serve_until_over(runtime: DistributedRuntime, engine: Engine) -> None:
    """Wait until the process is asked to end, and drain; if the engine fails before that is over, leave at once.

    Raises:
        EngineError: the engine has failed for good.
    """
    failing, draining = (
        asyncio.ensure_future(engine.failed()),
        asyncio.ensure_future(_drain_when_asked(runtime, engine)),
    )
    try:
        await asyncio.wait([failing, draining], return_when=asyncio.FIRST_COMPLETED)
        if failing.done():  # its requests will never end: their callers should look elsewhere before it is taken down
            await cancel_all(draining)
            await runtime.abandon()
            await failing
        await draining
    finally:
        await cancel_all(failing, draining)


async def _drain_when_asked(runtime: DistributedRuntime, engine: Engine) -> None:
    await runtime.stopping.wait()
    if runtime.num_streams:
        log.info("waiting for requests in progress (%d); a second signal stops at once", runtime.num_streams)
    await runtime.drain(engine.released if isinstance(engine, HoldingEngine) else None)


def _logged(service: Service) -> Service:
    """Return a service that logs each request before it serves it."""

    def serve(request: msgspec.Raw, stream: AnswerStream) -> None:
        asked = msgspec.msgpack.decode(request)
        name = asked.get("request_id") if isinstance(asked, dict) else None
        log.debug("call %d asks the engine to serve %s", stream.id, name or "a request without an id")
        service(request, stream)

    return serve


def _reporter(
    runtime: DistributedRuntime, engine: Engine, publishers: list[KvEventPublisher]
) -> Callable[[int], LoadReport]:
    def report(rank: int) -> LoadReport:
        told = (publishers[rank].epoch, publishers[rank].number) if publishers else (0, 0)
        return LoadReport(runtime.instance_id, rank, *told, **engine.load(rank)._asdict())

    return report
