"""One stand-in: an engine, its server and the socket between them and the world, from start to end."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from serving.engines.mock.engine import Mocker
from serving.engines.mock.kv.nixl_peer import NixlPeer, peers_of
from serving.frontend.http.listening import BACKLOG, listen, listen_at
from serving.frontend.http.server import serve_http
from serving.model.files import ModelFiles
from serving.runtime.stopping import cancel_all
from serving.stand_in.config import StandInConfig, TlsConfig
from serving.stand_in.family import FamilyServer, family_of
from serving.stand_in.faults.app import faulty
from serving.stand_in.faults.run import Victim, faults_of
from serving.stand_in.faults.state import Faults
from serving.stand_in.local import LocalWorkers
from serving.stand_in.served import OneModel, served_model
from serving.stand_in.tls import check_files
from serving.supervision.process import report_ready
from serving.worker.config import WorkerConfig

log = logging.getLogger(__name__)

WRITE_TIMEOUT_S = 60.0
"""How long a client may leave its answer unread before its connection is closed."""

ALL = "0.0.0.0"  # noqa: S104 (as the servers do that are stood in for)


async def serve_stand_in(
    config: StandInConfig,
    stopping: asyncio.Event,
    listener: socket.socket | None = None,
    on_ready: Callable[[], object] = report_ready,
) -> None:
    """Serve until the event is set; then let requests in progress finish, or end them.

    Args:
        config: the settings of the stand-in.
        stopping: set when the process is asked to end.
        listener: where it listens (none: as `config` says).
        on_ready: called once it answers.

    Raises:
        ModelError, EngineError: the model cannot be used.
        PortError: the port cannot be used.
        ValueError: the settings do not determine an engine, or a file of TLS cannot be used.
    """
    with listener or listener_of(config) as listener:
        tls = _tls(config.http.tls)
        wrong = faults_of(config.faults, config.admin, stopping, publishes_events=config.publishes_events)
        async with wrong as faults, stand_in(config, faults) as server:
            serving = serve_http(
                server.app,
                server.answering,
                listener,
                stopping if faults is None else faults.ending,
                drain_s=config.http.shutdown_timeout_s,
                write_timeout_s=WRITE_TIMEOUT_S,
                tls=tls,
                on_ready=on_ready,
            )
            await _unless_failed(serving, server.engine)


@contextlib.asynccontextmanager
async def stand_in(config: StandInConfig, faults: Faults | None = None) -> AsyncIterator[FamilyServer]:
    """Start an engine and what answers for it; end both on the way out.

    Raises:
        ModelError, EngineError: the model cannot be used.
        ValueError: the settings do not determine an engine, or an adapter cannot be loaded.
    """
    family = family_of(config)
    files = await asyncio.to_thread(ModelFiles.read, config.model_path)
    engine = Mocker(
        worker_config(config),
        config.engine,
        config.timing,
        answers=config.answers,
        transfer=config.transfer,
        lease=config.lease,
        max_loras=None if config.lora is None else config.lora.max_loras,
        max_waiting=None,
        peers=_peers(config),
    )
    async with contextlib.AsyncExitStack() as closing:
        sinks = await closing.enter_async_context(
            family.sinks(config, faults)
        )  # the engine's last events still go there
        closing.push_async_callback(engine.close)
        await engine.start(files)
        workers = LocalWorkers(engine, has_peers=config.kv_handover is not None)
        model = await served_model(config, engine.traits, files, workers, family.reading(config))
        closing.push_async_callback(model.preparer.close)
        closing.callback(workers.close)
        server = family.server(config, engine, OneModel(config.served_model_names, model), workers.calls)
        engine.run(sinks)
        server.follow()
        closing.callback(server.close)
        if faults is not None:
            server.app = faulty(server.app, faults, server.answering.dialect, family.answers)
            faults.connect(Victim(engine, workers.calls, faults.ending, outlives_engine=config.outlives_engine))
        yield server


def _peers(config: StandInConfig) -> list[NixlPeer]:
    """Return what each rank is to other instances, if there is a way to them."""
    if config.kv_handover is None:
        return []
    return peers_of(
        config.kv_handover,
        num_ranks=config.engine.dp_size,
        first=config.ranks.first,
        size=config.ranks.size,
        tp_size=config.timing.tensor_parallel_size,
    )


def worker_config(config: StandInConfig) -> WorkerConfig:
    """Return the settings of the engine that concern its model."""
    return WorkerConfig(
        model_path=config.model_path,
        model_name=config.served_model_names[0],
        tool_call_parser=config.api.tool_call_parser,
        reasoning_parser=config.api.reasoning_parser,
        kv_events=config.kv_events is not None,
    )


def listener_of(config: StandInConfig) -> socket.socket:
    """Bind the socket where a stand-in listens; with late startup, it refuses connections until it is served.

    Raises:
        PortError: the port cannot be used.
    """
    http, backlog = config.http, None if config.faults.startup else BACKLOG
    return (
        listen_at(Path(http.uds), backlog) if http.uds else listen(http.host or ALL, http.port, backlog, flag="--port")
    )


def _tls(tls: TlsConfig | None) -> Mapping[str, Any] | None:
    if tls is None:
        return None
    check_files(tls)
    settings = {
        "ssl_certfile": tls.certificate,
        "ssl_keyfile": tls.key or None,
        "ssl_ca_certs": tls.client_authorities or None,
        "ssl_cert_reqs": tls.client_certificates,
        "ssl_ciphers": tls.ciphers or None,
    }
    return {name: value for name, value in settings.items() if value is not None}


async def _unless_failed(serving: Any, engine: Mocker) -> None:
    """Serve until that is over, or the engine has failed for good.

    Raises:
        EngineError: it has.
    """
    running, failing = asyncio.ensure_future(serving), asyncio.ensure_future(engine.failed())
    try:
        await asyncio.wait([running, failing], return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            await failing
        await running
    finally:
        await cancel_all(running, failing)
