"""The command lines of serving: `python -m serving.frontend`, `python -m serving.mocker` and the others."""

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import msgspec
from cyclopts import App, CycloptsError, Parameter, UnknownOptionError

from foundation.exit_codes import INTERRUPTED, USAGE_ERROR
from foundation.settings import changed
from serving.cli.chat_client import AskError, ChatClient
from serving.cli.command_line import Verbosity, begin, flat, program, reason, settings_named
from serving.engines.echo import Echo
from serving.engines.mock.engine import (
    AnswerConfig,
    EngineConfig,
    EngineTypeConfig,
    Mocker,
    SglangConfig,
    SimulatedConfig,
    TimingConfig,
    TrtllmConfig,
    refuse_idle_tiers,
)
from serving.engines.openai.engine import OpenAiServer
from serving.engines.own import OwnEngine
from serving.frontend.config import FrontendConfig
from serving.kv_tiers.config import KvStoreServiceConfig
from serving.kv_tiers.store import serve_store
from serving.kv_tiers.tier import TierError
from serving.life import DisaggregationConfig
from serving.life.lease import LeaseConfig
from serving.model.errors import ModelError
from serving.router import RouterConfig
from serving.routing.service import RouterService, RouterServiceConfig
from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.ports import RuntimeUnavailableError
from serving.supervision.group import SETTINGS, GroupError, Program
from serving.supervision.group import ProcessGroup as Processes
from serving.supervision.logs import LogError, set_up
from serving.supervision.process import report_failure, report_ready, run_process
from serving.transfer.config import TransferRunConfig
from serving.worker.config import ModelRunConfig, WorkerConfig, flags_to_arguments, read_arguments, replace_model
from serving.worker.engine import EngineError
from serving.worker.loop import run_worker
from serving.worker.make import check_installed, make_engine, refuse_role
from serving.worker.registry import ENGINES

FrontendSettings = Annotated[FrontendConfig, flat("Frontend", 1)]
WorkerSettings = Annotated[WorkerConfig, flat("Worker", 1)]
RouterSettings = Annotated[RouterConfig, flat("Router", 2)]
RunSettings = Annotated[ModelRunConfig, flat("Engine", 3)]
SchedulerSettings = Annotated[EngineTypeConfig, flat("Simulated engine", 3)]
EngineSettings = Annotated[EngineConfig, flat("Simulated engine", 3)]
SglangSettings = Annotated[SglangConfig, flat("Simulated engine: --engine-type sglang", 3)]
TrtllmSettings = Annotated[TrtllmConfig, flat("Simulated engine: --engine-type trtllm", 3)]
TimingSettings = Annotated[TimingConfig, flat("Simulated engine", 3)]
AnswerSettings = Annotated[AnswerConfig, flat("Simulated engine", 3)]
DisaggregationSettings = Annotated[DisaggregationConfig, flat("Prefill and decode workers", 3)]
TransferSettings = Annotated[TransferRunConfig, flat("Prefill and decode workers", 3)]
LeaseSettings = Annotated[LeaseConfig, flat("Prefill and decode workers", 3)]
RuntimeSettings = Annotated[RuntimeConfig, flat("Runtime", 4)]

frontend_app = program("serving.frontend", "The OpenAI frontend, with the router inside.")
mocker_app = program("serving.mocker", "Mocker workers: simulated engines that serve in real time.")
echo_app = program("serving.echo", "An echo engine as a worker.")
own_app = program("serving.own", "An engine of your own, a Python file, as a worker.")
openai_app = program(
    "serving.openai",
    "An OpenAI server, such as vllm serve, as a worker. Fields after -- are added to the body of each request.",
)
router_app = program("serving.router_service", "The router as its own process.")
store_app = program("serving.kv_store", "KV memory that all workers share.")


@frontend_app.default
def frontend(
    *,
    frontend: FrontendSettings = FrontendConfig(),  # noqa: B008 (frozen)
    router: RouterSettings = RouterConfig(),  # noqa: B008
    disaggregation: DisaggregationSettings = DisaggregationConfig(),  # noqa: B008
    runtime: RuntimeSettings | None = None,
    interactive: Annotated[bool, Parameter(name=["--interactive", "-i"], negative=())] = False,
    verbose: Verbosity = 0,
) -> None:
    """Serve OpenAI's API for the models that workers register.

    Args:
        frontend: How to serve.
        router: Settings of the router.
        disaggregation: How to use separate prefill and decode workers.
        runtime: How to find the workers.
        interactive: Chat in this terminal with the first model that appears.
        verbose: How much to log.
    """
    from serving.frontend.server import run_frontends  # FastAPI would be nearly half of a mocker's start

    set_up(verbose, default="warn" if interactive else "info")
    frontend, router, disaggregation, network = _resolve(frontend, router, disaggregation, runtime or RuntimeConfig())
    if interactive and not frontend.http_port:
        raise ValueError("--interactive needs an HTTP port (--http-port)")

    async def main(stopping: asyncio.Event) -> None:
        serving = asyncio.create_task(run_frontends(frontend, router, disaggregation, network, stopping))
        if interactive:
            serving.add_done_callback(lambda _: stopping.set())  # nobody is left to talk to
            await _talk(frontend, stopping)
        await serving

    run_process(main)


async def _talk(frontend: FrontendConfig, stopping: asyncio.Event) -> None:
    """Talk to a frontend until the user leaves or the event is set; then set the event."""
    from serving.cli.chat import chat

    client = ChatClient(f"http://{frontend.http_host}:{frontend.http_port}", api_key=frontend.api_key)
    print("Waiting for a model...", file=sys.stderr)
    async with contextlib.aclosing(client):
        try:
            await chat(client, stopping, options={})
        finally:
            stopping.set()


@mocker_app.default
def mocker(
    model: Annotated[str | None, Parameter(name="MODEL")] = None,
    /,
    *,
    worker: WorkerSettings = WorkerConfig(),  # noqa: B008
    scheduler: SchedulerSettings = EngineTypeConfig(),  # noqa: B008
    engine: EngineSettings = EngineConfig(),  # noqa: B008
    sglang: SglangSettings = SglangConfig(),  # noqa: B008
    trtllm: TrtllmSettings = TrtllmConfig(),  # noqa: B008
    timing: TimingSettings = TimingConfig(),  # noqa: B008
    answers: AnswerSettings = AnswerConfig(),  # noqa: B008
    transfer: TransferSettings = TransferRunConfig(),  # noqa: B008
    lease: LeaseSettings = LeaseConfig(),  # noqa: B008
    runtime: RuntimeSettings | None = None,
    num_workers: int = 1,
    extra_engine_args: Path | None = None,
    verbose: Verbosity = 0,
) -> None:
    """Serve the mocker.

    Args:
        model: The same as --model-path.
        worker: What to serve, and where.
        scheduler: Whose scheduler the simulated engine has.
        engine: Its settings, if it is vLLM's.
        sglang: Its settings, if it is SGLang's.
        trtllm: Its settings, if it is TensorRT-LLM's.
        timing: Step times of the simulated engine.
        answers: What its answers are like.
        transfer: How KV travels between prefill and decode workers.
        lease: How long KV waits for a decode worker.
        runtime: How to be found.
        num_workers: Number of worker processes.
        extra_engine_args: JSON file with settings of the simulated engine; flags override it.
        verbose: How much to log.
    """
    set_up(verbose)
    simulated = SimulatedConfig(scheduler, engine, sglang, trtllm, timing)
    if extra_engine_args is not None:
        simulated = engine_settings(extra_engine_args, simulated, named=settings_named(sys.argv[1:]))
    simulated.refuse_idle()
    refuse_idle_tiers([simulated.vllm], has_store=bool(transfer.kv_store))
    worker, simulated, answers, transfer, lease, network = _resolve(
        worker, simulated, answers, transfer, lease, runtime or RuntimeConfig()
    )
    worker = replace_model(worker, model)
    if num_workers < 1:
        raise ValueError(f"num_workers must be at least 1, not {num_workers}")

    async def main(stopping: asyncio.Event) -> None:
        if num_workers > 1:
            settings = [worker, simulated, answers, transfer, lease, network]
            await run_copies("serving.mocker", num_workers, settings, worker.drain_s, stopping)
            return
        config, times = simulated.config, simulated.timing
        made = Mocker(worker, config, times, answers=answers, transfer=transfer, lease=lease)
        await run_worker(network, worker, made, stopping, default_name="mock")

    run_process(main)


def engine_app(name: str) -> App:
    """Return the command line of an engine that runs models."""
    entry = ENGINES[name]
    engine_command = program(
        f"serving.{entry.command}", f"A worker with {entry.description}. Arguments for the engine itself go after --."
    )

    @engine_command.default
    def serve(
        model: Annotated[str | None, Parameter(name="MODEL")] = None,
        /,
        *,
        worker: WorkerSettings = WorkerConfig(),  # noqa: B008
        engine: RunSettings = ModelRunConfig(),  # noqa: B008
        runtime: RuntimeSettings | None = None,
        dry_run: Annotated[bool, Parameter(negative=())] = False,
        verbose: Verbosity = 0,
        arguments: Annotated[list[str] | None, Parameter(parse=False, show=False)] = None,
    ) -> None:
        """Serve a model.

        Args:
            model: The same as --model-path.
            worker: What to serve, and where.
            engine: How to run it.
            runtime: How to be found.
            dry_run: Print the exact call of the engine and exit.
            verbose: How much to log.
            arguments: The words after --.
        """
        set_up(verbose)
        worker, engine, network, given = _resolve(worker, engine, runtime or RuntimeConfig(), arguments or [])
        worker = replace_model(worker, model)
        made = make_engine(name, worker, engine, given)
        if dry_run:
            print(*made.calls, sep="\n")
            return
        check_installed(name)

        run_process(lambda stopping: run_worker(network, worker, made, stopping))

    return engine_command


@openai_app.default
def openai(
    url: Annotated[str, Parameter(name="URL")],
    /,
    *,
    worker: WorkerSettings = WorkerConfig(),  # noqa: B008 (frozen)
    engine: RunSettings = ModelRunConfig(),  # noqa: B008
    lease: LeaseSettings = LeaseConfig(),  # noqa: B008
    runtime: RuntimeSettings | None = None,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    verbose: Verbosity = 0,
    arguments: Annotated[list[str] | None, Parameter(parse=False, show=False)] = None,
) -> None:
    """Serve the model of an OpenAI server.

    Args:
        url: Address of the server, http://HOST:PORT; its API key is read from OPENAI_API_KEY.
        worker: What to serve, and where; --model-path is the tokenizer's.
        engine: The server's KV block size (default: vLLM's, 16), and more fields for each request.
        lease: How long the server's KV connector keeps KV (kv_lease_duration).
        runtime: How to be found.
        dry_run: Print the exact call of the engine and exit.
        verbose: How much to log.
        arguments: The words after --.
    """
    set_up(verbose)
    made = OpenAiServer(url, worker, engine, flags_to_arguments(arguments or []), lease=lease)
    if dry_run:
        print(*made.calls, sep="\n")
        return

    run_process(lambda stopping: run_worker(runtime or RuntimeConfig(), worker, made, stopping))


@echo_app.default
def echo(
    kind: Literal["core", "full"] = "full",
    /,
    *,
    worker: WorkerSettings = WorkerConfig(),  # noqa: B008
    runtime: RuntimeSettings | None = None,
    verbose: Verbosity = 0,
) -> None:
    """Serve an echo engine.

    Args:
        kind: What to echo: core (token ids, including the template) or full (the last user message).
        worker: What to serve, and where.
        runtime: How to be found.
        verbose: How much to log.
    """
    set_up(verbose)
    worker, network = _resolve(worker, runtime or RuntimeConfig())
    refuse_role(worker, f"echo_{kind}")

    run_process(lambda stopping: run_worker(network, worker, Echo(kind), stopping))


@own_app.default
def own(
    kind: Literal["pytok", "pystr"],
    file: str,
    /,
    *,
    worker: WorkerSettings = WorkerConfig(),  # noqa: B008
    runtime: RuntimeSettings | None = None,
    verbose: Verbosity = 0,
) -> None:
    """Serve an engine of your own.

    Args:
        kind: What it takes: pytok (token ids) or pystr (whole chat requests).
        file: The Python file, which defines `async def generate(request)`.
        worker: What to serve, and where.
        runtime: How to be found.
        verbose: How much to log.
    """
    set_up(verbose)
    worker, network = _resolve(worker, runtime or RuntimeConfig())
    refuse_role(worker, kind)
    engine = OwnEngine(kind, file, worker, ModelRunConfig(), (), http_port=0)
    run_process(lambda stopping: run_worker(network, worker, engine, stopping))


@router_app.default
def router(
    *,
    service: Annotated[RouterServiceConfig, flat("Service", 1)] = RouterServiceConfig(),  # noqa: B008
    router: RouterSettings = RouterConfig(),  # noqa: B008
    runtime: RuntimeSettings | None = None,
    verbose: Verbosity = 0,
) -> None:
    """Route to workers on behalf of frontends.

    Args:
        service: Where to serve, and for which workers.
        router: Settings of the router.
        runtime: How to find the workers, and be found.
        verbose: How much to log.
    """
    set_up(verbose)
    service, router, network = _resolve(service, router, runtime or RuntimeConfig())

    async def main(stopping: asyncio.Event) -> None:
        async with await DistributedRuntime.connect(network, drain_s=service.drain_s, stopping=stopping) as connected:
            await RouterService(connected, service, router).run()

    run_process(main)


@store_app.default
def kv_store(
    *,
    store: Annotated[KvStoreServiceConfig, flat("Store", 1)] = KvStoreServiceConfig(),  # noqa: B008
    runtime: RuntimeSettings | None = None,
    verbose: Verbosity = 0,
) -> None:
    """Keep chunks of KV for workers.

    Args:
        store: How much to keep, and where to listen.
        runtime: Where to find the cluster's token, which workers must know.
        verbose: How much to log.
    """
    set_up(verbose)
    store, network = _resolve(store, runtime or RuntimeConfig())

    async def main(stopping: asyncio.Event) -> None:
        async with await DistributedRuntime.connect(network, stopping=stopping) as connected:
            await serve_store(store, await connected.cluster_token(), stopping, on_ready=report_ready)

    run_process(main)


def _resolve(*given: Any) -> tuple[Any, ...]:
    """Return the settings given as flags, or those that the parent process passed on."""
    text = os.environ.get(SETTINGS)
    if text is None:
        return given
    parts = zip(json.loads(text), given, strict=True)
    return tuple(msgspec.convert(part, type(value), dec_hook=lambda kind, text: kind(text)) for part, value in parts)


def engine_settings(path: Path, given: SimulatedConfig, *, named: Collection[str] = frozenset()) -> SimulatedConfig:
    """Read settings of a simulated engine from a JSON file; those that are named, or differ from their defaults, win.

    Args:
        path: the file, with all settings on one level.
        given: the settings so far.
        named: those that a command line gives, perhaps at their defaults.

    Raises:
        ValueError: the file cannot be read, or its content is not valid.
    """
    values = read_arguments(path)
    parts = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    names = {section: {field.name for field in dataclasses.fields(part)} for section, part in parts.items()}
    known = set().union(*names.values())
    if unknown := sorted(values.keys() - known):
        raise ValueError(
            f"--extra-engine-args {path}: unknown {', '.join(unknown)}; expected some of {', '.join(sorted(known))}"
        )
    try:
        read = {
            section: msgspec.convert(
                {name: values[name] for name in (values.keys() & names[section]) - set(named)} | changed(part),
                type(part),
            )
            for section, part in parts.items()
        }
    except msgspec.ValidationError as error:
        raise ValueError(f"--extra-engine-args {path}: {error}") from error
    return SimulatedConfig(**read)


async def run_copies(module: str, count: int, settings: list[Any], drain_s: float, stopping: asyncio.Event) -> None:
    """Run several processes of a module with the same settings, and restart those that end.

    Raises:
        GroupError: one of them did not start.
    """
    name = module.rpartition(".")[2]
    async with Processes(restart=True) as group:
        await group.start(*(Program(f"{name}-{number}", ["-m", module], settings) for number in range(count)))
        report_ready()
        await group.wait(stopping)
        await group.stop(drain_s + 5)


def run_app(app: App, name: str) -> None:
    """Run a command line; bad input ends in one line and exit code 2."""
    with failing_in_one_line(name):
        command, bound, _ = app.parse_args(exit_on_error=False, print_error=False)
        command(*bound.args, **bound.kwargs)


def run_engine(name: str) -> None:
    """Run the command line of an engine that runs models."""
    run_with_arguments(engine_app(name), f"serving.{ENGINES[name].command}")


def run_with_arguments(app: App, name: str) -> None:
    """Run a command line that passes the words after -- on."""
    with failing_in_one_line(name, runs_model=True):
        words, arguments = split_arguments(sys.argv[1:])
        command, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
        if "dry_run" in bound.signature.parameters:  # not --help
            bound.arguments["arguments"] = arguments
        command(*bound.args, **bound.kwargs)


def split_arguments(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the words before -- and those after it."""
    if "--" not in words:
        return words, []
    place = words.index("--")
    return words[:place], words[place + 1 :]


@contextlib.contextmanager
def failing_in_one_line(name: str, *, runs_model: bool = False) -> Iterator[None]:
    """End the process with one line and exit code 2 if the input is bad or something it needs is missing."""
    begin()
    try:
        yield
    except (CycloptsError, ValueError, LogError) as error:
        is_unknown = runs_model and isinstance(error, UnknownOptionError)
        fail(name, reason(error) + " Options of the engine itself go after --." * is_unknown)
    except (RuntimeUnavailableError, ModelError, EngineError, AskError, GroupError, TierError) as error:
        fail(name, str(error))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def fail(name: str, message: str) -> NoReturn:
    """End with a message."""
    print(f"{name}: {message}", file=sys.stderr)
    report_failure(message)
    sys.exit(USAGE_ERROR)
