"""What every command line needs before anything else: standard streams, and one line for a wrong input."""

import os
import sys


def open_standard_streams() -> None:
    """Put /dev/null where a standard stream was closed: a socket of ours would get its number, and children take it for it."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 (a number, for good)


def one_line(error: Exception) -> str:
    """Return what was wrong with the input in one line."""
    cause = error.__cause__
    return " ".join(str(cause if isinstance(cause, ValueError) else error).split())
