"""A prefill pass: which waiting requests are computed next, and how much of each.

Budgets of one pass, in tokens. What is available is counted live, because prefixes that are locked are no longer evictable:

    chunk    of computation, if prompts are cut
    inputs   of computation: `max_prefill_tokens`
    now      that those admitted take at once
    later    that those admitted, and those that run, are expected to take in the end
"""

from typing import Final, Literal

from mocker.sglang.config import SglangConfig
from mocker.sglang.future import Future
from mocker.sglang.policies import Policies
from mocker.sglang.pool import Pool
from mocker.sglang.ratio import NewTokenRatio
from mocker.sglang.request import Request
from mocker.sglang.retraction import retract, victims_for
from mocker.sglang.rows import Rows

Verdict = Literal["go on", "no room", "other"]
GO_ON: Final = "go on"
NO_ROOM: Final = "no room"
"""SGLang's NO_TOKEN: nobody is admitted until somebody leaves."""
OTHER: Final = "other"
"""Another budget is spent."""


class PrefillPass:
    """The budgets of one pass, and whom it admits."""

    def __init__(
        self, config: SglangConfig, pool: Pool, policies: Policies, ratio: NewTokenRatio, running: Rows
    ) -> None:
        num_decodes = len(running.requests) if config.enable_mixed_chunk and config.chunk_size is not None else 0
        self.admitted: list[Request] = []
        self.preempted: list[Request] = []
        self.chunked: Request | None = None
        """The one of those admitted whose prefill this pass does not complete."""
        self._config = config
        self._pool = pool
        self._policies = policies
        self._ratio = ratio.now
        self._clip = config.clip_max_new_tokens_estimation
        self._running = running
        self._num_rows = config.num_rows(pool.num_tokens)
        self._size = config.page_size
        self._chunk = None if config.chunk_size is None else config.chunk_size - num_decodes
        self._inputs = config.max_prefill_tokens - num_decodes
        self._now = num_decodes
        expected = 0.0
        for request in running.requests:
            expected += self._expected(request)
        self._later = num_decodes + expected
        self._future = Future(self._ratio, running.requests, self.admitted)

    def _expected(self, request: Request) -> float:
        """Return how many more tokens of output a running request is expected to take."""
        ratio = 1.0 if request.ignores_eos else self._ratio
        return min(request.max_new - request.generated, self._clip) * ratio

    @property
    def _left(self) -> float:
        """What is available in the end."""
        return self._pool.available - self._later

    @property
    def _left_now(self) -> int:
        """What is available at once."""
        return self._pool.available - self._now

    # The pass

    def admit(self, chunked: Request | None, waiting: list[Request]) -> None:
        """Continue a prefill in progress, then try the waiting requests in order, until a budget is spent."""
        if chunked is not None:
            self._continue(chunked, waiting)
        for request in waiting:
            if self._verdict() == OTHER:
                return
            if len(self.admitted) >= self._num_free_rows():
                self._running.is_full = True
            if self._running.is_full and not (self._config.may_preempt and self._preempt_for(request)):
                return
            self._look_up(request)
            verdict = self._try(request)
            if verdict == NO_ROOM:
                self._running.is_full = bool(self.admitted or self._running.requests)
            if verdict != GO_ON:
                return

    def _verdict(self) -> Verdict:
        """Return whether the budgets let the pass go on."""
        if self._left <= 0 or self._left_now <= 0:
            return NO_ROOM
        if self._inputs <= 0 or (self._chunk is not None and self._chunk <= 0):
            return OTHER
        return GO_ON

    def _num_free_rows(self) -> int:
        """Return how many requests this pass may admit; one that holds KV has a row already."""
        num_kept = sum([request.holds_kv for request in self.admitted])
        return self._num_rows - max(len(self._running.requests), self._pool.num_holders - num_kept)

    def _look_up(self, request: Request) -> None:
        request.looked_up = request.known
        self._pool.match(request, request.most_matched)
        request.protected = request.prefix
        request.matched = request.prefix + request.num_on_host

    def _charge(self, num_tokens: int, max_new: int) -> None:
        """Charge a chunk to the budgets, and the output that will follow."""
        num_paged = self._pool.ceil(num_tokens)
        self._later += num_paged + self._size + max_new
        self._now += num_paged + self._size
        self._inputs -= num_paged
        if self._chunk is not None:
            self._chunk -= num_paged

    def _take(self, request: Request, num_tokens: int, *, is_last: bool) -> None:
        request.end = request.prefix + num_tokens
        self.admitted.append(request)
        if not is_last:
            self.chunked = request
        self._charge(num_tokens, min(request.max_new, self._clip) if is_last else 0)

    def _continue(self, request: Request, waiting: list[Request]) -> None:
        """Compute the next chunk of a prefill in progress. It always goes on, and is not cut to pages."""
        chunk = self._chunk
        assert chunk is not None, "prompts are not cut"
        request.looked_up = request.known
        limit = min(chunk, int(self._left))
        if limit <= 0:
            limit = chunk
        if (cap := self._policies.chunk_limit(request, waiting, chunk)) is not None:
            limit = min(limit, cap)
        left = request.known - request.prefix
        self._take(request, min(left, limit), is_last=left <= limit)

    # Each waiting request

    def _try(self, request: Request) -> Verdict:
        """Admit a request if the budgets allow it; return whether the pass goes on, and if not, why."""
        limit = self._config.prefill_max_requests
        if limit is not None and len(self.admitted) >= limit:
            return OTHER
        if request.ignores_eos and self._config.disable_radix_cache:
            verdict = self._choose_by_future(request)
        else:
            self._pool.lock(request)  # so that its prefix does not count as evictable
            verdict = self._choose(request)
            if verdict != GO_ON:
                self._pool.unlock(request)
        return verdict if verdict != GO_ON else self._verdict()

    def _choose(self, request: Request) -> Verdict:
        left = request.known - request.prefix
        max_new = min(max(request.max_new - request.generated, 0), self._clip)
        if left + max_new + self._size >= self._left:
            return NO_ROOM
        if request.num_on_host:
            if not self._fits(request, left - request.num_on_host):
                return OTHER
            self._pool.load_back(request)
            left = request.known - request.prefix
        num_paged, chunk = self._pool.ceil(left), self._chunk
        if chunk is None:
            if self.admitted and num_paged >= self._inputs:
                return OTHER
        elif num_paged > chunk:
            return self._cut(request, chunk)
        self._take(request, left, is_last=True)
        return GO_ON

    def _fits(self, request: Request, left: int) -> bool:
        """Return whether the budgets of computation admit a request if so many of its tokens are left to compute."""
        num_paged, chunk = self._pool.ceil(left), self._chunk
        if chunk is None:
            return not (self.admitted and num_paged >= self._inputs)
        return num_paged <= chunk or self._cut_at(request.known - left, chunk) > 0

    def _cut_at(self, before: int, chunk: int) -> int:
        """Return how many tokens after so many are admitted of a prompt that exceeds what is left of the chunk; 0: none."""
        if self.chunked is not None and self._config.policy == "shortest-prefill-first":
            return 0  # only one prefill can be in progress
        return self._pool.floor(before + self._pool.floor(chunk)) - before

    def _cut(self, request: Request, chunk: int) -> Verdict:
        """Admit the part of a prompt that is left of the chunk, in whole pages."""
        num_tokens = self._cut_at(request.prefix, chunk)
        if num_tokens <= 0:
            return OTHER
        self._take(request, num_tokens, is_last=False)
        return GO_ON

    def _choose_by_future(self, request: Request) -> Verdict:
        """Without a cache, if it will use all its output: see `Future`."""
        left = request.known - request.prefix
        needed = self._pool.ceil(left) + self._size
        if needed > min(self._left_now, self._left):
            return NO_ROOM
        if not self._future.has_room(request, self._left_now - needed):
            return NO_ROOM
        if self._chunk is None or left <= self._chunk:
            self._take(request, left, is_last=True)
        elif self._chunk <= 0:
            return OTHER
        else:
            self._take(request, self._chunk, is_last=False)
        return GO_ON

    # Preemption

    def _preempt_for(self, request: Request) -> bool:
        """Stop running requests for a more urgent one, if that makes enough room; return whether they were stopped."""
        needed = request.looked_up - request.prefix + min(request.max_new, self._clip) - self._left
        running = self._running
        victims = victims_for(request, running.requests, self._config, needed, self._expected)
        if not victims:
            return False
        num_remaining = len(running.requests)
        for each in running.requests:
            if each in victims:
                num_remaining -= 1
                self._later -= self._expected(each)
                retract(self._pool, each, num_remaining)
        running.requests = [each for each in running.requests if each not in victims]
        self.preempted += victims
        return True
