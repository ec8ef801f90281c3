"""Prompts that are computed whole: which of them waited because decodes had taken the room of a step?"""

import numpy as np
import numpy.typing as npt

from reports.record.records import Requests


def num_held(requests: Requests, max_num_tokens: int) -> int:
    """Return how many prompts waited while more requests were decoding than they leave room for in a step.

    A prompt of p tokens that are not cached leaves room for `max_num_tokens - p` decodes, and starts only beside at most as many.
    """
    known = ~(requests.worker.mask | requests.admitted_s.mask | requests.last_token_s.mask | requests.sent_s.mask)
    return sum(
        _num_held(requests[known & (requests.worker.data == worker)], max_num_tokens)
        for worker in np.unique(requests.worker.data[known])
    )


def _num_held(requests: Requests, max_num_tokens: int) -> int:
    """Return the same of the requests of one worker."""
    times = np.concatenate([requests.first_token_s.data, requests.last_token_s.data])
    order = np.argsort(times, kind="stable")
    num_decodes = np.concatenate([[0], np.cumsum(np.repeat([1, -1], len(requests))[order])])  # after so many events
    first, last = (
        np.searchsorted(times[order], at.data, side="right") for at in (requests.sent_s, requests.admitted_s)
    )
    waits = requests.admitted_s.data > requests.sent_s.data
    room = max_num_tokens - np.maximum(requests.isl - requests.cached_tokens.filled(0), 1)
    return int((_highest(num_decodes, first[waits], last[waits] + 1) > room[waits]).sum())


def _highest(
    values: npt.NDArray[np.int64], first: npt.NDArray[np.intp], end: npt.NDArray[np.intp]
) -> npt.NDArray[np.int64]:
    """Return the highest of values[first:end] for each pair: that of two spans of 2^k values, which may overlap."""
    found = np.zeros(len(first), np.int64)
    powers = np.log2(end - first).astype(int)
    for power in range(powers.max(initial=-1) + 1):
        mine = powers == power
        found[mine] = np.maximum(values[first[mine]], values[end[mine] - 2**power])
        values = np.maximum(values[: -(2**power)], values[2**power :])
    return found
