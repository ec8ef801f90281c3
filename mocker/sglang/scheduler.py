"""SGLang's scheduler: prompts before decodes, in batches of their own.

    work = scheduler.schedule()          # iteration i: who computes what
    outcome = scheduler.process(work)    # what it brought is known

With the overlap schedule, iteration i + 1 is scheduled before iteration i is processed.

    waiting -- `PrefillPass` --> a batch of prefills -- merged at the next iteration --> running, decodes
       ^                             |      ^                                               |
       |                   one unfinished prefill, `chunked`, goes on in the next pass      |
       +------------------------ retracted or preempted: it keeps its tokens, not its KV ---+
"""

from typing import NamedTuple

from mocker.sglang.admission import PrefillPass
from mocker.sglang.config import SglangConfig
from mocker.sglang.hicache.pool import HostPool
from mocker.sglang.inbox import Inbox
from mocker.sglang.policies import Policies
from mocker.sglang.pool import Pool
from mocker.sglang.ratio import NewTokenRatio
from mocker.sglang.request import Request
from mocker.sglang.retraction import default_priority, retract, staying_first, urgency
from mocker.sglang.rows import Rows, Work


class Outcome(NamedTuple):
    """What an iteration brought."""

    tokens: list[Request]
    """Requests that have one more token, in order."""
    finished: list[Request]


class Scheduler:
    """Decides who runs, with how many tokens. It does not know the time."""

    def __init__(self, config: SglangConfig, num_pages: int, num_host_pages: int = 0) -> None:
        self.config = config
        self.has_host = num_host_pages > 0
        self.pool = HostPool(config, num_pages, num_host_pages) if self.has_host else Pool(config, num_pages)
        self.ratio = NewTokenRatio(config)
        self.inbox = Inbox(config.scheduler_recv_interval)
        self.waiting: list[Request] = []
        self.running = Rows([])
        self.chunked: Request | None = None
        """The request whose prefill is in progress."""
        self.in_flight: list[Work] = []
        """Iterations that are scheduled and not processed."""
        self.aborted: list[Request] = []
        """Requests that ended outside of an iteration, until `take_aborted`."""
        self.sends_events = False
        """Whether SGLang sends the events of its cache now, after what was processed last."""
        self.num_decoded = 0
        """Iterations without prefills that were processed since the cache was flushed."""
        self.takes_new = True
        """Whether waiting requests may be admitted."""
        self._policies = Policies(config, self.pool)
        self._last: Rows | None = None  # of the iteration before
        self._is_chunk_aborted = False
        self._num_entries = 0
        self._num_processed = 0  # tokens of prompts, for hrrn
        self._num_deferred = 0  # passes that are still left out for decodes
        self._max_request = config.max_request_tokens(self.pool.num_tokens)

    # Requests come and go

    @property
    def max_input_tokens(self) -> int:
        """A prompt of so many tokens is refused."""
        return self.config.max_input_tokens(self.pool.num_tokens)

    def add(self, request: Request) -> None:
        """Queue a new request, with its output limited to what fits."""
        size, pool = self.config.page_size, self.pool
        room = min(self._max_request - request.num_prompt, pool.num_tokens - pool.ceil(request.num_prompt) - size) - 1
        request.max_new = max(0, min(request.max_new, room))
        if self.config.enable_priority_scheduling and request.priority is None:
            request.priority = default_priority(self.config)
        if self.inbox.is_direct:
            self._enqueue(request)
        else:
            self.inbox.requests.append(request)

    def _enqueue(self, request: Request) -> None:
        """Let a request wait, new or come back; if too many do, refuse it or a less urgent one."""
        limit = self.config.max_queued_requests
        if limit is not None and len(self.waiting) >= limit:
            refused = self._refused(request)
            self.aborted.append(refused)
            refused.ending = "abort"
            if refused is request:
                return
            self.waiting.remove(refused)
        self._num_entries += 1
        request.entry = self._num_entries
        request.processed_at_entry = self._num_processed
        self.waiting.append(request)

    def _refused(self, request: Request) -> Request:
        config = self.config
        if config.enable_priority_scheduling and self.waiting:
            worst = max(self.waiting, key=lambda each: (urgency(each, config), each.entry))
            if urgency(request, config) < urgency(worst, config):
                return worst
        return request

    def abort(self, request: Request) -> None:
        """End a request: at once if it waits, else when its next token is known."""
        if request.ending:
            return
        if request in self.inbox.requests:
            self.inbox.requests.remove(request)
            request.ending = "abort"
            self.aborted.append(request)
        elif request in self.waiting:
            self.waiting.remove(request)
            request.ending = "abort"
            self.aborted.append(request)
        elif request is self.chunked:
            self._is_chunk_aborted = True
        else:
            request.is_marked = True

    def take_aborted(self) -> list[Request]:
        """Return the requests that ended outside of an iteration since the last call."""
        taken, self.aborted = self.aborted, []
        return taken

    @property
    def is_deferring(self) -> bool:
        """Whether the next pass is left out, so that decodes come first."""
        return self._num_deferred > 0

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do, or to wait for."""
        is_last_over = (self._last is None or not self._last.requests) and not self.pool.is_copying
        return not (self.running.requests or self.chunked or self.waiting or self.in_flight) and is_last_over

    @property
    def is_closed(self) -> bool:
        """Whether nobody can be admitted until a request leaves or comes."""
        if self.chunked is not None or self.is_deferring:
            return False
        has_waiting = bool(self.waiting) and self.takes_new
        return not has_waiting or (self.running.is_full and not self.config.may_preempt)

    def flush(self) -> bool:
        """Forget the cache, unless anything is going on; return whether it was forgotten."""
        if not self.is_idle:
            return False
        self._last = None
        self.num_decoded = 0
        self.pool.clear()
        return True

    # An iteration

    def schedule(self) -> Work:
        """Close the next iteration's batch."""
        if not self.inbox.is_direct:
            self._requeue(self.inbox.open(self._last))
        if self._is_chunk_aborted:
            self._abort_chunked()
        if self.has_host:
            self.pool.poll()
        self._merge()
        work: Work | None = None
        requeued: list[Request] = []
        if not self._defers_prefill():
            work = self._prefill(requeued)
        if work is None and self.running.requests and not self.running.is_prefill_only:
            work = self._decode(requeued)
        if work is None:
            work, self._last = Work("idle"), None
        else:
            self.in_flight.append(work)
        if work.prefills:
            self._num_deferred = self.config.prefill_decode_interval
        work.chunked, work.requeued = self.chunked, requeued
        return work

    def _abort_chunked(self) -> None:
        request = self.chunked
        assert request is not None, "no prefill is in progress"
        self.pool.release(request, is_kept=False)
        request.ending, request.is_marked = "abort", False
        self.aborted.append(request)
        self.chunked, self._is_chunk_aborted = None, False

    def _merge(self) -> None:
        """Cache the last chunk, and let the requests of the last prefill run."""
        chunked, last = self.chunked, self._last
        self._cache_chunk()
        if last is not None and last.kind != "decode":
            excluded = [each for each in (chunked, last.chunked) if each is not None]
            if last.drop(excluded):
                self.running.is_full = False
            if last.requests:
                if self.running.requests:
                    self.running.requests = self.running.requests + last.requests
                    self.running.is_prefill_only &= last.is_prefill_only
                else:
                    self.running = last
        if self.running.drop():
            self.running.is_full = False

    def _cache_chunk(self) -> None:
        """Cache what is computed of the prefill in progress."""
        chunked = self.chunked
        if chunked is not None and chunked.end > chunked.prefix:
            self.pool.checkpoint(chunked, chunked.end)
            chunked.prefix = chunked.end

    def _defers_prefill(self) -> bool:
        if not self._num_deferred:
            return False
        if len(self.running.requests) < self.config.prefill_decode_interval_min_bs:
            self._num_deferred = 0
            return False
        self._num_deferred -= 1
        return True

    def rest(self) -> None:
        """Begin again with the ratio if nothing was scheduled, and nothing is left."""
        self.sends_events = self.is_idle
        if self.is_idle:
            self.ratio.reset()

    # Prefill

    def _prefill(self, requeued: list[Request]) -> Work | None:
        running, config, pool = self.running, self.config, self.pool
        if config.may_preempt or not running.requests:
            running.is_full = False
        waiting = self.waiting if self.takes_new else []
        if (running.is_full or not waiting) and self.chunked is None:
            return None
        num_rows = config.num_rows(pool.num_tokens) - max(len(running.requests), pool.num_holders)
        if num_rows <= 0 and self.chunked is None and not config.may_preempt:
            running.is_full = True
            return None
        waiting = self._policies.sort(waiting, self._num_processed)
        if self.takes_new:
            self.waiting = waiting
        prefill = PrefillPass(config, pool, self._policies, self.ratio, running)
        prefill.admit(self.chunked, waiting)
        requeued += prefill.preempted
        if not prefill.admitted:
            self._requeue(prefill.preempted)
            return None
        admitted = set(prefill.admitted)
        self.waiting = [request for request in self.waiting if request not in admitted]
        self._requeue(prefill.preempted)
        self.chunked = prefill.chunked
        return self._close_prefill(prefill.admitted)

    def _requeue(self, requests: list[Request]) -> None:
        for request in requests:
            self._enqueue(request)

    def _close_prefill(self, admitted: list[Request]) -> Work:
        """Give the admitted requests their pages, and let the running ones decode beside them if that is asked for."""
        work, chunked = Work("extend"), self.chunked
        if chunked is not None:
            chunked.chunks_in_flight += 1
        work.prefills = [(request, request.prefix, request.end - request.prefix) for request in admitted]
        if self.has_host:
            self.pool.begin_loads()
        self.pool.extend(admitted)
        rows = Rows(admitted, chunked=chunked)
        rows.kind = "extend"
        rows.is_prefill_only = all(request.max_new == 0 for request in admitted)
        rows.num_extend = sum([count for _, _, count in work.prefills])
        if self.config.enable_mixed_chunk and self.config.chunk_size is not None and self.running.requests:
            self._mix(work, rows)
        self._launch(rows)
        return work

    def _mix(self, work: Work, rows: Rows) -> None:
        """Add the decodes of all running requests, if there is room for them."""
        running = self.running
        if running.drop(self._ending_in_flight()):
            running.is_full = False
        if not running.requests or not self.pool.fits_decode(running.requests):
            return
        self.pool.decode(running.requests)
        for request in running.requests:
            request.looked_up = request.known
        work.kind = rows.kind = "mixed"
        work.decodes = running.requests
        rows.requests = rows.requests + running.requests
        rows.num_extend += len(running.requests)
        rows.is_prefill_only = False
        self.running = Rows([], is_full=running.is_full)

    def _launch(self, rows: Rows) -> None:
        self._last = rows
        self._num_processed += rows.num_extend

    # Decode

    def _ending_in_flight(self) -> list[Request]:
        """Return the requests that have their last token, by length, in flight."""
        if not self.in_flight:
            return []
        return [request for request in self.in_flight[0].requests if request.generated + 1 >= request.max_new]

    def _decode(self, requeued: list[Request]) -> Work | None:
        running, num_before = self.running, len(self.running.requests)
        has_ending = running.drop(self._ending_in_flight())
        if not running.requests:
            running.is_full = False
            return None
        if self.pool.fits_decode(running.requests):
            self.ratio.decay()
        elif has_ending:
            running.is_full = False
            return None  # their KV is free after this iteration
        else:
            self._retract(requeued)
        if len(running.requests) < num_before:
            running.is_full = False
        if not running.requests:
            return None
        self.pool.decode(running.requests)
        running.kind = "decode"
        work = Work("decode")
        work.decodes = running.requests
        self._launch(running)
        return work

    def _retract(self, requeued: list[Request]) -> None:
        """Retract running requests until the rest can decode. One stays; if even that cannot decode, it is aborted."""
        running, pool = self.running, self.pool
        staying = staying_first(running.requests, self.config)
        while len(staying) > 1:
            request = staying.pop()
            retract(pool, request, len(staying))
            requeued.append(request)
            if pool.fits_decode(staying):
                break
        if len(staying) == 1 and not pool.fits_decode(staying):
            request = staying.pop()
            pool.release(request, is_kept=False)
            request.ending = "abort"
            self.aborted.append(request)
        running.requests = staying
        self.ratio.jump(staying)
        self._requeue(requeued)

    def decode_again(self, num_iterations: int) -> None:
        """Repeat the last iteration, in which all decode, so many times; nothing else can happen."""
        self.ratio.decay(num_iterations)
        self.inbox.pass_by(num_iterations)
        self.pool.decode_many(self.running.requests, num_iterations)
        self._num_processed += num_iterations * self.running.num_extend

    # Results

    def pass_iterations(self, num_iterations: int) -> None:
        """Let the tokens of iterations of the oldest batch in flight be known, in which nothing else happens."""
        self.num_decoded += num_iterations
        for request in self.in_flight[0].decodes:
            request.generated += num_iterations

    def process(self, work: Work) -> Outcome:
        """Let the tokens of the oldest iteration in flight be known."""
        assert self.in_flight and self.in_flight[0] is work, "iterations are processed in order"
        self.in_flight.pop(0)
        outcome = Outcome([], [])
        for request, _, _ in work.prefills:
            if request.chunks_in_flight > 0:
                request.chunks_in_flight -= 1
            else:
                self._append(request, outcome, is_prefill=True)
        for request in work.decodes:
            self._append(request, outcome, is_prefill=False)
        if self.has_host:
            self.pool.begin_stores()
        if not work.prefills:
            self.num_decoded += 1
        self.sends_events = bool(work.prefills) or self.num_decoded % self.config.decode_log_interval == 0
        return outcome

    def _append(self, request: Request, outcome: Outcome, *, is_prefill: bool) -> None:
        """Let a request's next token be known, unless it has ended or lost its KV since."""
        if request.ending or request.is_retracted:
            return
        request.generated += 1
        outcome.tokens.append(request)
        if request.is_marked:
            request.ending = "abort"
        elif request.generated > request.max_new:  # 0, and one is made
            request.ending = "length"
        elif request.generated == request.stop_after and not request.ignores_eos:
            request.ending = "stop"
        elif request.generated == request.max_new:
            request.ending = "length"
        if request.ending:
            outcome.finished.append(request)
            self._release_ended(request)
        elif is_prefill:
            self.pool.checkpoint(request, request.end)
            request.prefix = request.end

    def _release_ended(self, request: Request) -> None:
        """Take back the KV of a request that has ended, and cache it."""
        self.pool.release(request, is_kept=True)
