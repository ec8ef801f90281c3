"""What dynabench finds on this host: what is installed, reachable and free, and what to do about the rest.

    ok        is there
    missing   is optional, and not there
    warning   works, but will be in the way
    broken    was asked for, by the environment, and does not work

Nothing heavy is imported: what is installed is read from its metadata.
"""

import asyncio
import contextlib
import errno
import functools
import importlib.util
import os
import platform
import resource
import secrets
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

from foundation.extras import DISTRIBUTION, install
from foundation.processes import num_cores
from foundation.text import one_line
from serving.frontend.config import FrontendConfig
from serving.runtime.config import RuntimeConfig, masked
from serving.runtime.ports import RuntimeUnavailableError
from serving.worker.devices import visible_gpus
from serving.worker.registry import ENGINES

State = Literal["ok", "missing", "warning", "broken"]

EXTRAS = {
    "nixl": ("nixl", "KV between workers"),
    "forecast": ("prophet", "--load-predictor arima and prophet"),
    "png": ("resvg_py", "export --to png"),
    "ray": ("ray", "--backend ray"),
    "dask": ("distributed", "--backend dask"),
}
"""What else can be installed: its package, and what it is for."""

ENOUGH_FILES = 4096
"""Open files: a live run has a socket for each request in flight at each of three processes."""

SERVER_S = 5.5
"""How long a server may take to answer (s); its own client gives up after 5 and says why."""


class HostCheck(NamedTuple):
    """What was looked at, how it is, and what to do about it."""

    name: str
    state: State
    found: str
    advice: str = ""


def checks() -> list[HostCheck]:
    """Look at everything."""
    return [*installed(), *_servers(), *host(Path.cwd())]


def installed() -> Iterator[HostCheck]:
    """Look at what is installed."""
    yield HostCheck("dynabench", "ok", f"{metadata.version(DISTRIBUTION)} on Python {platform.python_version()}")
    yield _cores()
    for name, entry in ENGINES.items():
        yield _package(name, entry.package, "not installed")
    for name, (package, purpose) in EXTRAS.items():
        yield _package(name, package, f"for {purpose}")


def _cores() -> HostCheck:
    found = importlib.util.find_spec("mocker")
    folders = (found and found.submodule_search_locations) or ()
    if any(next(Path(folder).glob("engine.*.so"), None) for folder in folders):
        return HostCheck("cores", "ok", "compiled")
    return HostCheck(
        "cores", "ok", "interpreted", "compiled: two to three times as fast; set DYNABENCH_COMPILE=1 for pip install"
    )


def _package(name: str, package: str, purpose: str) -> HostCheck:
    if importlib.util.find_spec(package) is None:
        return HostCheck(name, "missing", purpose, install(name))
    distributions = sorted(set(_distributions().get(package, [])))
    return HostCheck(name, "ok", ", ".join(f"{each} {metadata.version(each)}" for each in distributions) or "installed")


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


def _servers() -> Iterator[HostCheck]:
    try:
        config = RuntimeConfig()
    except ValueError as error:
        yield HostCheck("environment", "broken", one_line(error))
        return
    yield from asyncio.run(servers(config))


async def servers(config: RuntimeConfig) -> list[HostCheck]:
    """Ask the servers that the settings name, all at once: for discovery, and for requests and events."""
    asked: list[Awaitable[HostCheck]] = [
        _answer("Kubernetes", "the API server", "", lambda: _ask_kubernetes(config))
        if config.discovery_backend == "kubernetes"
        else _answer("etcd", config.etcd_endpoints, "ETCD_ENDPOINTS", lambda: _ask_etcd(config)),
        _answer("NATS", config.nats_server, "NATS_SERVER", lambda: _ask_nats(config)),
    ]
    return list(await asyncio.gather(*asked))


async def _answer(name: str, address: str, variable: str, ask: Callable[[], Awaitable[None]]) -> HostCheck:
    if not address:
        return HostCheck(name, "ok", "embedded: one host needs no server", f"or set {variable}")
    try:
        await asyncio.wait_for(ask(), SERVER_S)
    except RuntimeUnavailableError as error:
        return HostCheck(name, "broken", one_line(error))
    except TimeoutError:
        return HostCheck(name, "broken", f"{masked(address)} gives no answer within {SERVER_S:g} s")
    except (OSError, ValueError) as error:  # a file of credentials or certificates, say
        return HostCheck(name, "broken", masked(one_line(error)))
    return HostCheck(name, "ok", f"answers at {masked(address)}")


async def _ask_etcd(config: RuntimeConfig) -> None:
    from serving.runtime.etcd import EtcdDiscovery

    discovery = EtcdDiscovery(config)
    await discovery.connect()
    await discovery.close()


async def _ask_kubernetes(config: RuntimeConfig) -> None:
    """Join as a process of this pod would, and leave again: only that shows what its account may do."""
    from serving.runtime.kubernetes.discovery import KubernetesDiscovery

    discovery = await KubernetesDiscovery.connect(secrets.randbits(63), lease_ttl_s=config.lease_ttl_s)
    await discovery.close()


async def _ask_nats(config: RuntimeConfig) -> None:
    from serving.runtime.nats import NatsPlane

    plane = NatsPlane(config, secrets.randbits(63))
    await plane.connect()
    await plane.close()


def host(folder: Path) -> Iterator[HostCheck]:
    """Look at this host, and at the folder in which results would be written."""
    gpus = visible_gpus(os.environ, Path("/dev"))
    seen = f"{len(gpus)} NVIDIA: {', '.join(gpus)}" if gpus else "none seen: simulations and mocker workers need none"
    yield HostCheck("GPU", "ok", seen)
    cores = num_cores()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    yield HostCheck("machine", "ok", f"{cores} {'core' if cores == 1 else 'cores'}, {memory:.0f} GiB of memory")
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield results(folder)
    frontend = FrontendConfig()
    yield port(frontend.http_host, frontend.http_port)


def open_files(limit: int) -> HostCheck:
    """Judge how many files, and so sockets, a process may have open."""
    if limit == resource.RLIM_INFINITY:
        return HostCheck("open files", "ok", "unlimited")
    if limit >= ENOUGH_FILES:
        return HostCheck("open files", "ok", f"{limit} per process")
    return HostCheck("open files", "warning", f"{limit} per process: many requests at once fail", "ulimit -n 65536")


def results(folder: Path) -> HostCheck:
    """Try whether results can be written below a folder."""
    place = folder / "results"
    existing = place if place.is_dir() else folder
    try:
        with tempfile.TemporaryFile(dir=existing):
            return HostCheck("results", "ok", f"{place} can be written")
    except OSError as error:
        found = f"{place} cannot be written: {error.strerror}"
        return HostCheck("results", "warning", found, "work in another folder, or give --out FOLDER")


def port(address: str, number: int) -> HostCheck:
    """Try whether a port is free."""
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, number))
        except OSError as error:
            found = f"{number} is in use" if error.errno == errno.EADDRINUSE else f"{number}: {error.strerror}"
            return HostCheck("port", "warning", found, "give --http-port another number")
    return HostCheck("port", "ok", f"{number} is free for dynabench serve")


def next_steps(found: list[HostCheck]) -> list[str]:
    """Return what to do next, most urgent first."""
    steps = [f"fix {check.name}, as said above" for check in found if check.state == "broken"]
    steps += [f"{check.name}: {check.advice}" for check in found if check.state == "warning"]
    engines = [check.name for check in found if check.name in ENGINES and check.state == "ok"]
    steps += ["compare two router modes, with nothing else: dynabench simulate"]
    steps += [f"compare them on {name}: dynabench run --engine {name} --model FOLDER" for name in engines]
    return steps
