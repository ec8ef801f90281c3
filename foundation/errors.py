"""What a command line prints as one line."""


class UserError(Exception):
    """Something the user can mend; the message says what and how."""
