"""`dynamo-run in=... out=... [flags] [MODEL] [-- engine arguments]`: any way in, any engine."""

import asyncio
import dataclasses
import importlib.util
import logging
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from serving.cli.batch import is_answered
from serving.cli.commands import (
    FrontendSettings,
    RouterSettings,
    RunSettings,
    Verbosity,
    failing_in_one_line,
    flat,
    run,
    split_arguments,
)
from serving.cli.launcher import FILES, Job, LauncherConfig, carry_out, make
from serving.frontend.config import FrontendConfig
from serving.router import RouterConfig
from serving.runtime.config import RuntimeConfig
from serving.supervision.logs import set_up
from serving.worker.config import ModelRunConfig
from serving.worker.engine import ENGINES, check_installed

log = logging.getLogger(__name__)

NAME = "dynamo-run"
OURS = ("mocker", "echo_core", "echo_full")
WAYS_IN = ("text", "stdin", "http", "none", "batch:FILE", "dyn://NAME")
USAGE = """\
Usage: dynamo-run [in=WAY] [out=ENGINE] [flags] [MODEL] [-- engine arguments]

  in=text         talk in the terminal (default in a terminal)
  in=stdin        one question from standard input (default in a pipe)
  in=http         OpenAI server
  in=batch:FILE   every prompt of a jsonl file
  in=dyn://NAME   worker on the network
  in=none         an engine without input: a node that follows another

  out=mistralrs   default; llamacpp (default for GGUF), vllm, sglang, trtllm
  out=dyn         workers found on the network
  out=mocker      simulated engine
  out=echo_core   echo in tokens; echo_full: echo of the last message
  out=pystr:FILE  your own engine, in text; pytok:FILE: in tokens

  MODEL           folder, Hugging Face id or GGUF file (--model-path)

"""


class UsageError(ValueError):
    """Arguments that do not fit together."""


app = App(name=NAME, help="Serve a model.", usage=USAGE)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; bad input is one line and exit code 2."""
    with failing_in_one_line(NAME):
        words, engine_arguments = split_arguments(sys.argv[1:] if arguments is None else arguments)
        way_in, way_out, flags = split(words)
        if not words or set(words) & {"-h", "--help"} or all(word in ("-v", "-vv") for word in words):
            app.help_print([])
            return
        if "--version" in words:
            print(f"{NAME} {metadata.version('dynabench')}")
            return
        command, bound, _ = app.parse_args(flags, exit_on_error=False, print_error=False)
        command(*bound.args, way_in=way_in, way_out=way_out, engine_arguments=engine_arguments, **bound.kwargs)


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
    if late := [word for word in rest if word.startswith(("in=", "out="))]:
        raise UsageError(f"{late[0]} comes too late: in= and out= stand before everything else")
    return found.get("in", ""), found.get("out", ""), rest


@app.default
def launch(
    model: Annotated[str | None, Parameter(name="MODEL")] = None,
    /,
    *,
    launcher: Annotated[LauncherConfig, flat("Launcher", 0)] = LauncherConfig(),  # noqa: B008
    frontend: FrontendSettings = FrontendConfig(),  # noqa: B008
    router: RouterSettings = RouterConfig(),  # noqa: B008
    engine: RunSettings = ModelRunConfig(),  # noqa: B008
    runtime: Annotated[RuntimeConfig, flat("Runtime", 4)] | None = None,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    verbose: Verbosity = 0,
    way_in: Annotated[str, Parameter(parse=False, show=False)],
    way_out: Annotated[str, Parameter(parse=False, show=False)],
    engine_arguments: Annotated[Sequence[str], Parameter(parse=False, show=False)] = (),
) -> None:
    """Serve.

    Args:
        model: the same as --model-path.
        launcher: what to serve, and to whom.
        frontend: how to serve it over HTTP; a worker (in=dyn://) has the migration limit and the drain of it.
        router: settings of the router.
        engine: how the engine runs the model.
        runtime: how processes find and reach each other.
        dry_run: print the exact call of the engine, and end.
        verbose: how much to log.
        way_in: what stands behind in=.
        way_out: what stands behind out=.
        engine_arguments: what stands behind --.
    """
    way_in = way_in or ("text" if sys.stdin.isatty() else "stdin")
    set_up(verbose, default="warn" if way_in in ("text", "stdin") or way_in.startswith("batch:") else "info")
    if model is not None:
        if launcher.model_path:
            raise UsageError(f"the model is given twice: {model} and --model-path {launcher.model_path}")
        launcher = dataclasses.replace(launcher, model_path=model)
    way_out = way_out or default_engine(launcher.model_path)
    if way_in.startswith("batch:"):  # a batch keeps to --batch-concurrency and wants every answer
        router = dataclasses.replace(router, max_queue_depth=None)
    job = Job(way_in, way_out, launcher, frontend, engine, router, runtime or RuntimeConfig(), engine_arguments)
    check(job)
    for name in ("kv_gpu_cache_usage_weight", "kv_waiting_requests_weight"):
        if getattr(launcher, name) is not None:
            flag = name.replace("_", "-")
            log.warning("--%s has no effect: the kv mode's cost has no such term (docs/how-it-works.md)", flag)
    made = None if job.is_remote else make(job)
    if dry_run:
        print(*(made.calls if made is not None else [f"out={way_out}: no engine is made here"]), sep="\n")
        return
    if way_in.startswith("batch:") and is_answered(Path(way_in.removeprefix("batch:"))):
        return
    if way_out in ENGINES:
        check_installed(way_out)
    codes: list[int] = []

    async def work(stopping: asyncio.Event) -> None:
        codes.append(await carry_out(job, made, stopping))

    run(work)
    sys.exit(codes[0] if codes else 0)


def default_engine(model_path: str) -> str:
    """Return the engine for a model where none is named: llama.cpp for GGUF files, if it is installed; else mistral.rs."""
    has_llama = importlib.util.find_spec(ENGINES["llamacpp"].package) is not None
    name = "llamacpp" if model_path.endswith(".gguf") and has_llama else "mistralrs"
    log.info("using the default engine, out=%s", name)
    return name


def check(job: Job) -> None:
    """Refuse ways in and out that do not fit together.

    Raises:
        UsageError: and what would fit.
    """
    way_in, way_out, launcher = job.way_in, job.way_out, job.launcher
    is_known = (
        way_in in WAYS_IN[:4] or way_in.startswith("dyn://") or (way_in.startswith("batch:") and way_in != "batch:")
    )
    if not is_known:
        raise UsageError(f"invalid in= option {way_in!r}; expected one of {', '.join(WAYS_IN)}")
    kind, _, file = way_out.partition(":")
    if kind in FILES and not file:
        raise UsageError(f"out={way_out} needs a file: out={kind}:FILE")
    if way_out not in (*OURS, *ENGINES, "dyn") and kind not in FILES and not way_out.startswith("dyn://"):
        expected = ", ".join(("dyn", *OURS, *ENGINES, *(f"{name}:FILE" for name in FILES)))
        raise UsageError(f"invalid out= option {way_out!r}; expected one of {expected}")
    if way_in.startswith("dyn://") and job.is_remote:
        raise UsageError("cannot use an endpoint for both in and out: a worker needs an engine, as out=mocker")
    if way_in == "none" and job.is_remote:
        raise UsageError(f"in=none runs an engine without input; out={way_out} has none")
    if job.is_remote:
        _check_ingress(job)
    if job.arguments and way_out in (*OURS, "dyn"):
        raise UsageError(f"out={way_out} takes no arguments behind --")
    if way_out in OURS:
        _check_ours(job)
    if way_out == "echo_core" and not launcher.model_path:
        raise UsageError("out=echo_core needs a tokenizer: pass --model-path")
    if way_out == "echo_full" and not (launcher.model_path or launcher.model_name):
        raise UsageError("pass --model-name or --model-path so that we know which model to imitate")
    if job.frontend.http_workers != 1 and not (way_in == "http" and job.is_remote):
        raise UsageError("--http-workers is for in=http out=dyn: the engine of an all-in-one server is in its process")


def _check_ingress(job: Job) -> None:
    """Refuse a worker's flags where there is no worker."""
    default, default_run = LauncherConfig(), ModelRunConfig()
    for name in ("context_length", "model_config"):
        if getattr(job.launcher, name) != getattr(default, name):
            raise UsageError(f"--{name.replace('_', '-')} is for workers, not for the frontend (out=dyn)")
    for field in dataclasses.fields(ModelRunConfig):
        if getattr(job.model_run, field.name) != getattr(default_run, field.name):
            raise UsageError(f"--{field.name.replace('_', '-')} is for workers, not for the frontend (out=dyn)")


def _check_ours(job: Job) -> None:
    """Refuse the flags of engines that run models."""
    default = ModelRunConfig()
    used = ("kv_cache_block_size", "extra_engine_args") if job.way_out == "mocker" else ()
    for field in dataclasses.fields(ModelRunConfig):
        if field.name not in used and getattr(job.model_run, field.name) != getattr(default, field.name):
            name = field.name.replace("_", "-")
            raise UsageError(f"--{name} is for engines that run models; out={job.way_out} has no use for it")


if __name__ == "__main__":
    main()
