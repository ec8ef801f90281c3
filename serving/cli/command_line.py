"""What every command line needs: standard streams, groups of flags, programs with help, and one-line error messages."""

import os
import sys
import typing
from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import CoercionError, Group, Parameter, UnusedCliTokensError

from foundation.extras import DISTRIBUTION
from foundation.settings import expected, kinds
from foundation.text import one_line
from serving.cli.help import HELP_FLAGS, CommandLine
from serving.cli.questions import QUESTIONS

MAX_REASON = 4000
"""In characters: enough for a list of all settings."""

SIZES = {"COLUMNS": 20, "LINES": 1}
"""The smallest terminals: rich cannot write to one of no width, and help in a few columns takes minutes."""

Verbosity = Annotated[
    int, Parameter(name=["-v", "--verbose", "--verbosity"], count=True, help="-v: debug, -vv: everything.")
]


def flat(title: str, order: int) -> Parameter:
    """Turn the fields of a dataclass into options of a command, in one group of its help."""
    return Parameter(name="*", group=Group(title, sort_key=order), negative_iterable=(), consume_multiple=False)


def plain_default(value: Any) -> str | None:
    """Show a default as it would be typed; leave out one that only means "not set"."""
    if value is None or value is False or value in ("", ()):
        return None
    return ", ".join(map(str, value)) if isinstance(value, tuple) else "on" if value is True else str(value)


PLAIN_DEFAULTS = Parameter(show_default=plain_default)
"""For an app: its help shows no Python values."""


def begin() -> None:
    """Make a process fit for a command line: its standard streams are open, and what it is told of the terminal is a size."""
    _open_standard_streams()
    for name, least in SIZES.items():
        given = os.environ.get(name, "")
        if not (given.isdecimal() and int(given) >= least):
            os.environ.pop(name, None)


def _open_standard_streams() -> None:
    """Open /dev/null for each closed standard stream: else a socket would get its number, and children would write to it."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 (a file number, never closed)


def version() -> str:
    """Return the installed version."""
    from importlib import metadata  # takes a tenth of the start-up time

    return metadata.version(DISTRIBUTION)


def program(name: str, about: str, **options: Any) -> CommandLine:
    """Return the command line of one of serving's programs."""
    return CommandLine(
        name=name,
        help=about,
        version=version,
        help_flags=HELP_FLAGS,
        default_parameter=PLAIN_DEFAULTS,
        questions=QUESTIONS,
        **options,
    )


def settings_named(words: Sequence[str]) -> frozenset[str]:
    """Return the names of the settings that a command line gives, at whatever values."""
    flags = [word.partition("=")[0].removeprefix("--") for word in words if word.startswith("--")]
    return frozenset(flag.removeprefix("no-").replace("-", "_") for flag in flags)


def reason(error: Exception) -> str:
    """Return what was wrong with the input, in one line."""
    if isinstance(error, CoercionError) and error.argument is not None and error.token is not None:
        hint, token = error.argument.field_info.annotation, error.token
        if typing.get_origin(hint) is tuple:  # the flag may be repeated, and each value is of this type
            hint = typing.get_args(hint)[0]
        if kinds(hint) <= {bool, int, float, type(None)}:
            return one_line(
                f"{token.keyword or error.argument.name} is {token.value!r}; expected {expected(hint, token.value)}"
            )
    if isinstance(error, UnusedCliTokensError):
        return one_line(f"{' '.join(error.unused_tokens or ())}: there is no place for this; options begin with --")
    cause = error.__cause__
    return one_line(cause if isinstance(cause, ValueError) else error, MAX_REASON)
