"""Exit codes, and what they mean."""

USAGE_ERROR = 2
"""The settings are wrong, or something is missing; running the process again would not help."""

INTERRUPTED = 130
"""The process was asked to end before it was done."""

UNREAD = 141
"""Nobody reads the command's output."""

EXIT_CODES = {
    0: "done",
    1: "done, but the result is not good enough; each command says when",
    USAGE_ERROR: "bad input, an unreachable file or server, or nowhere to write",
    INTERRUPTED: "interrupted by Ctrl-C or another signal",
    UNREAD: "nobody reads the output",
}
