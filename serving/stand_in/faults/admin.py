"""The admin port: faults are seen, changed and caused there while the server runs.

GET /faults       the faults that are set, and how often each came
PUT /faults       sets these faults and no others: {"429": 0.05, "stall": "0.01:30s"}
PATCH /faults     sets these and leaves the others; null removes one
DELETE /faults    removes all
POST /crash       {"how": "exit"}, or kill, or engine_death
POST /ready       ends startup and unready
POST /drain       ends the server as SIGTERM does
GET /metrics      the counts, for Prometheus

Whoever sends the token may ask; without one, whoever is on this machine, but no web page: see `callers`.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from serving.frontend.api.errors import ApiError
from serving.frontend.http.body import read_small_body
from serving.frontend.http.connection import sweep_connections
from serving.frontend.http.limits import Limits
from serving.frontend.http.listening import listen
from serving.frontend.http.server import http_server
from serving.runtime.stopping import cancel_all
from serving.stand_in.faults.callers import check_caller
from serving.stand_in.faults.config import AdminConfig, FaultConfig
from serving.stand_in.faults.state import Faults
from serving.stand_in.faults.words import changed_faults, fault_words

log = logging.getLogger(__name__)

MOST_BYTES = 64 << 10
"""The longest body; all names with long values take a tenth of that."""

LIMITS = Limits()

CRASHES = ("exit", "kill", "engine_death")


@contextlib.asynccontextmanager
async def admin_port(config: AdminConfig, faults: Faults, limits: Limits = LIMITS) -> AsyncIterator[str]:
    """Answer at the admin port until the way out; yield its URL.

    Raises:
        PortError: the port cannot be used.
    """
    with listen(config.host, config.port, flag="--admin-port") as listener:
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        server = http_server(admin_app(faults, config.token), limits, {})
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        sweeping = asyncio.create_task(sweep_connections(server.server_state.connections, limits))
        log.info("faults can be changed at %s/faults", url)
        try:
            yield url
        finally:
            server.should_exit = True
            await cancel_all(sweeping)
            await serving


def admin_app(faults: Faults, token: str) -> Starlette:
    """Build the application of the admin port."""
    admin = _Admin(faults)
    routes = [
        ("/faults", "GET", admin.show),
        ("/faults", "PUT", admin.replace),
        ("/faults", "PATCH", admin.change),
        ("/faults", "DELETE", admin.remove),
        ("/crash", "POST", admin.crash),
        ("/ready", "POST", admin.make_ready),
        ("/drain", "POST", admin.drain),
        ("/metrics", "GET", admin.metrics),
    ]
    by_path: dict[str, dict[str, Handler]] = {}
    for path, method, handler in routes:
        by_path.setdefault(path, {})[method] = handler
    return Starlette(
        routes=[Route(path, _by_method(handlers, token), methods=list(METHODS)) for path, handlers in by_path.items()],
        exception_handlers={HTTPException: _refusal, ApiError: _api_refusal},
    )


Handler = Callable[[Request], Awaitable[Response]]

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class _Admin:
    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    async def show(self, request: Request) -> Response:
        return JSONResponse(self._state())

    async def replace(self, request: Request) -> Response:
        return self._set(self._faults.config.healed(), await _object(request))

    async def change(self, request: Request) -> Response:
        return self._set(self._faults.config, await _object(request))

    async def remove(self, request: Request) -> Response:
        return self._set(self._faults.config.healed(), {})

    async def crash(self, request: Request) -> Response:
        match await _object(request):
            case {"how": str(how), **rest} if how in CRASHES and not rest:
                asyncio.get_running_loop().call_soon(self._faults.come, how)  # once this answer is on its way
                return JSONResponse({"how": how}, 202)
        raise HTTPException(400, f'expected {{"how": ...}} with one of {", ".join(CRASHES)}')

    async def make_ready(self, request: Request) -> Response:
        self._faults.make_ready()
        return JSONResponse(self._state())

    async def drain(self, request: Request) -> Response:
        self._faults.ending.set()
        return JSONResponse({"draining": True}, 202)

    async def metrics(self, request: Request) -> Response:
        faults = self._faults
        lines = [
            "# HELP dynabench_fault_requests_total Requests that a fault could befall.",
            "# TYPE dynabench_fault_requests_total counter",
            f"dynabench_fault_requests_total {faults.num_requests}",
            "# HELP dynabench_faults_total Faults that were caused on purpose.",
            "# TYPE dynabench_faults_total counter",
            *(f'dynabench_faults_total{{kind="{kind}"}} {count}' for kind, count in sorted(faults.counts.items())),
        ]
        return PlainTextResponse("".join(f"{line}\n" for line in lines), media_type="text/plain; version=0.0.4")

    def _set(self, before: FaultConfig, settings: dict[str, Any]) -> Response:
        if settings.get("startup") is not None:
            raise HTTPException(400, "startup: expected none; only a flag can keep the port closed at the start")
        try:
            self._faults.change(changed_faults(before, settings))
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        return JSONResponse(self._state())

    def _state(self) -> dict[str, Any]:
        faults = self._faults
        unused = {"without_effect": found} if (found := faults.without_effect) else {}
        return unused | {
            "faults": fault_words(faults.config),
            "seed": faults.config.seed,
            "counts": dict(sorted(faults.counts.items())),
            "requests": faults.num_requests,
            "answers": faults.num_answers,
            "is_ready": faults.is_ready,
            "is_engine_dead": faults.is_engine_dead,
        }


def _by_method(handlers: dict[str, Handler], token: str) -> Handler:
    async def answer(request: Request) -> Response:
        check_caller(request.headers, token)
        handler = handlers.get(request.method)
        if handler is None:
            allowed = ", ".join(handlers)
            raise HTTPException(
                405, f"{request.url.path} does not accept {request.method}; expected {allowed}", {"allow": allowed}
            )
        return await handler(request)

    return answer


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"there is no {request.url.path[:100]}" if error.status_code == 404 else error.detail
    return JSONResponse({"error": {"message": message, "code": error.status_code}}, error.status_code, error.headers)


async def _api_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse({"error": {"message": error.message, "code": error.status}}, error.status)


async def _object(request: Request) -> dict[str, Any]:
    body = await read_small_body(request, MOST_BYTES)
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise HTTPException(400, f"expected a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise HTTPException(400, "expected a JSON object")
    return found
