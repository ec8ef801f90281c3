"""`dynamo-run in=... out=... [flags] [MODEL] [-- engine arguments]`: any input, any engine."""

import asyncio
import dataclasses
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter

from foundation.namesake import refuse_namesake
from serving.cli.all_in_one import run_all_in_one
from serving.cli.batch import is_answered
from serving.cli.command_line import Verbosity, flat, program, version
from serving.cli.commands import (
    AnswerSettings,
    DisaggregationSettings,
    FrontendSettings,
    RouterSettings,
    RunSettings,
    RuntimeSettings,
    TransferSettings,
    failing_in_one_line,
    split_arguments,
)
from serving.cli.help import HELP_ALL, HELP_FLAGS
from serving.cli.job import ALONE, AskConfig, Job, check_job, job_identity, make_job
from serving.cli.ways import (
    BatchInput,
    EndpointInput,
    EngineOutput,
    HttpInput,
    NoInput,
    RemoteOutput,
    StdinInput,
    TextInput,
    UsageError,
    WayIn,
    WayOut,
    read_way_in,
    read_way_out,
)
from serving.engines.mock.config import AnswerConfig
from serving.frontend.config import FrontendConfig
from serving.frontend.server import run_frontends
from serving.life import DisaggregationConfig
from serving.model.files import ModelFiles, check_exists
from serving.router import RouterConfig
from serving.runtime.address import EndpointAddress
from serving.runtime.config import RuntimeConfig
from serving.runtime.stopping import until_stopped
from serving.supervision.logs import set_up
from serving.supervision.process import run_process
from serving.transfer.config import TransferRunConfig
from serving.worker.config import ModelConfig, ModelRunConfig, replace_model
from serving.worker.engine import Engine
from serving.worker.loop import run_worker
from serving.worker.make import check_installed
from serving.worker.registry import ENGINES

log = logging.getLogger(__name__)

NAME = "dynamo-run"
SERVERS = ("ETCD_ENDPOINTS", "NATS_SERVER")
"""The variables that name servers."""
USAGE = """\
Usage: dynamo-run [in=WAY] [out=ENGINE] [flags] [MODEL] [-- engine arguments]

  in=text         chat in the terminal (default in a terminal)
  in=stdin        one question from standard input (default in a pipe)
  in=http         OpenAI server
  in=batch:FILE   every prompt of a jsonl file
  in=dyn://NAME   worker on the network
  in=none         no input: the engine is a node that follows another

  out=mistralrs   default; llamacpp (default for GGUF), vllm, sglang, trtllm
  out=dyn         workers found on the network
  out=mocker      simulated engine
  out=echo_core   echo the prompt's tokens; echo_full: echo the last message
  out=pystr:FILE  your own engine, in text; pytok:FILE: in tokens
  out=http://...  an OpenAI server such as vllm serve

  MODEL           folder, Hugging Face id or GGUF file (--model-path)

"""


app = program(NAME, "Serve a model.", usage=USAGE)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; bad input ends in one line and exit code 2."""
    with failing_in_one_line(NAME, runs_model=True):
        refuse_namesake()
        words, engine_arguments = split_arguments(sys.argv[1:] if arguments is None else arguments)
        way_in, way_out, flags = split_ways(words)
        if not words or set(words) & set(HELP_FLAGS) or all(word in ("-v", "-vv") for word in words):
            app.shows_all = HELP_ALL in words
            app.help_print([])
            return
        if "--version" in words:
            print(f"{NAME} {version()}")
            return
        command, bound, _ = app.parse_args(flags, exit_on_error=False, print_error=False)
        command(*bound.args, way_in=way_in, way_out=way_out, engine_arguments=engine_arguments, **bound.kwargs)


def split_ways(words: list[str]) -> tuple[str, str, list[str]]:
    """Split `in=` and `out=` off the front.

    Raises:
        UsageError: there is another NAME=VALUE, or one of them is given twice or too late.
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
    if late := [word for word in rest if word.startswith(("in=", "out="))]:
        raise UsageError(f"{late[0]} comes too late: in= and out= must come first")
    return found.get("in", ""), found.get("out", ""), rest


@app.default
def launch(
    model: Annotated[str | None, Parameter(name="MODEL")] = None,
    /,
    *,
    served: Annotated[ModelConfig, flat("Asking", 0)] = ModelConfig(),  # noqa: B008 (frozen)
    launcher: Annotated[AskConfig, flat("Asking", 0)] = AskConfig(),  # noqa: B008
    frontend: FrontendSettings = FrontendConfig(),  # noqa: B008
    router: RouterSettings = RouterConfig(),  # noqa: B008
    engine: RunSettings = ModelRunConfig(),  # noqa: B008
    answers: AnswerSettings = AnswerConfig(),  # noqa: B008
    disaggregation: DisaggregationSettings = DisaggregationConfig(),  # noqa: B008
    transfer: TransferSettings = TransferRunConfig(),  # noqa: B008
    runtime: RuntimeSettings | None = None,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    verbose: Verbosity = 0,
    way_in: Annotated[str, Parameter(parse=False, show=False)],
    way_out: Annotated[str, Parameter(parse=False, show=False)],
    engine_arguments: Annotated[Sequence[str], Parameter(parse=False, show=False)] = (),
) -> None:
    """Serve.

    Args:
        model: The same as --model-path.
        served: The model.
        launcher: Settings of the input.
        frontend: How to serve over HTTP; a worker (in=dyn://) uses only its migration limit and its drain time.
        router: Settings of the router.
        engine: How the engine runs the model.
        answers: What a mocker's answers are like.
        disaggregation: How to use separate prefill and decode workers.
        transfer: How KV travels between simulated engines.
        runtime: How processes find and reach each other.
        dry_run: Print the exact call of the engine and exit.
        verbose: How much to log.
        way_in: The text after in=.
        way_out: The text after out=.
        engine_arguments: The words after --.
    """
    asks = read_way_in(way_in or ("text" if sys.stdin.isatty() else "stdin"))
    set_up(verbose, default="warn" if isinstance(asks, TextInput | StdinInput | BatchInput) else "info")
    if model is not None and served.model_path:
        raise UsageError(f"the model is given twice: {model} and --model-path {served.model_path}")
    served = replace_model(served, model)
    answered_by = read_way_out(way_out or default_engine(served.model_path))
    frontend, router = _fitting(asks, answered_by, frontend, router)
    job = Job(
        asks,
        answered_by,
        served,
        launcher,
        frontend,
        engine,
        answers,
        router,
        disaggregation,
        transfer,
        runtime or RuntimeConfig(),
        engine_arguments,
    )
    check_job(job)
    _warn_of_what_has_no_effect(job)
    made = make_job(job)
    if dry_run:
        print(*(made.calls if made is not None else [f"out={answered_by}: no engine runs in this process"]), sep="\n")
        return
    if isinstance(asks, BatchInput) and is_answered(asks.file, job_identity(job)):
        return
    if isinstance(answered_by, EngineOutput):
        check_installed(answered_by.name)
    if made is not None:
        check_exists(served.model_path)
    sys.exit(run_process(lambda stopping: carry_out(job, made, stopping)))


def default_engine(model_path: str) -> str:
    """Return the default engine for a model: llama.cpp for GGUF files if it is installed, else mistral.rs."""
    has_llama = importlib.util.find_spec(ENGINES["llamacpp"].package) is not None
    name = "llamacpp" if model_path.endswith(".gguf") and has_llama else "mistralrs"
    log.info("using the default engine, out=%s", name)
    return name


def _fitting(
    asks: WayIn, answers: WayOut, frontend: FrontendConfig, router: RouterConfig
) -> tuple[FrontendConfig, RouterConfig]:
    """Return the settings, adjusted to the ways in and out."""
    if isinstance(answers, RemoteOutput) and answers.address:
        frontend = dataclasses.replace(frontend, namespace=EndpointAddress.parse(answers.address).namespace)
    if isinstance(asks, BatchInput):  # a batch limits itself to --batch-concurrency and needs every answer
        router = dataclasses.replace(router, max_queue_depth=None)
    return frontend, router


def _warn_of_what_has_no_effect(job: Job) -> None:
    for name in ("kv_gpu_cache_usage_weight", "kv_waiting_requests_weight"):
        if getattr(job.launcher, name) is not None:
            flag = name.replace("_", "-")
            log.warning("--%s has no effect: the kv mode's cost has no such term", flag)
    named = [name for name in SERVERS if os.environ.get(name)] if job.is_alone else []
    if named:
        log.warning("%s: servers are for processes that find each other, %s", " and ".join(named), ALONE)


async def carry_out(job: Job, engine: Engine | None, stopping: asyncio.Event) -> int:
    """Do a job until it is done or the process is asked to end; return the exit code."""
    match job.way_in:
        case NoInput():
            assert engine is not None
            await _run_without_input(job.model, engine, stopping)
        case EndpointInput():
            assert engine is not None
            await run_worker(job.runtime, job.worker, engine, stopping, default_name=job.default_name)
        case HttpInput() if engine is None:
            await run_frontends(job.frontend, job.router, job.disaggregation, job.runtime, stopping)
        case _:
            return await run_all_in_one(job, engine, stopping)
    return 0


async def _run_without_input(model: ModelConfig, engine: Engine, stopping: asyncio.Event) -> None:
    """Run an engine that nobody asks: a node that follows another."""

    async def until_it_fails() -> None:
        await engine.start(await asyncio.to_thread(ModelFiles.read, model.model_path, model.model_config))
        engine.publish_to([])
        await engine.failed()

    try:
        await until_stopped(stopping, until_it_fails())
    finally:
        await engine.close()


if __name__ == "__main__":
    main()
