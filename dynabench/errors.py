"""What the command line tells in one line."""


class UserError(Exception):
    """Something the user can mend; the message says what and how."""
