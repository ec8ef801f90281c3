"""SGLang's scheduler in an engine that only answers: other engines compute the prompts, and their KV comes from there.

    queue -- room for all of its prompt --> transferring -- `arrive` --> waiting -- a free row --> running
      first come, first served                                             ^                          |
                                                                           +-- resumed -- retracted --+

Nothing is computed of a prompt, anywhere, before it has room here. The first token comes with its KV, so a request that
starts decodes in the same iteration. One that is retracted keeps a copy of its KV in host memory (the time of the two
copies is not modelled); while one is retracted, nobody else is given room or starts.

Room is what is available less what the requests that are here may still need, in tokens:

    kept      num_reserved_decode_tokens for each request that runs, waits or has its KV on its way
              at least: prompt and limit of the largest running request less the tokens of all running ones, since
              retracting the others must let it end
    needed    the prompt's pages and num_reserved_decode_tokens
              at least: the prompt and its limit less the tokens of all running requests

Source: SGLang 0.5.23, `srt/disaggregation/decode.py` (`pop_preallocated`, `resume_retracted_reqs`,
`_get_new_prebuilt_batch`, `process_decode_queue`). No recording of it exists.
"""

from mocker.sglang.config import SglangConfig
from mocker.sglang.request import Request
from mocker.sglang.retraction import urgency
from mocker.sglang.rows import Rows, Work
from mocker.sglang.scheduler import Scheduler


class DecodeScheduler(Scheduler):
    """Decides which requests get room for their KV, and who decodes."""

    def __init__(self, config: SglangConfig, num_pages: int) -> None:
        super().__init__(config, num_pages)
        self.queue: list[Request] = []
        """Requests that have no room yet."""
        self.transferring: list[Request] = []
        """Requests whose KV is on its way, or has arrived since the last iteration was scheduled."""
        self.arrived: dict[Request, None] = {}
        """Those of them whose KV has arrived."""
        self.retracted: list[Request] = []
        self.allocated: list[Request] = []
        """Requests that were given room, until `take_allocated`."""
        self.started: list[Request] = []
        """Requests that the last iteration to be scheduled has started or resumed."""
        self._max_running = config.num_rows(self.pool.num_tokens)
        self._num_rows = self._max_running + config.num_extra_slots
        self._reserved = config.num_reserved_decode_tokens
        self._clip = config.clip_max_new_tokens_estimation

    # Requests come and go

    def _enqueue(self, request: Request) -> None:
        self._num_entries += 1
        request.entry = self._num_entries
        (self.retracted if request.is_retracted else self.queue).append(request)

    def arrive(self, request: Request) -> None:
        """Record that the KV of a request is here."""
        self.arrived[request] = None

    def abort(self, request: Request) -> None:
        """End a request: when its next token is known if it runs, else at once.

        If its KV is on its way, its pages stay taken until `release_unused`.
        """
        if request.ending:
            return
        if request in self.transferring:
            is_held = request not in self.arrived
            self.leave(request)
            if not is_held:
                self.release_unused(request)
        elif request in self.waiting:
            self.waiting.remove(request)
            self.release_unused(request)
        elif request in self.queue:
            self.queue.remove(request)
        elif request in self.retracted:
            self.retracted.remove(request)
        else:
            super().abort(request)
            return
        request.ending = "abort"
        self.aborted.append(request)

    def leave(self, request: Request) -> None:
        """Forget a request whose KV is on its way or has arrived; its pages stay taken."""
        self.transferring.remove(request)
        self.arrived.pop(request, None)

    def release_unused(self, request: Request) -> None:
        """Take back the pages of a request that does not start."""
        self.pool.release(request, is_kept=False)

    def take_allocated(self) -> list[Request]:
        """Return the requests that were given room since the last call: their KV may be sent."""
        taken, self.allocated = self.allocated, []
        return taken

    @property
    def num_without_room(self) -> int:
        """Requests that hold no pages."""
        return len(self.queue) + len(self.inbox.requests) + len(self.retracted)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do, or to wait for."""
        has_any = bool(self.queue or self.transferring or self.waiting or self.retracted)
        return not (has_any or self.running.requests or self.in_flight)

    @property
    def is_closed(self) -> bool:
        """Whether nobody can be given room, start or be resumed until a request leaves or comes.

        While all that runs decodes, what is available and what is kept for the largest running request only fall.
        """
        if self.waiting and len(self.running.requests) < self._max_running:
            return False
        if self.retracted:
            return not self._has_room_for(self.retracted[0])
        if self.arrived:
            return False
        return not self.queue or not (self.config.has_tree or self._has_room_for(self.queue[0]))

    def _has_room_for(self, request: Request) -> bool:
        """Return whether a request might be given room, even if nothing more was kept for the largest running one."""
        return self._has_row and self._num_at_least(request) <= self._room(0)

    # An iteration

    def schedule(self) -> Work:
        """Close the next iteration's batch."""
        if not self.inbox.is_direct:
            self._requeue(self.inbox.open(self._last))
        self._resume()
        if not self.retracted:
            if self.takes_new:
                self._give_room()
            self._let_arrived_wait()
        self._start()
        requeued: list[Request] = []
        work = self._decode(requeued) if self.running.requests else None
        if work is None:
            work, self._last = Work("idle"), None
        else:
            self.in_flight.append(work)
        work.requeued = requeued
        return work

    @property
    def _has_row(self) -> bool:
        return self.pool.num_holders < self._num_rows

    def _room(self, num_more: int, *, num_retractable: int | None = None) -> int:
        """Return the tokens for which there is room.

        Args:
            num_more: requests that were given room in this pass, and are counted nowhere yet.
            num_retractable: tokens of all running requests (None: nothing more is kept for the largest of them).
        """
        running = self.running.requests
        kept = self._reserved * (len(running) + len(self.transferring) + len(self.waiting) + num_more)
        if num_retractable is not None and running:
            kept = max(kept, max([self._most(request) for request in running]) - num_retractable)
        return self.pool.available - kept

    def _most(self, request: Request) -> int:
        return request.num_prompt + min(request.max_new, self._clip)

    def _num_at_least(self, request: Request) -> int:
        """Return what a request needs of the room, without the part that depends on those that run."""
        return self.pool.ceil(num_to_hold(request)) + self._reserved

    def _resume(self) -> None:
        """Give retracted requests their KV back, in order."""
        resumed: list[Request] = []
        for request in self.retracted:
            if not self._has_row or self._num_at_least(request) > self._room(len(resumed)):
                break
            resumed.append(request)
            self.pool.match(request, 0)
            self.pool.lock(request)
            self._allocate(request)
        if resumed:
            del self.retracted[: len(resumed)]
            self.waiting = self.waiting + resumed

    def _give_room(self) -> None:
        """Let requests of the queue have the pages for their prompts, in order."""
        if not self.queue:
            return
        if self.config.enable_priority_scheduling:
            self.queue.sort(key=self._urgency)
        num_retractable, given = sum([request.known for request in self.running.requests]), list[Request]()
        for request in self.queue:
            if not self._has_row:
                break
            self.pool.match(request, request.num_prompt)
            self.pool.lock(request)
            most = self._most(request) - request.prefix - num_retractable
            needed = max(self._num_at_least(request) - request.prefix, most)
            if needed > self._room(len(given), num_retractable=num_retractable):
                self.pool.unlock(request)
                break
            self._allocate(request)
            given.append(request)
        if given:
            del self.queue[: len(given)]
            self.transferring += given
            self.allocated += given

    def _urgency(self, request: Request) -> int:
        return urgency(request, self.config)

    def _allocate(self, request: Request) -> None:
        """Give a request, whose prefix is locked, the pages for its KV."""
        request.matched = request.protected = request.prefix
        request.end = num_to_hold(request)
        self.pool.extend([request])

    def _let_arrived_wait(self) -> None:
        if self.arrived:
            self.waiting = self.waiting + [request for request in self.transferring if request in self.arrived]
            self.transferring = [request for request in self.transferring if request not in self.arrived]
            self.arrived = {}

    def _start(self) -> None:
        """Let waiting requests run, as if their prompts had just been computed here."""
        num_free = self._max_running - len(self.running.requests)
        self.started = []
        if not self.waiting or num_free <= 0:
            return
        if self.config.enable_priority_scheduling:
            self.waiting.sort(key=self._urgency)
        self.started, self.waiting = self.waiting[:num_free], self.waiting[num_free:]
        for request in self.started:
            request.generated = max(request.generated, 1)
            self.pool.checkpoint(request, request.committed)
            request.prefix = request.committed
        if self.running.requests:
            self.running.requests = self.running.requests + self.started
        else:
            self.running = Rows(self.started)


def num_to_hold(request: Request) -> int:
    """Return the tokens whose KV a request needs to go on: all known ones but the last of its answer."""
    return request.num_prompt + max(request.generated - 1, 0)
