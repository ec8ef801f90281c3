"""A job for `dynamo-run`: check it as a whole, and make its engine."""

import dataclasses
import importlib.metadata
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from foundation.identity import Identity, files_named
from foundation.settings import CheckedSettings, Count, changed
from serving.cli.commands import engine_settings
from serving.cli.ways import (
    BatchInput,
    EchoOutput,
    EndpointInput,
    EngineOutput,
    HttpInput,
    MockerOutput,
    NoInput,
    OwnFileOutput,
    RemoteOutput,
    ServerOutput,
    StdinInput,
    TextInput,
    UsageError,
    WayIn,
    WayOut,
)
from serving.engines.echo import Echo
from serving.engines.mock.engine import (
    AnswerConfig,
    FamilyConfig,
    Mocker,
    SimulatedConfig,
    TimingConfig,
    with_block_size,
)
from serving.engines.openai.engine import OpenAiServer
from serving.engines.own import OwnEngine
from serving.frontend.config import FrontendConfig
from serving.life import DisaggregationConfig
from serving.life.lease import LeaseConfig
from serving.model.card import Role
from serving.router import RouterConfig
from serving.runtime.config import RuntimeConfig, masked
from serving.transfer.config import OF_TIERS, TransferRunConfig
from serving.worker.config import ModelConfig, ModelRunConfig, WorkerConfig, flags_to_arguments
from serving.worker.engine import Engine
from serving.worker.make import make_engine, refuse_role
from serving.worker.registry import ENGINES

SECRET = re.compile(r"--[\w-]*(key|token|secret|password)")
"""Flags of engines whose value is not written anywhere."""

ALONE = "but this is one process; start a worker with in=dyn:// and a frontend with in=http out=dyn instead"
"""Why settings of the network have no effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskConfig(CheckedSettings):
    """Settings that only `dynamo-run` has."""

    role: Role = "aggregated"
    """in=dyn://: what the worker does with a request: everything (aggregated), only the prompt (prefill), or only the answer
    (decode)."""

    kv_gpu_cache_usage_weight: float | None = None
    """Accepted because guides before August 2025 use it; has no effect."""

    kv_waiting_requests_weight: float | None = None
    """Accepted because guides before August 2025 use it; has no effect."""

    temperature: Annotated[float, Meta(ge=0, le=2)] = 0.7
    """in=text, stdin, batch: sampling temperature of the answers."""

    max_tokens: Count | None = None
    """in=text, stdin, batch: maximum tokens of an answer (default: what fits in the context)."""

    batch_concurrency: Count = 64
    """in=batch: number of requests in progress at a time."""


@dataclass(frozen=True)
class Job:
    """Everything that was asked for."""

    way_in: WayIn
    way_out: WayOut
    model: ModelConfig
    launcher: AskConfig
    frontend: FrontendConfig
    model_run: ModelRunConfig
    answers: AnswerConfig
    router: RouterConfig
    disaggregation: DisaggregationConfig
    transfer: TransferRunConfig
    runtime: RuntimeConfig
    arguments: Sequence[str]

    @property
    def is_remote(self) -> bool:
        """Whether the engines are workers on the network."""
        return isinstance(self.way_out, RemoteOutput)

    @property
    def is_alone(self) -> bool:
        """Whether this one process does everything, so that there is nobody to find."""
        return not self.is_remote and not isinstance(self.way_in, EndpointInput)

    @property
    def asks_itself(self) -> bool:
        """Whether this process asks the questions."""
        return isinstance(self.way_in, TextInput | StdinInput | BatchInput)

    @property
    def worker(self) -> WorkerConfig:
        """Settings of the worker that runs the engine."""
        return WorkerConfig(
            **dataclasses.asdict(self.model),
            endpoint=self.way_in.address if isinstance(self.way_in, EndpointInput) else "dyn://",
            role=self.launcher.role,
            migration_limit=self.frontend.migration_limit or 0,
            drain_s=self.frontend.drain_s,
        )

    @property
    def default_name(self) -> str:
        """The name of a model that has no path or name."""
        return Path(self.way_out.file).stem if isinstance(self.way_out, OwnFileOutput) else "mock"


def make_job(job: Job) -> Engine | None:
    """Make the engine of a job, if it has one; nothing is loaded yet.

    Raises:
        ValueError: the settings do not fit the engine.
    """
    match job.way_out:
        case RemoteOutput():
            return None
        case MockerOutput():
            return Mocker(
                job.worker,
                *_simulated(job.model_run),
                answers=job.answers,
                transfer=job.transfer,
                lease=job.disaggregation,
            )
        case EchoOutput(kind):
            refuse_role(job.worker, f"out={job.way_out}")
            return Echo(kind)
        case OwnFileOutput(kind, file):
            refuse_role(job.worker, f"out={job.way_out}")
            port = job.frontend.http_port
            own = OwnEngine(kind, file, job.worker, job.model_run, job.arguments, http_port=port)
            if kind == "pytok" and not job.worker.model_path:
                raise ValueError(f"out={job.way_out} needs a tokenizer: pass --model-path")
            return own
        case ServerOutput(url):
            arguments = flags_to_arguments(job.arguments)
            return OpenAiServer(url, job.worker, job.model_run, arguments, lease=job.disaggregation)
        case EngineOutput(name):
            return make_engine(name, job.worker, job.model_run, job.arguments)


def _simulated(model_run: ModelRunConfig) -> tuple[FamilyConfig, TimingConfig]:
    given = SimulatedConfig()
    if model_run.extra_engine_args is not None:
        given = engine_settings(model_run.extra_engine_args, given)
    given.refuse_idle()
    size = model_run.kv_cache_block_size
    return given.config if size is None else with_block_size(given.config, size), given.timing


def job_identity(job: Job) -> Identity:
    """Return what the answers to a batch depend on: the engine and its version, the model, and their settings."""
    ours = isinstance(job.way_out, MockerOutput | EchoOutput)
    way_out = job.way_out
    out = {"out": masked(str(way_out))}
    if isinstance(way_out, OwnFileOutput):
        out = {"out": way_out.kind, "file": way_out.file}
    settings = {
        **out,
        "version": _version(job.way_out),
        **{f"--{name.replace('_', '-')}": value for name, value in _settings(job)},
        "arguments": list(_without_secrets(job.arguments)),
    }
    named = [word.rpartition("=")[2] for word in job.arguments]
    return Identity.of(settings, files=files_named(named), packages=("serving", "mocker") if ours else ())


def _settings(job: Job) -> Iterator[tuple[str, object]]:
    """Yield the settings that may change an answer."""
    for part in (job.model, job.model_run, job.answers):
        yield from dataclasses.asdict(part).items()
    yield from [(name, getattr(job.launcher, name)) for name in ("temperature", "max_tokens")]


def _without_secrets(words: Sequence[str]) -> Iterator[str]:
    """Yield an engine's arguments, without the passwords and keys."""
    before = ""
    for word in words:
        flag, equals, _ = word.partition("=")
        is_secret = SECRET.fullmatch(flag if equals else before)
        yield (f"{flag}=***" if equals else "***") if is_secret else word
        before = word


def _version(way_out: WayOut) -> str | None:
    """Return the version of an engine's package; None if it is ours, or not known here."""
    package = ENGINES[way_out.name].package if isinstance(way_out, EngineOutput) else ""
    distributions = importlib.metadata.packages_distributions().get(package, []) if package else []
    return importlib.metadata.version(distributions[0]) if distributions else None


def check_job(job: Job) -> None:
    """Check that the settings fit together.

    Raises:
        UsageError: they do not.
    """
    if job.launcher.role != "aggregated" and not isinstance(job.way_in, EndpointInput | NoInput):
        raise UsageError(f"--role {job.launcher.role} is for workers on the network (in=dyn://)")
    is_apart = job.launcher.role != "aggregated"
    if not (isinstance(job.way_out, MockerOutput) and is_apart):
        for name in changed(job.transfer):
            if isinstance(job.way_out, MockerOutput) and name in OF_TIERS:
                continue
            raise UsageError(f"--{name.replace('_', '-')} is for out=mocker with --role prefill or decode")
    if not (isinstance(job.way_out, MockerOutput | ServerOutput) and is_apart):
        for field in dataclasses.fields(LeaseConfig):
            if field.name in changed(job.disaggregation):
                raise UsageError(
                    f"--{field.name.replace('_', '-')} is for out=mocker and out=http://... with --role prefill or decode"
                )
    if not isinstance(job.way_out, MockerOutput):
        for name in changed(job.answers):
            raise UsageError(f"--{name.replace('_', '-')} is for out=mocker")
    if job.is_alone:
        for name in changed(job.runtime):
            raise UsageError(f"--{name.replace('_', '-')} is for processes that find each other, {ALONE}")
    if job.arguments and isinstance(job.way_out, RemoteOutput | MockerOutput | EchoOutput):
        raise UsageError(f"out={job.way_out} takes no arguments after --")
    match job.way_out:
        case RemoteOutput():
            _check_frontend(job)
        case MockerOutput():
            _refuse_model_run(job, "kv_cache_block_size", "extra_engine_args")
        case EchoOutput(kind):
            _refuse_model_run(job)
            if kind == "core" and not job.model.model_path:
                raise UsageError("out=echo_core needs a tokenizer: pass --model-path; out=mocker needs none")
            if kind == "full" and not (job.model.model_path or job.model.model_name):
                raise UsageError("pass --model-name or --model-path so that we know which model to imitate")
    if job.frontend.http_workers != 1 and not (isinstance(job.way_in, HttpInput) and job.is_remote):
        raise UsageError("--http-workers is for in=http out=dyn: an all-in-one server is a single process")


def _check_frontend(job: Job) -> None:
    """Reject settings for workers if the job has none."""
    if isinstance(job.way_in, EndpointInput):
        raise UsageError("cannot use an endpoint for both in and out: a worker needs an engine such as out=mocker")
    if isinstance(job.way_in, NoInput):
        raise UsageError(f"in=none runs an engine without input; out={job.way_out} has no engine")
    given = [name for name in changed(job.model) if name not in ("model_path", "model_name")]
    for name in (*given, *changed(job.model_run)):
        raise UsageError(f"--{name.replace('_', '-')} is for workers, not for the frontend (out=dyn)")


def _refuse_model_run(job: Job, *used: str) -> None:
    """Reject flags for engines that run models, except for those used."""
    for name in changed(job.model_run):
        if name not in used:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} is for engines that run models; out={job.way_out} does not use it")
