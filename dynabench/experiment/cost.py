"""What simulations will cost, about: processes are started only where they save more than they take."""

from foundation.processes import num_cores

REQUEST_S = 1e-4
"""Processor time of a simulated request, about: 40 us where little happens, 400 us among a thousand workers."""
WORTH_S = 0.25
"""The work for which a further process is started. It takes about 0.05 s: a fork, what it copies, and its results."""


def num_processes(jobs: int, num_requests: int) -> int:
    """Return how many processes simulate runs: as many as asked for or, with 0, one for each core that has enough to do.

    Args:
        jobs: how many were asked for.
        num_requests: of all runs together.
    """
    worth = int(num_requests * REQUEST_S / WORTH_S)
    return jobs or max(min(num_cores(), worth), 1)
