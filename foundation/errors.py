"""Errors that a command line prints as one line."""

import contextlib
from collections.abc import Iterator


class UserError(Exception):
    """Something the user can fix; the message says what and how."""


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Print one line for a setting that is refused once settings are combined."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error
