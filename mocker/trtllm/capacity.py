"""The capacity scheduler: which of the active requests may take part in a step, so that their KV fits.

    GUARANTEED_NO_EVICT   all that generate; then prompts, in order, whose blocks to their ends fit into what is left
    STATIC_BATCH          the same, but prompts only when nothing generates
    MAX_UTILIZATION       in order, whose blocks for this step fit; else the last started request is paused
    (no KV cache)         the first ones

These are the rules of TensorRT-LLM's `PyCapacityScheduler`; recordings of it decide (`tests/golden/trtllm`). By default
TensorRT-LLM runs a C++ twin, of which its authors say that it does the same; that was not checked.
"""

from abc import ABC, abstractmethod

from mocker.trtllm.adapters import AdapterPages
from mocker.trtllm.needs import Needs
from mocker.trtllm.request import CONTEXT, GENERATING, INIT, Request
from mocker.trtllm.reuse_names import ReuseNames


class Passed:
    """What the capacity scheduler answers."""

    __slots__ = ("inits", "paused", "requests")

    def __init__(self) -> None:
        self.requests: list[Request] = []
        """Those that may take part."""
        self.inits: list[Request] = []
        """Those that get the blocks into which their prompts' KV is transferred."""
        self.paused: list[Request] = []
        """Those that lose their blocks."""

    @property
    def num_passed(self) -> int:
        """Count those that may take part or get blocks."""
        return len(self.requests) + len(self.inits)

    def add(self, request: Request) -> None:
        """Let a request pass."""
        if request.state == INIT:
            self.inits.append(request)
        else:
            self.requests.append(request)


class Capacity(ABC):
    """A policy."""

    @abstractmethod
    def schedule(self, active: list[Request]) -> Passed:
        """Decide who passes; nothing is allocated or freed yet."""


class Unlimited(Capacity):
    """Without a KV cache, only the number of requests is limited."""

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def schedule(self, active: list[Request]) -> Passed:
        """See `Capacity`."""
        passed = Passed()
        for request in active:
            if passed.num_passed == self._limit:
                break
            if request.is_generating or request.state == CONTEXT:
                passed.add(request)
        return passed


class GuaranteedNoEvict(Capacity):
    """Let a prompt start only if its blocks to its end are free beside those of all that have started."""

    def __init__(
        self,
        needs: Needs,
        *,
        limit: int,
        names: ReuseNames | None = None,
        adapters: AdapterPages | None = None,
        is_static: bool = False,
        has_inits: bool = True,
    ) -> None:
        """Let at most `limit` requests pass; `names` skips for reuse, and `is_static` makes it STATIC_BATCH.

        Without `has_inits`, no prompt's KV comes from elsewhere.
        """
        self._needs = needs
        self._limit = limit
        self._names = names
        self._adapters = adapters
        self._is_static = is_static
        self._has_inits = has_inits
        self._room = 0

    def schedule(self, active: list[Request]) -> Passed:
        """See `Capacity`."""
        passed = Passed()
        self._room = self._needs.pool.num_free
        if self._adapters is not None:
            self._adapters.begin()
        self._pass_generating(active, passed)
        if self._is_static and passed.requests:
            return passed
        if self._names is not None:
            self._names.begin(active)
        if self._has_inits:
            self._pass_fitting(active, INIT, passed)
        self._pass_fitting(active, CONTEXT, passed)
        return passed

    def _pass_generating(self, active: list[Request], passed: Passed) -> None:
        generating = [request for request in active if request.state >= GENERATING][: self._limit]
        passed.requests = generating
        self._room -= self._needs.to_ends(generating)
        if self._adapters is not None:
            for request in generating:
                self._adapters.add(request.adapter)

    def _pass_fitting(self, active: list[Request], state: int, passed: Passed) -> None:
        """Let requests in a state pass in order, until one does not fit."""
        for request in active:
            if request.state != state:
                continue
            if self._names is not None and self._names.skips(request):
                continue
            if passed.num_passed >= self._limit:
                return
            needed = self._needs.to_end(request)
            if needed > self._room:
                return
            if self._adapters is not None:
                if not self._adapters.fits(request.adapter):
                    continue
                self._adapters.add(request.adapter)
            passed.add(request)
            self._room -= needed


class MaxUtilization(Capacity):
    """Let all take part whose next step fits, and pause the last started ones when it does not."""

    def __init__(
        self, needs: Needs, *, limit: int, names: ReuseNames | None = None, adapters: AdapterPages | None = None
    ) -> None:
        """Let at most `limit` requests pass; `names` skips for reuse."""
        self._needs = needs
        self._limit = limit
        self._names = names
        self._adapters = adapters
        self._room = 0

    def schedule(self, active: list[Request]) -> Passed:
        """See `Capacity`."""
        passed = Passed()
        self._room = self._needs.pool.num_free
        if self._adapters is not None:
            self._adapters.begin()
        if self._names is not None:
            self._names.begin(active)
        index, stop = 0, len(active)
        while index < stop:
            request = active[index]
            if not self._may_pass(request) or self._passes(request, passed):
                index += 1
                continue
            victim = _last_started(active, index, stop)
            if victim < 0:
                break
            stop = victim
            passed.paused.append(active[victim])
            self._room += self._needs.pool.num_held_alone(active[victim].blocks)
        return passed

    def _may_pass(self, request: Request) -> bool:
        if not (request.is_generating or request.state == CONTEXT or request.state == INIT):
            return False
        return self._names is None or not self._names.skips(request)

    def _passes(self, request: Request, passed: Passed) -> bool:
        """Let a request pass if it fits."""
        needed = self._needs.one_step(request)
        if passed.num_passed >= self._limit or needed > self._room:
            return False
        if self._adapters is not None:
            if not self._adapters.fits(request.adapter):
                return False
            self._adapters.add(request.adapter)
        self._room -= needed
        passed.add(request)
        return True


def _last_started(active: list[Request], start: int, stop: int) -> int:
    """Return the place of the last request that may be paused, -1 if there is none."""
    return next((index for index in range(stop - 1, start - 1, -1) if active[index].is_started), -1)
