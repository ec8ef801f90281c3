"""How many files, and so connections, this process may have open."""

import resource


def room_for(wanted: int) -> int:
    """Raise this process's soft limit so that it can open as many files, as far as the hard limit allows; return the limit.

    Processes that it starts afterwards have the same limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if limit > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return max(limit, soft)
