"""The HTTP metrics that vLLM gets from prometheus-fastapi-instrumentator."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client.core import Metric
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.frontend.application import Route
from serving.frontend.series import Histogram, Labels
from serving.runtime.world import world
from serving.stand_in.vllm.metrics.exposition import add_histogram
from serving.stand_in.vllm.metrics.families import table

UNCOUNTED = ("/metrics", "/health", "/load", "/ping", "/version", "/server_info")
"""Paths with one of these in them are not counted; that is also true of /v1/load_lora_adapter."""

NO_ROUTE = "none"
"""The handler of what matches no route, or not by its method."""

UNAUTHORIZED = 401
"""Requests without a key are turned away before they could be counted."""


class Templates:
    """The paths of routes, with the names of their parameters."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._plain: dict[tuple[str, str], str] = {}
        self._others: list[tuple[re.Pattern[str], list[str], str]] = []
        for path, methods, _ in routes:
            if "{" in path:
                self._others.append((compile_path(path)[0], methods.split(", "), path))
            else:
                self._plain |= {(method, path): path for method in methods.split(", ")}

    def of(self, method: str, path: str) -> str | None:
        """Return the path of the route that a request matches."""
        if found := self._plain.get((method, path)):
            return found
        return next(
            (each for pattern, methods, each in self._others if method in methods and pattern.match(path)), None
        )


class HttpCounts:
    """Requests by route, method and class of status."""

    def __init__(self, created_s: float, now_s: Callable[[], float]) -> None:
        self._created_s = created_s
        self._now_s = now_s
        self._created: dict[Labels, float] = {}
        self._requests: dict[Labels, int] = {}
        self._sizes: dict[str, list[float]] = {}
        """For each handler: how many requests, bytes of their bodies, bytes of the answers."""
        self._all = Histogram(table().buckets["http_s"])
        self._by_handler: dict[Labels, Histogram] = {}

    def count(self, handler: str, method: str, status: int, seconds: float, num_in: int, num_out: int) -> None:
        """Count an answered request; bytes are those of its Content-Length and its answer's, 0 if there is none."""
        series = (handler, method, f"{status // 100}xx")
        self._requests[series] = self._requests.get(series, 0) + 1
        for labels in (series, series[:2], series[:1]):
            if labels not in self._created:
                self._created[labels] = self._now_s()
        sizes = self._sizes.setdefault(handler, [0, 0, 0])
        for place, more in enumerate((1, num_in, num_out)):
            sizes[place] += more
        self._all.observe(seconds)
        if series[:2] not in self._by_handler:
            self._by_handler[series[:2]] = Histogram(table().buckets["http_coarse_s"])
        self._by_handler[series[:2]].observe(seconds)

    def families(self) -> Iterator[Metric]:
        """Yield the families."""
        requests = Metric("http_requests", "Requests by route, method and class of status", "counter")
        for labels, count in self._requests.items():
            named = dict(zip(("handler", "method", "status"), labels, strict=True))
            requests.add_sample("http_requests_total", named, count)
            requests.add_sample("http_requests_created", named, self._created[labels])
        yield requests
        yield self._summary("http_request_size_bytes", "Content-Length of requests by route", 1)
        yield self._summary("http_response_size_bytes", "Content-Length of answers by route", 2)
        fine = Metric("http_request_duration_highr_seconds", "Time of a request", "histogram")
        add_histogram(fine, {}, self._all, self._created_s)
        yield fine
        coarse = Metric("http_request_duration_seconds", "Time of a request by route and method", "histogram")
        for labels, histogram in self._by_handler.items():
            named = dict(zip(("handler", "method"), labels, strict=True))
            add_histogram(coarse, named, histogram, self._created[labels])
        yield coarse

    def _summary(self, name: str, text: str, place: int) -> Metric:
        summary = Metric(name, text, "summary")
        for handler, sizes in self._sizes.items():
            labels = {"handler": handler}
            summary.add_sample(f"{name}_count", labels, sizes[0])
            summary.add_sample(f"{name}_sum", labels, sizes[place])
            summary.add_sample(f"{name}_created", labels, self._created[(handler,)])
        return summary


class Counted:
    """An application whose requests are counted."""

    def __init__(self, app: ASGIApp, counts: HttpCounts, routes: Iterable[Route]) -> None:
        self._app = app
        self._counts = counts
        self._templates = Templates(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and count it once the answer is over."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        template = self._templates.of(scope["method"], scope["path"])
        if any(part in (template or scope["path"]) for part in UNCOUNTED):
            await self._app(scope, receive, send)
            return
        status, num_out, started = 500, 0, world().now()

        async def send_noting(message: Message) -> None:
            nonlocal status, num_out
            if message["type"] == "http.response.start":
                status, num_out = message["status"], _length(message.get("headers", ()))
            await send(message)

        try:
            await self._app(scope, receive, send_noting)
        finally:
            seconds, num_in = world().now() - started, _length(scope["headers"])
            if status != UNAUTHORIZED:
                self._counts.count(template or NO_ROUTE, scope["method"], status, seconds, num_in, num_out)


def _length(headers: Any) -> int:
    """Return the Content-Length, 0 if there is none."""
    return next((int(value) for name, value in headers if name.lower() == b"content-length"), 0)
