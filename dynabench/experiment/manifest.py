"""The contents of experiment.json: everything needed to run an experiment again and to understand it."""

import datetime
import platform
import shlex
import sys
from collections.abc import Collection, Sequence
from contextvars import ContextVar
from dataclasses import asdict, fields
from importlib import metadata
from itertools import pairwise
from typing import Any

import msgspec

from dynabench.additions import masked_header
from dynabench.apis import WHOLE, Way
from dynabench.arm import Arm, ClientConfig, Settings
from dynabench.deployment.description import OWN, Deployment, Pool
from dynabench.deployment.file import as_plain, plain_pool
from dynabench.experiment.head import engine_error, head_of
from dynabench.experiment.no_effect import no_effect
from dynabench.experiment.settings import ExperimentConfig
from dynabench.experiment.source import Given, named
from dynabench.experiment.step_times import describe_step_times
from foundation.extras import DISTRIBUTION
from foundation.text import listed
from mocker import engine
from reports import folder
from reports.record.records import Record
from reports.summary import WAYS
from serving.frontend.config import FrontendConfig
from serving.router.elsewhere import name_elsewhere
from serving.runtime.config import RuntimeConfig, masked
from serving.worker.config import read_arguments
from serving.worker.registry import ENGINES
from workloads import Workload
from workloads.describe import at_once, ends
from workloads.workload import extra_fields


def manifest_of(
    clock: str,
    given: Given,
    workload: Workload,
    experiment: ExperimentConfig,
    settings: Settings,
    arms: Sequence[Arm],
    runs: Sequence[Record],
) -> dict[str, Any]:
    """Return everything needed to run an experiment again and to understand it."""
    deployment = settings.deployment
    deployments = [arm.settings.deployment for arm in arms] or [deployment]
    loads = [arm.settings.load for arm in arms] or [settings.load]
    return {
        "schema": folder.SCHEMA,
        "title": f"{workload.name}: {_versus([arm.name for arm in arms])}",
        "subtitle": subtitle_of(clock, workload, experiment, settings, arms),
        "step_times": None if settings.url else describe_step_times(deployments),
        "head": head_of(workload, deployments, loads, settings.url) | no_effect(clock, workload, deployments),
        "command": _command(),
        "clock": clock,
        "created": now().isoformat(timespec="seconds"),
        "workload": {
            "file": named(given),
            "name": workload.name,
            "requests": len(workload),
            "ends": ends(workload),
            "notes": list(workload.notes),
        },
        "experiment": asdict(experiment) | {"out": str(experiment.out) if experiment.out else None},
        "arms": {arm.name: arm.plain_changes for arm in arms},
        "elsewhere": _elsewhere(settings, arms),
        "engine_errors": {} if settings.url else _engine_errors(arms),
        "smallest_difference": experiment.smallest_difference,
        "limits": [str(limit) for limit in experiment.limits],
        "workers": {arm.name: arm.settings.deployment.num_workers for arm in arms},
        "deployment": as_plain(deployment),
        "engine": _engine(deployment),
        "router": asdict(deployment.router),
        "shape": asdict(settings.shape),
        "load": asdict(settings.load),
        "client": settings.client and settings.client.shown,
        "versions": {"dynabench": metadata.version(DISTRIBUTION)}
        | {name: metadata.version(name) for name in ("numpy", "simpy", "aiohttp", "fastapi")}
        | {"python": platform.python_version(), "cores": "compiled" if is_compiled() else "interpreted"},
        "runs": folder.facts_of(runs),
    }


def _elsewhere(settings: Settings, arms: Sequence[Arm]) -> dict[str, str | None]:
    """Return what other routers call the router mode of each arm; nothing if arms do not differ by it."""
    if settings.url or len({str(arm.changes.get("router_mode")) for arm in arms}) < 2:
        return {}
    return {
        arm.name: name_elsewhere(str(arm.changes["router_mode"]), arm.settings.deployment.router)
        for arm in arms
        if not arm.is_repeated
    }


def _engine_errors(arms: Sequence[Arm]) -> dict[str, Any]:
    """Return how far the times of each arm's simulated engine are off; nothing if all have the same engine."""
    found = {arm.name: error for arm in arms if (error := engine_error(arm.settings.deployment))}
    return msgspec.to_builtins(found) if len({error.engine for error in found.values()}) > 1 else {}


def _engine(deployment: Deployment) -> dict[str, Any]:
    """Return a description of the engine of the only pool, or of the engines by pool name."""
    described = {pool.name: described_engine(pool) for pool in deployment.pools}
    return described if len(described) > 1 else described[deployment.pools[0].name]


def described_engine(pool: Pool) -> dict[str, Any]:
    """Return a description of an engine: its settings, or its name, its version here, its model and its arguments."""
    if not pool.runs_model:
        return plain_pool(pool)
    package = ENGINES[pool.engine].package
    distributions = metadata.packages_distributions().get(package, [])
    version = metadata.version(distributions[0]) if distributions else "of unknown version"
    extra = pool.run.extra_engine_args
    arguments = ({} if extra is None else read_arguments(extra)) | pool.engine_args
    return {"name": pool.engine, "version": version, "model": pool.served_name, "arguments": arguments}


def is_compiled() -> bool:
    """Return whether the engine core was compiled (DYNABENCH_COMPILE=1 when it was installed)."""
    return not str(engine.__file__).endswith(".py")


def _command() -> str:
    """Return the command line without the passwords and keys in it, or the call in Python."""
    if (call := CALL.get()) is not None:
        return call
    words = []
    for before, word in pairwise(sys.argv):
        flag, equals, value = word.partition("=")
        if equals and flag in _secret_flags():
            words.append(f"{flag}=***")
        elif equals and flag == HEADER:
            words.append(f"{flag}={masked_header(value)}")
        elif before == HEADER:
            words.append(masked_header(word))
        elif equals and flag in SERVERS:
            words.append(f"{flag}={masked(value)}")
        elif before in _secret_flags():
            words.append("***")
        else:
            words.append(masked(word) if before in SERVERS or "://" in word else word)
    return shlex.join(["dynabench", *words])


CALL: ContextVar[str | None] = ContextVar("call", default=None)
"""What Python's user called, if that is where an experiment comes from."""
HEADER = "--header"
SERVERS = ("--url", "--metrics-url", "--proxy", "--etcd-endpoints", "--nats-server")
"""Flags whose values may hold a password before an @."""


def _secret_flags() -> set[str]:
    """Return the flags whose whole value is secret: the settings that no `repr` shows."""
    parts = (part for kind in (FrontendConfig, RuntimeConfig) for part in fields(kind))
    return {f"--{part.name.replace('_', '-')}" for part in parts if not part.repr} - set(SERVERS)


def _versus(names: list[str]) -> str:
    return " vs ".join(names) if len(names) <= 4 else f"{len(names)} arms"


def subtitle_of(
    clock: str, workload: Workload, experiment: ExperimentConfig, settings: Settings, arms: Sequence[Arm]
) -> str:
    """Describe an experiment in a line."""
    how = "in virtual time" if clock == "virtual" else "over HTTP on the wall clock"
    loads = [arm.settings.load for arm in arms] or [settings.load]
    notes = [*workload.notes, *([] if all(load.is_closed for load in loads) else at_once(workload))]
    what = _deployed([arm.settings.deployment for arm in arms] or [settings.deployment])
    if settings.client is not None:
        notes += unsent(workload, {arm.settings.client.way for arm in arms if arm.settings.client is not None})
        what = (masked(settings.url) if settings.url else what) + _additions(settings.client)
    closed = f", {settings.load.kept} at a time" * settings.load.is_closed
    return (
        f"{_counted(len(workload), 'request')} on {what}{closed}, {how}; {_ends(workload, arms)}; "
        f"{_counted(experiment.repeats, 'run')} per arm, seed {experiment.seed}{''.join(f'; {note}' for note in notes)}"
    )


def unsent(workload: Workload, ways: Collection[Way]) -> list[str]:
    """Say which words of the workload's prompts and which fields of its bodies are left out in one of these ways."""
    said = [_wordless(workload, way, f" with {way}" * (len(ways) > 1)) for way in sorted(ways, key=str)]
    return [*filter(None, said), *_left_out(workload, ways)]


def _wordless(workload: Workload, way: Way, where: str) -> str:
    """Say which prompts are sent without their own words, nothing if all have theirs or have none."""
    contents = [
        request.content for request in workload if request.content is not None and not way.sends_content(request)
    ]
    num_chats = sum(isinstance(content, list) for content in contents)
    if not contents:
        return ""
    counts = {"chat": num_chats, "text": len(contents) - num_chats}
    what = listed([_counted(count, noun) for noun, count in counts.items() if count])
    instead = "token ids" if way.prompts == "tokens" else "other words"
    sent_by = "chat" if num_chats == len(contents) else "text"
    are = "are" if len(contents) > 1 else "is"
    return f"{what} of {workload.name} {are} sent as {instead} of the same length{where}; --prompts {sent_by} sends their words"


def _left_out(workload: Workload, ways: Collection[Way]) -> list[str]:
    left = {
        way: extra_fields(request for request in workload if not way.sends_fields(request))
        for way in sorted(ways, key=str)
    }
    found = {way: names for way, names in left.items() if names}
    return [
        f"left out of the bodies{f' with {way}' * (len(ways) > 1)}: "
        + ", ".join(f"{name} ({_counted(count, 'request')})" for name, count in names.items())
        + _why_unsent(way)
        for way, names in found.items()
    ]


def _why_unsent(way: Way) -> str:
    if way.api in WHOLE:
        return f", because api {way.api} generates nothing"
    if way.prompts == "tokens":
        return ", because prompts are sent as token ids (--prompts chat sends them)"
    return ", with the texts"


def _additions(client: ClientConfig) -> str:
    """Say what the user added to requests, and whether any certificate was accepted."""
    facts = {
        f"{client.way.api} API": client.way.api not in (None, "completions", "chat"),
        "any certificate accepted": client.insecure,
        "through a proxy": client.proxy is not None,
        f"headers {', '.join(client.headers)}": client.header,
        f"{client.extra_body} in each body": client.extra_body,
    }
    said = "; ".join(fact for fact, is_so in facts.items() if is_so)
    return f" ({said})" if said else ""


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


AT_LENGTHS = " (simulated ones at the workload's lengths)"


def _ends(workload: Workload, arms: Sequence[Arm]) -> str:
    """Describe how answers end."""
    if len({arm.settings.shape.ends for arm in arms}) > 1:
        return "how answers end is varied"
    counts = ends(workload)
    ways = [f"by {WAYS.get(way, way)}" + AT_LENGTHS * (way == "stop") for way in counts]
    if len(ways) == 1:
        return f"answers end {ways[0]}"
    return "answers end " + " or ".join(f"{way}: {count:,}" for way, count in zip(ways, counts.values(), strict=True))


def _deployed(deployments: Sequence[Deployment]) -> str:
    """Describe in a few words what the arms run on."""
    first, counts = deployments[0], {deployment.num_workers for deployment in deployments}
    if len(counts) > 1:
        return f"{min(counts)} to {max(counts)} engines"
    pools = {tuple((pool.name, pool.replicas) for pool in deployment.pools) for deployment in deployments}
    return _workers(first) if len(pools) == 1 else f"{first.num_workers} engines, in pools of several sizes"


def _workers(deployment: Deployment) -> str:
    """Describe the deployment in a few words."""
    if len(deployment.pools) > 1:
        parts = " and ".join(f"{pool.replicas} in {pool.name}" for pool in deployment.pools)
        return f"{deployment.num_workers} engines ({parts})"
    (pool,) = deployment.pools
    if pool.engine in OWN:
        return f"{_counted(pool.replicas, 'worker')} with {pool.engine_name}"
    if not pool.runs_model:
        return _counted(pool.replicas, "simulated engine")
    facts = described_engine(pool)
    kind = f"{facts['name']} {facts['version']} worker"
    return f"{_counted(pool.replicas, kind)} with {facts['model']}"


def now() -> datetime.datetime:
    """Return the local time."""
    return datetime.datetime.now().astimezone()
