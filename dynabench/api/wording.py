"""The messages of the commands as Python's users read them: `--rate-scale 2` is `rate_scale=2`."""

import contextlib
import functools
import re
import typing
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Literal

from foundation import errors
from foundation.errors import UserError

FLAG = re.compile(
    r"(?P<command>`[^`]*`|\bNVIDIA Dynamo(?: --\S+ \S+)+|\b(?:vllm serve|trtllm-serve|python3? -m) .*|\b(?:dynabench|dynamo-run|pip) [^;,)]*)"
    r"|(?<![\w-])--vary (?P<varied>[\w.*]+)=(?P<values>[\w.]+(?:,[\w.]+)*)"
    r"|(?<![\w-])--(?P<no>no-)?(?P<name>[a-z][a-z0-9-]*)(?:[ =](?P<value>[\w.:]*\w|'[^']*'))?"
)
"""A command, which stays as it is; values to vary; or a flag, perhaps with a value."""
NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?")
OF_COMMANDS = ("deployment", "url", "workload", "out", "find", "vary")
"""Arguments that are no setting of their own, or have another type there."""
RENAMED = {"trace_block_size": "block_size", "to": "format"}
"""Options of commands that `Workload` has by another name."""


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Let a function raise UserError, with one line and in Python's words, for all that its user can mend."""
    try:
        with errors.plain_errors():
            yield
    except OSError as error:
        said = error.strerror or str(error)
        raise UserError(said if error.filename is None else f"{error.filename}: {said}") from error
    except UserError as error:
        error.args = (in_python(str(error)),)
        raise


def in_python(text: str) -> str:
    """Return a message with arguments of Python instead of flags; those of other programs stay, and so do whole commands."""
    return FLAG.sub(_argument, text)


def _argument(found: re.Match[str]) -> str:
    if found["command"]:
        return found[0]
    if found["varied"]:
        return f"vary={{{_literal(found['varied'])}: [{', '.join(map(_literal, found['values'].split(',')))}]}}"
    name, after = found["name"].replace("-", "_"), found[0].partition(found["name"])[2]
    name = RENAMED.get(name, name)
    choices = _settings().get(name)
    if choices is None:
        return found[0]
    if found["no"]:
        return f"{name}=False{after}"
    value = (found["value"] or "").strip("'")
    is_value = NUMBER.fullmatch(value) or value in choices or after.endswith("'")
    return f"{name}={_literal(value)}" if is_value else f"{name}{after}"


def _literal(value: str) -> str:
    return value if NUMBER.fullmatch(value) else f'"{value}"'


@functools.cache
def _settings() -> dict[str, set[str]]:
    """Return every setting of the API by name, with the words that it may be."""
    from dynabench.arm import ClientConfig
    from dynabench.benchmark.settings import BenchClientConfig, BenchConfig, SentConfig
    from dynabench.capacity.settings import PlanConfig
    from dynabench.deployment.description import Deployment
    from dynabench.deployment.paths import hints, sections, settings_of_pool
    from dynabench.experiment.settings import ExperimentConfig, SweepConfig
    from dynabench.rehearsal.settings import RehearseConfig
    from serving.worker.registry import ENGINES
    from workloads.pacing import LoadConfig
    from workloads.shape import ShapeConfig
    from workloads.synthesize import SynthConfig

    kinds: list[type] = [ExperimentConfig, SweepConfig, PlanConfig, ShapeConfig, LoadConfig, ClientConfig]
    kinds += [BenchConfig, BenchClientConfig, SentConfig, SynthConfig, RehearseConfig]
    found = {each.name: typing.get_type_hints(kind)[each.name] for kind in kinds for each in fields(kind)}
    for section, kind in {"": Deployment, **sections(Deployment)}.items():
        found |= hints(kind) | {f"{section}_{name}": hint for name, hint in hints(kind).items()}
    of_pools = {name: hint for engine in ("mocker", *ENGINES) for name, (_, hint) in settings_of_pool(engine).items()}
    of_pools["workers"] = int
    found |= of_pools | {f"{role}_{name}": hint for role in ("prefill", "decode") for name, hint in of_pools.items()}
    return {name: set(_words(hint)) for name, hint in found.items()} | {name: set() for name in OF_COMMANDS}


def _words(hint: Any) -> Iterator[str]:
    if typing.get_origin(hint) is Literal:
        yield from map(str, typing.get_args(hint))
        return
    for part in typing.get_args(hint):
        yield from _words(part)
