"""What a process ends with, and what that means."""

USAGE_ERROR = 2
"""Of a process whose settings are wrong, or that lacks something: it would end so again."""

INTERRUPTED = 130
"""Of what was asked to end before it was done."""

UNREAD = 141
"""Of a command whose output nobody reads."""

EXIT_CODES = {
    0: "done",
    1: "done, but what was found is not good enough: each command says when",
    USAGE_ERROR: "bad input, a file or server that cannot be reached, or nowhere to write",
    INTERRUPTED: "interrupted by Ctrl-C or another signal",
    UNREAD: "nobody reads the output",
}
