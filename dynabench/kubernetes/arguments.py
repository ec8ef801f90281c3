"""Command lines for the processes in containers, which get no settings from a parent process."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from dynabench.kubernetes.contract import ADDRESS
from serving.runtime.config import RuntimeConfig
from serving.supervision.group import Program


def arguments_of(program: Program, files: Mapping[str, str]) -> list[str]:
    """Return the Python arguments of a process.

    Discovery is configured by the environment, and secrets come from a Secret.

    Args:
        program: the program and its settings; the engine's own arguments come last, as a list.
        files: paths in the container of the files that the settings name.
    """
    words = list(program.arguments)
    for settings in program.settings:
        if isinstance(settings, list):
            words += ["--", *map(_escaped, settings)] if settings else []
        elif not isinstance(settings, RuntimeConfig):
            words += _flags(settings, files)
    return words


def _flags(settings: Any, files: Mapping[str, str]) -> Iterator[str]:
    default = type(settings)()
    for part in dataclasses.fields(settings):
        value = getattr(settings, part.name)
        if value == getattr(default, part.name) or not part.repr:
            continue
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _flags(value, files)
            continue
        flag = part.name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        else:
            yield f"--{flag}={_escaped(files.get(str(value), _text(value)))}"


def _text(value: Any) -> str:
    match value:
        case None:
            return "none"
        case dict():
            return json.dumps(value, sort_keys=True)
        case float():
            return repr(value)
    return str(value)


def _escaped(text: str) -> str:
    """Escape a text in which Kubernetes expands only the pod's address."""
    return literal(text).replace(literal(ADDRESS), ADDRESS)


def literal(text: str) -> str:
    """Escape a text in which Kubernetes expands nothing."""
    return text.replace("$", "$$")
