"""The settings of a process as its command line, for containers: no parent hands them over there."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from dynabench.kubernetes.contract import ADDRESS
from serving.runtime.config import RuntimeConfig
from serving.supervision.group import Program


def arguments_of(program: Program, files: Mapping[str, str]) -> list[str]:
    """Return the arguments of Python for a process.

    How it finds others is left to its environment, and secrets are to a Secret.

    Args:
        program: with its settings, and the engine's own arguments as a list behind them.
        files: where files that settings name are in the container.
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
