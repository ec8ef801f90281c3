"""Routers and gateways of others: how each is started in front of workers, and how to ask whether it is ready."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.routers.fleet import MODEL, StandIn, in_front, needs
from tests.support.servers import free_port


@dataclass(frozen=True)
class Router:
    """One of them."""

    program: str
    command: Callable[[Path, int, list[str]], list[str]]
    """How it is started, by a folder for its files, its port and the workers' URLs."""

    ready: str
    """Path that answers 200 when it has its workers."""

    @contextmanager
    def in_front_of(self, workers: list[StandIn], folder: Path, *flags: str) -> Iterator[str]:
        """Run it; yield its URL."""
        port = free_port()
        command = [self.program, *self.command(folder, port, [worker.url for worker in workers]), *flags]
        with in_front(command, f"http://127.0.0.1:{port}{self.ready}"):
            yield f"http://127.0.0.1:{port}"


def _sglang(folder: Path, port: int, urls: list[str]) -> list[str]:
    return ["launch", *_of_rust(port), "--worker-urls", *urls, "--worker-startup-timeout-secs", "60"]


def _vllm(folder: Path, port: int, urls: list[str]) -> list[str]:
    return [*_of_rust(port), "--worker-urls", *urls]


def _vllm_apart(folder: Path, port: int, urls: list[str]) -> list[str]:
    prefill, decode = urls
    return [*_of_rust(port), "--vllm-pd-disaggregation", "--prefill", prefill, "--decode", decode]


def _of_rust(port: int) -> list[str]:
    return [
        *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())),
        *("--worker-startup-check-interval", "1"),
        *("--health-check-interval-secs", "1", "--health-failure-threshold", "1"),
    ]


def _litellm(folder: Path, port: int, urls: list[str]) -> list[str]:
    models = [
        {"model_name": MODEL, "litellm_params": {"model": f"hosted_vllm/{MODEL}", "api_base": f"{url}/v1"}}
        for url in urls
    ]
    general = {"dangerously_permit_weak_or_unset_master_key": True}
    settings = {"num_retries": 3, "allowed_fails": 0, "cooldown_time": 3600}
    file = folder / "litellm.json"  # which is YAML, too
    file.write_text(json.dumps({"model_list": models, "router_settings": settings, "general_settings": general}))
    return ["--config", str(file), "--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]


SGLANG = Router("sglang-router", _sglang, "/readiness")
VLLM = Router("vllm-router", _vllm, "/readiness")
VLLM_APART = Router("vllm-router", _vllm_apart, "/readiness")
"""With a worker for prompts and one for answers."""

LITELLM = Router("litellm", _litellm, "/health/readiness")


def each_of(*routers: Router) -> list:
    """Return the routers as parameters of a test, each skipped where it is absent."""
    return [pytest.param(router, id=router.program, marks=needs(router.program)) for router in routers]
