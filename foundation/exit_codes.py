"""Exit codes, and what they mean."""

DONE = 0

NOT_GOOD = 1
"""The results are complete and written, but not good enough."""

USAGE_ERROR = 2
"""The settings are wrong, or something is missing; running the process again would not help."""

INTERRUPTED = 130
"""The process was asked to end before it was done."""

UNREAD = 141
"""Nobody reads the command's output."""

EXIT_CODES = {
    DONE: "done",
    NOT_GOOD: "done, but the result is not good enough, for example because a gate failed; each command says when",
    USAGE_ERROR: "bad input, an unreachable file or server, or nowhere to write",
    INTERRUPTED: "interrupted by Ctrl-C or another signal",
    UNREAD: "nobody reads the output",
}
