"""Errors that a command line prints as one line."""


class UserError(Exception):
    """Something the user can fix; the message says what and how."""
