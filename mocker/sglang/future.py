"""Whether there will be room for a request that uses all its output, if nothing is cached.

Requests end in the order of the tokens that they still have to produce; each frees what it holds then:

    needed   |        /|     /|
             |      /  |   /  |  one ends     one line for all: they grow together
             |    /    | /    |
"""

from typing import Final

from mocker.sglang.request import Request

NUM_SPARE_TOKENS: Final = 1
"""For each request, at any time."""


class Future:
    """The requests that run or were admitted, with what they will take and what they hold, during one pass."""

    def __init__(self, ratio: float, running: list[Request], admitted: list[Request]) -> None:
        self._ratio = ratio
        self._running = running
        self._admitted = admitted
        self._ends: list[tuple[float, int]] | None = None  # tokens to come, tokens held; sorted by the first

    def has_room(self, request: Request, num_left: int) -> bool:
        """Return whether a request, and all before it, can end, with so many tokens left once it is admitted."""
        if self._ends is None:
            ends = [self._end(each) for each in (request, *self._running, *self._admitted)]
            self._ends = sorted([end for end in ends if end[0] > 0], key=lambda end: end[0])
        else:
            self._insert(self._end(request))
        num_freed = 0
        for place, (to_come, held) in enumerate(self._ends):
            num_growing = len(self._ends) - place
            if num_left + num_freed - to_come * num_growing <= NUM_SPARE_TOKENS * num_growing:
                return False
            num_freed += held
        return True

    def _end(self, request: Request) -> tuple[float, int]:
        ratio = 1.0 if request.ignores_eos else self._ratio
        return request.max_new * ratio - request.generated, request.known

    def _insert(self, end: tuple[float, int]) -> None:
        """Insert a later request; as in SGLang, one that ends last is put before the last."""
        if end[0] <= 0:
            return
        assert self._ends is not None
        place = max(len(self._ends) - 1, 0)
        for index, other in enumerate(self._ends):
            if end[0] <= other[0]:
                place = index
                break
        self._ends.insert(place, end)
