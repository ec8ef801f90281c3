"""Logging: levels from DYN_LOG, in RUST_LOG's syntax, or from -v and -vv."""

import difflib
import logging
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder

from foundation.log_levels import TRACE

LEVELS = {
    "error": logging.ERROR,
    "warn": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
    "trace": TRACE,
    "off": logging.CRITICAL + 1,
}
OWN = ("serving", "dynabench", "mocker")
ALL = ("", *OWN)
VARIABLE = "DYN_LOG"


class LogError(ValueError):
    """A filter that cannot be read."""


def set_up(verbosity: int = 0, *, default: str = "info") -> None:
    """Log to standard error: `-v` debug, `-vv` trace; otherwise the levels in DYN_LOG, or the default.

    Processes that this one starts log as much.

    Raises:
        LogError: DYN_LOG is not of the form `level`, `target` or `target=level`,..., or there are too many -v.
    """
    os.environ |= variable_of(verbosity)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.WARNING,
        format="%(asctime)s.%(msecs)03d %(levelname)-5s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )
    logging.addLevelName(logging.WARNING, "WARN")
    logging.addLevelName(TRACE, "TRACE")
    for target, level in levels(os.environ.get(VARIABLE, default)).items():
        logging.getLogger(target).setLevel(level)


def variable_of(verbosity: int) -> dict[str, str]:
    """Return the environment in which processes log as much as -v or -vv says.

    Raises:
        LogError: there are too many -v.
    """
    if verbosity > 2:
        raise LogError("expected at most -vv")
    return {VARIABLE: ("debug", "trace")[verbosity - 1]} if verbosity else {}


def levels(text: str) -> dict[str, int]:
    """Return the level of each logger that a filter names; a level alone is that of our own, and trace that of all.

    Raises:
        LogError: a part is neither a level, nor a module, nor `target=level`.
    """
    found: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        target, equals, level = part.rpartition("=")
        known = LEVELS.get(level.strip().lower())
        if known is not None and not equals:
            found |= dict.fromkeys(ALL if known == TRACE else OWN, known)
        elif known is not None:
            found[_name(target)] = known
        elif not equals and _is_module(_name(part)):
            found[_name(part)] = TRACE
        else:
            modules = "" if equals else ", or a module such as serving.routing"
            close = difflib.get_close_matches(level.strip().lower(), LEVELS, n=1, cutoff=0.7)
            raise LogError(
                f"{VARIABLE}={text!r}: {level!r} is not a level; expected one of {', '.join(LEVELS)}{modules}"
                + "".join(f"; did you mean {name}?" for name in close)
            )
    return found


def _name(target: str) -> str:
    return target.strip().replace("::", ".")


def _is_module(name: str) -> bool:
    """Return whether there is such a module, without importing anything."""
    places = None
    spec: ModuleSpec | None = None
    for number, part in enumerate(name.split("."), 1):
        if number > 1 and not places:
            return False
        spec = PathFinder.find_spec(part, places) if part else None
        places = None if spec is None else spec.submodule_search_locations
    return spec is not None
