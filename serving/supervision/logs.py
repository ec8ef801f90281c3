"""Logging: levels from DYN_LOG, in RUST_LOG's syntax, or from -v and -vv."""

import logging
import os
import sys

LEVELS = {
    "error": logging.ERROR,
    "warn": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
    "trace": logging.DEBUG,
    "off": logging.CRITICAL + 1,
}
OWN = ("serving", "dynabench", "mocker")


class LogError(ValueError):
    """A filter that cannot be read."""


def set_up(verbosity: int = 0, *, default: str = "info") -> None:
    """Log to standard error: `-v` debug, `-vv` everything; otherwise the levels in DYN_LOG, or the default.

    Raises:
        LogError: DYN_LOG is not of the form `level` or `target=level,...`, or there are too many -v.
    """
    if verbosity > 2:
        raise LogError("expected at most -vv")
    text = {0: os.environ.get("DYN_LOG", default), 1: "debug", 2: "trace"}[verbosity]
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.WARNING,
        format="%(asctime)s.%(msecs)03d %(levelname)-5s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )
    logging.addLevelName(logging.WARNING, "WARN")
    for part in filter(None, (part.strip() for part in text.split(","))):
        target, equals, level = part.rpartition("=")
        if level.lower() not in LEVELS:
            raise LogError(f"DYN_LOG={text!r}: {level!r} is not a level; expected one of {', '.join(LEVELS)}")
        for name in [target.replace("::", ".")] if equals else OWN:
            logging.getLogger(name).setLevel(LEVELS[level.lower()])
    if verbosity == 2:
        logging.getLogger().setLevel(logging.DEBUG)
