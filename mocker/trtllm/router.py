"""Attention DP: which rank takes which request.

Requests that wish for a rank go first, then the longest prompts, each to the rank with the fewest tokens. The rule is that of
TensorRT-LLM's `get_from_waiting_queue` and `DefaultADPRouter`, decided by recordings.
"""

from mocker.trtllm.request import Request


class Router:
    """Deals requests out to ranks."""

    def __init__(self, *, max_active: int) -> None:
        """Give a rank at most `max_active` requests."""
        self._max_active = max_active

    def take(self, waiting: list[Request], active: list[list[Request]]) -> list[Request]:
        """Take the requests that may be dealt out now from a queue.

        One that insists on a rank that is full stays, and those behind it may pass.
        """
        room = [self._max_active - len(requests) for requests in active]
        limit = sum(room)
        taken: list[Request] = []
        kept: list[Request] = []
        for request in waiting:
            rank = request.rank
            if len(taken) >= limit:
                kept.append(request)
            elif rank is None or not request.has_strict_rank:
                taken.append(request)
            elif room[rank] > 0:
                room[rank] -= 1
                taken.append(request)
            else:
                kept.append(request)
        waiting[:] = kept
        return taken

    def deal(self, taken: list[Request], active: list[list[Request]]) -> list[list[Request]]:
        """Return for each rank the requests that it gets."""
        counts = [len(requests) for requests in active]
        tokens = [sum([request.num_original_prompt for request in requests]) for requests in active]
        dealt: list[list[Request]] = [[] for _ in active]
        rest = self._follow_wishes(taken, dealt, counts)
        most = min(max(-(-(sum(counts) + len(rest)) // len(counts)), *counts), self._max_active)
        for request in sorted(rest, key=_longest_first):
            rank = min([(tokens[rank], counts[rank], rank) for rank in range(len(counts)) if counts[rank] < most])[2]
            dealt[rank].append(request)
            counts[rank] += 1
            tokens[rank] += request.num_original_prompt
        return dealt

    def _follow_wishes(self, taken: list[Request], dealt: list[list[Request]], counts: list[int]) -> list[Request]:
        """Deal out requests whose rank has room, those that insist on it first; return the others."""
        rest = []
        for request in sorted(taken, key=_strict_first):
            rank = request.rank
            if rank is None or counts[rank] >= self._max_active:
                rest.append(request)
                continue
            dealt[rank].append(request)
            counts[rank] += 1
        return rest


def _strict_first(request: Request) -> bool:
    return not request.has_strict_rank


def _longest_first(request: Request) -> int:
    return -request.num_original_prompt
