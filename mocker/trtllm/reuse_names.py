"""Skip for reuse: of requests that would compute the same block now, one does, and the others find it in the cache next time.

A request's name is the content of its first full block that is not cached, and of all before it.
"""

from collections.abc import Hashable

from mocker.trtllm.needs import Needs
from mocker.trtllm.request import CONTEXT, Request


class ReuseNames:
    """The names of one walk over the active requests."""

    def __init__(self, needs: Needs, *, tokens_per_block: int) -> None:
        self._needs = needs
        self._size = tokens_per_block
        self._names: set[Hashable] = set()

    def begin(self, active: list[Request]) -> None:
        """Register what contexts beyond their first chunk are computing."""
        self._names.clear()
        for request in [request for request in active if request.position > 0 and request.state == CONTEXT]:
            name = self._name(request)
            if name is not None:
                self._names.add(name)

    def skips(self, request: Request) -> bool:
        """Return whether a request is passed over this time; if not, its name is registered, even if it does not fit."""
        if not request.is_first_chunk:
            return False
        name = self._name(request)
        if name is None:
            return False
        if name in self._names:
            return True
        self._names.add(name)
        return False

    def _name(self, request: Request) -> Hashable | None:
        count = self._needs.num_cached(request)
        return request.chain.key(count) if count < request.num_prompt // self._size else None
