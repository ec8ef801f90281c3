"""What simulations will cost, about: processes are started only where they save more than they take."""

from foundation.processes import num_cores

REQUEST_S = 1.5e-4
"""Processor time of a simulated request, about: 40 us where little happens, 400 us among a thousand workers."""
WORTH_S = 0.25
"""The work for which a further process is started. It takes about 0.05 s: a fork, what it copies, and its results."""


def expected_s(num_requests: int) -> float:
    """Return how long simulating so many requests takes, if nothing else is known."""
    return num_requests * REQUEST_S


def num_processes(jobs: int, work_s: float) -> int:
    """Return how many processes simulate: as many as were asked for or, with 0, one for each core that has enough to do.

    Args:
        jobs: how many were asked for.
        work_s: how long all simulations together are expected to take.
    """
    return jobs or max(min(num_cores(), int(work_s / WORTH_S)), 1)
