"""`dynamo-run in=... out=... [flags] [MODEL]`: any way in, any engine."""

import asyncio
import dataclasses
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter

from serving.commands import RouterSettings, Verbosity, engine_settings, fail, flat, one_line, run
from serving.engines.mock import EngineConfig
from serving.frontend.config import FrontendConfig
from serving.frontend.server import listen, run_frontends, serve_frontend
from serving.logs import LogError, set_up
from serving.model_card import ModelError
from serving.router import RouterConfig
from serving.runtime.address import EndpointAddress
from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.ports import RuntimeUnavailableError
from serving.serve_engines import WorkerConfig, serve_echo, serve_mocker

NAME = "dynamo-run"
ENGINES = ("mocker", "echo_core", "echo_full")
LATER = ("mistralrs", "llamacpp", "vllm", "sglang", "trtllm", "pystr", "pytok")
OF_GPU_ENGINES = ("model_config", "tensor_parallel_size", "base_gpu_id", "num_nodes", "node_rank", "leader_addr")
USAGE = f"""\
Usage: dynamo-run in=[http|dyn://NAMESPACE.COMPONENT.ENDPOINT] out=[dyn|{"|".join(ENGINES)}] [flags] [MODEL]

  in=http     OpenAI server             out=dyn     workers found on the network
  in=dyn://   worker on the network     out=mocker  simulated engine; out=echo_core, out=echo_full: echo engines
  MODEL       folder or Hugging Face id with the tokenizer; the same as --model-path

"""


class UsageError(ValueError):
    """Arguments that do not fit together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherConfig:
    """What to serve."""

    model_path: str = ""
    """Folder or Hugging Face id of the model (the mocker reads only its tokenizer)."""

    model_name: str = ""
    """Name that clients ask for (default: the folder's or repository's)."""

    http_host: str = "127.0.0.1"
    """in=http: address to listen on."""

    http_port: int = 8080
    """in=http: port to listen on."""

    http_workers: int = 1
    """in=http: frontend processes that share the port."""

    router_mode: Literal["random", "round-robin", "least-loaded", "kv"] = "round-robin"
    """in=http: how requests are spread over the workers of a model."""

    context_length: int | None = None
    """Worker: tokens a sequence may reach (default: the model's)."""

    kv_cache_block_size: int | None = None
    """Worker: tokens in a KV block (default: the engine's)."""

    migration_limit: int = 0
    """Worker: how often a request may go on at another worker when its own is lost (0 to 1023)."""

    extra_engine_args: Path | None = None
    """Worker: JSON file with settings of the engine."""

    model_config: str = ""
    """Engines that read GGUF: folder or Hugging Face id with the tokenizer."""

    tensor_parallel_size: int = 1
    """Engines on GPUs: GPUs of one instance."""

    base_gpu_id: int = 0
    """Engines on GPUs: the first to use."""

    num_nodes: int = 1
    """Engines on several hosts: how many."""

    node_rank: int = 0
    """Engines on several hosts: which this is; 0 leads."""

    leader_addr: str = ""
    """Engines on several hosts: host:port of the leader."""


app = App(name=NAME, help="Serve a model.", usage=USAGE)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; bad input is one line and exit code 2."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        way_in, way_out, flags = split(words)
        if not words or set(words) & {"-h", "--help"} or all(word in ("-v", "-vv") for word in words):
            app.help_print([])
            return
        if "--version" in words:
            print(f"{NAME} {metadata.version('dynabench')}")
            return
        command, bound, _ = app.parse_args(flags, exit_on_error=False, print_error=False)
        command(*bound.args, way_in=way_in, way_out=way_out, **bound.kwargs)
    except (CycloptsError, ValueError, LogError) as error:
        fail(NAME, one_line(error))
    except (RuntimeUnavailableError, ModelError) as error:
        fail(NAME, str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def split(words: list[str]) -> tuple[str, str, list[str]]:
    """Take `in=` and `out=` off the front.

    Raises:
        UsageError: something else of that form is there.
    """
    found: dict[str, str] = {}
    rest = list(words)
    while rest and len(found) < 2 and "=" in rest[0] and not rest[0].startswith("-"):
        key, _, value = rest[0].partition("=")
        if key not in ("in", "out"):
            raise UsageError(f"invalid argument {rest[0]!r}: it must start with in= or out=")
        if key in found:
            raise UsageError(f"{key}= is given twice")
        found[key] = value
        rest.pop(0)
    if "--" in rest:
        raise UsageError("arguments after -- are for out=pystr and out=pytok, which this version does not have yet")
    return found.get("in", ""), found.get("out", ""), rest


@app.default
def launch(
    model: Annotated[str | None, Parameter(name="MODEL")] = None,
    /,
    *,
    launcher: Annotated[LauncherConfig, flat("Launcher", 1)] = LauncherConfig(),
    router: RouterSettings = RouterConfig(),  # noqa: B008
    runtime: Annotated[RuntimeConfig, flat("Runtime", 4)] | None = None,
    verbose: Verbosity = 0,
    way_in: Annotated[str, Parameter(parse=False)],
    way_out: Annotated[str, Parameter(parse=False)],
) -> None:
    """Serve.

    Args:
        model: the same as --model-path.
        launcher: what to serve.
        router: settings of the router.
        runtime: how processes find and reach each other.
        verbose: how much to log.
        way_in: what stands behind in=.
        way_out: what stands behind out=.
    """
    set_up(verbose)
    runtime = runtime or RuntimeConfig()
    if model is not None:
        launcher = dataclasses.replace(launcher, model_path=model)
    check(way_in, way_out, launcher)
    engine = _engine(launcher) if way_out == "mocker" else EngineConfig()

    async def work(stopping: asyncio.Event) -> None:
        if way_in.startswith("dyn://"):
            await _work(runtime, _worker(launcher, way_in), way_out, engine, stopping)
        elif way_out == "dyn" or way_out.startswith("dyn://"):
            namespace = EndpointAddress.parse(way_out).namespace if way_out != "dyn" else ""
            frontend = _frontend(launcher)
            frontend = dataclasses.replace(frontend, namespace=namespace or frontend.namespace)
            await run_frontends(frontend, router, runtime, stopping)
        else:
            await _all_in_one(launcher, router, way_out, engine, stopping)

    run(work)


def check(way_in: str, way_out: str, launcher: LauncherConfig) -> None:
    """Refuse ways in and out that do not fit together.

    Raises:
        UsageError: and what would fit.
    """
    if way_in.startswith("dyn://") and (way_out == "dyn" or way_out.startswith("dyn://")):
        raise UsageError("cannot use an endpoint for both in and out: a worker needs an engine, as out=mocker")
    if way_in != "http" and not way_in.startswith("dyn://"):
        known = "this version has in=http and in=dyn://..."
        raise UsageError(f"in={way_in} is not available: {known}" if way_in else f"in= is missing; {known}")
    if way_out.partition(":")[0] in LATER:
        raise UsageError(f"out={way_out} is not available yet: this version has out=dyn, {', out='.join(ENGINES)}")
    if way_out not in (*ENGINES, "dyn") and not way_out.startswith("dyn://"):
        expected = ", ".join(("dyn", *ENGINES))
        raise UsageError(f"invalid out= option {way_out!r}; expected one of {expected}")
    if way_out == "dyn" or way_out.startswith("dyn://"):
        for name in ("context_length", "kv_cache_block_size", "extra_engine_args"):
            if getattr(launcher, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')} is for workers, not for the frontend (out=dyn)")
    default = LauncherConfig()
    for name in OF_GPU_ENGINES:
        if getattr(launcher, name) != getattr(default, name):
            raise UsageError(
                f"--{name.replace('_', '-')} is for engines that run models; out={way_out} has no use for it"
            )
    if way_out == "echo_core" and not launcher.model_path:
        raise UsageError("out=echo_core needs a tokenizer: pass --model-path")
    if way_out == "echo_full" and not (launcher.model_path or launcher.model_name):
        raise UsageError("pass --model-name or --model-path so that we know which model to imitate")


async def _work(
    runtime: RuntimeConfig, worker: WorkerConfig, way_out: str, engine: EngineConfig, stopping: asyncio.Event
) -> None:
    async with await DistributedRuntime.connect(runtime, drain_s=worker.drain_s) as connected:
        connected.stopping = stopping
        if way_out == "mocker":
            await serve_mocker(connected, worker, engine)
        else:
            await serve_echo(connected, worker, "core" if way_out == "echo_core" else "full")


async def _all_in_one(
    launcher: LauncherConfig, router: RouterConfig, way_out: str, engine: EngineConfig, stopping: asyncio.Event
) -> None:
    """Serve an engine over HTTP from one process, on a network of its own."""
    listener = listen(launcher.http_host, launcher.http_port)
    worker = _worker(launcher, "dyn://")
    with tempfile.TemporaryDirectory(prefix="dynamo-run-") as folder:
        runtime = RuntimeConfig(etcd_endpoints="", nats_server="", discovery_dir=folder)
        working = asyncio.create_task(_work(runtime, worker, way_out, engine, stopping))
        try:
            async with await DistributedRuntime.connect(runtime) as connected:
                connected.stopping = stopping
                serving = asyncio.create_task(serve_frontend(connected, _frontend(launcher), router, listener))
                await asyncio.wait([working, serving], return_when=asyncio.FIRST_COMPLETED)
                stopping.set()
                await serving
        finally:
            await working


def _frontend(launcher: LauncherConfig) -> FrontendConfig:
    return FrontendConfig(
        http_host=launcher.http_host,
        http_port=launcher.http_port,
        http_workers=launcher.http_workers,
        router_mode=launcher.router_mode,
        migration_limit=launcher.migration_limit or None,
    )


def _worker(launcher: LauncherConfig, endpoint: str) -> WorkerConfig:
    return WorkerConfig(
        endpoint=endpoint,
        model_path=launcher.model_path,
        model_name=launcher.model_name,
        context_length=launcher.context_length,
        migration_limit=launcher.migration_limit,
    )


def _engine(launcher: LauncherConfig) -> EngineConfig:
    engine = EngineConfig()
    if launcher.kv_cache_block_size is not None:
        engine = dataclasses.replace(engine, block_size=launcher.kv_cache_block_size)
    if launcher.extra_engine_args is not None:
        engine = engine_settings(launcher.extra_engine_args, engine)
    return engine


if __name__ == "__main__":
    main()
