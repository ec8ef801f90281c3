"""SGLang's scheduler as the core of an engine."""

from mocker.batch import NOBODY, Batch
from mocker.contract import (
    Backlog,
    EngineStoppedError,
    HostChunks,
    NeverAdmittedError,
    Outbox,
    Pause,
    Remaining,
    View,
)
from mocker.core import Core
from mocker.models.kv_groups import KvLayout
from mocker.prefix_cache_stats import PrefixCacheStats
from mocker.sequence import OVER, RUNNING, WAITING, Sequence
from mocker.sglang.config import SglangConfig
from mocker.sglang.hicache.copies import NodeCopy
from mocker.sglang.hicache.pool import HostPool
from mocker.sglang.leaps import Leaps
from mocker.sglang.request import Request
from mocker.sglang.rows import Work
from mocker.sglang.scheduler import Scheduler
from mocker.tiers.config import HostMemory
from mocker.tiers.copies import NO_WORK, Copy
from mocker.tiers.copies import Work as CopyWork

QUEUE_FULL = "the request queue is full (max_queued_requests {})"
NO_ROOM = "SGLang ran out of KV memory for its next token, although it had retracted all others"


class SglangCore(Core):
    """The scheduler, with sequences for its requests, and what engines and drivers ask beyond its rule.

    A sequence that was aborted while it ran is over at once for the driver. SGLang ends its request when the next token of
    it is known; until then it keeps its row and its pages, and is among `running` and `dropped`.
    """

    def __init__(
        self,
        config: SglangConfig,
        num_blocks: int,
        host: HostMemory | None = None,
        layout: KvLayout | None = None,
        *,
        kv_events: bool = True,
    ) -> None:
        """Start idle; see `new_engine` for the arguments.

        Raises:
            ValueError: it is to have something that is not modelled.
        """
        if layout is not None:
            raise ValueError("SGLang's scheduler with layers that do not keep all tokens is not modelled yet")
        if host is not None and host.tiers:
            raise ValueError("storage behind SGLang's host memory (hicache_storage_backend) is not modelled yet")
        self.config = config
        self.outbox = Outbox()
        self.pause: Pause | None = None
        self.running: list[Sequence] = []
        self.dropped: list[Sequence] = []
        self.prefix_cache_stats = PrefixCacheStats()
        self.scheduler = self._new_scheduler(num_blocks, 0 if host is None else host.num_chunks)
        self._pool = pool = self.scheduler.pool
        self._host = pool if isinstance(pool, HostPool) else None
        self._pool.tree.has_listener = kv_events
        self._leaps = Leaps(self.scheduler)
        self._requests: dict[Sequence, Request] = {}
        self._iteration = 0  # the next to be scheduled
        self._num_ended = 0
        self._steady: Batch | None = None  # the last batch, if it continues unless something happens
        self._steady_rows: list[Request] = []
        self._starved: set[Sequence] = set()  # running, but the last batch was of prompts
        self._to_abort: list[Request] = []  # SGLang hears of it before it schedules the next iteration
        self._failed: list[Sequence] = []  # refused because too many wait; the next iteration that ends reports them

    def _new_scheduler(self, num_pages: int, num_host_pages: int) -> Scheduler:
        return Scheduler(self.config, num_pages, num_host_pages)

    # Iterations

    def schedule(self) -> Batch | None:
        """See `Core`."""
        if self.pause == "all":
            return None
        self.prepare()
        return self.describe(self._next_work())

    def prepare(self) -> None:
        """Let the scheduler know what came from outside, before the next iteration."""
        scheduler = self.scheduler
        scheduler.takes_new = self.pause is None
        if self._to_abort:
            for request in self._to_abort:
                scheduler.abort(request)
            self._to_abort = []

    def describe(self, work: Work) -> Batch | None:
        """Return an iteration as a batch, or None if nothing happens in it."""
        if self.scheduler.aborted:
            self._take_aborted()
        is_steady = work.decodes is self._steady_rows and not (work.prefills or work.requeued or self._is_storing)
        if is_steady and self._steady is not None:
            self._iteration += 1
            return self._steady
        self._steady = None
        if work.kind == "idle" and not (work.requeued or self._has_started()):
            return None
        return self._close(work)

    def _has_started(self) -> bool:
        """Return whether sequences have started of which nothing is computed yet."""
        return False

    def _next_work(self) -> Work:
        """Return the next iteration. An idle one that only counts down to the next pass, or look, ends at once."""
        scheduler = self.scheduler
        while True:
            was_deferring = scheduler.is_deferring
            work = scheduler.schedule()
            if work.kind != "idle" or scheduler.in_flight:
                return work
            scheduler.rest()
            if work.requeued or not (was_deferring or scheduler.inbox.requests):
                return work

    def num_kv_tokens(self, batch: Batch) -> int:
        """Return the context that a batch reads in the last iteration that was scheduled, which is its own."""
        return batch.num_kv_tokens + len(batch.decodes) * (self._iteration - 1 - batch.iteration)

    def _close(self, work: Work) -> Batch:
        """Describe an iteration as a batch."""
        batch = Batch(self._iteration)
        self._describe_started(batch)
        batch.preempted = [self._preempt(request) for request in work.requeued if not request.ending]
        batch.decodes = [sequence_of(request) for request in work.decodes]
        batch.num_kv_tokens = sum([request.committed for request in work.decodes])
        self._describe_late(batch)
        if work.prefills:
            self._describe_prefills(batch, work)
        if batch.is_empty:
            return batch
        self._iteration += 1
        if work.kind == "extend":
            batch.starved = [sequence_of(request) for request in self.scheduler.running.requests]
            self._starved = set(batch.starved)
        elif self._starved:
            batch.delayed = [sequence for sequence in batch.decodes if sequence in self._starved]
            self._starved = set()
        if work.kind == "decode" and not (batch.preempted or batch.delayed or self._is_storing):
            batch.is_undisturbed = True
            self._steady, self._steady_rows = batch, work.decodes
        return batch

    @property
    def _is_storing(self) -> bool:
        """Whether an eviction waits for copies to the host, and so does the iteration for which there was no room."""
        return self._host is not None and bool(self._host.hosted.flushed)

    def _describe_started(self, batch: Batch) -> None:
        """Record the sequences that start or resume without anything being computed."""

    def _describe_late(self, batch: Batch) -> None:
        """Record those of them that decode for the first time since."""

    def _preempt(self, request: Request) -> Sequence:
        """Let a sequence wait again; a token in flight is dropped."""
        sequence = sequence_of(request)
        if any(request in work.requests for work in self.scheduler.in_flight):
            self.dropped.append(sequence)
        sequence.num_preemptions += 1
        sequence.num_computed = 0
        if sequence.state == RUNNING:
            sequence.state = WAITING
            self.running.remove(sequence)
        return sequence

    def _describe_prefills(self, batch: Batch, work: Work) -> None:
        for request, before, count in work.prefills:
            sequence = sequence_of(request)
            sequence.num_computed = before + count
            batch.chunks.append((sequence, count))
            if request is not work.chunked:
                batch.sampled = [*batch.sampled, sequence]
            if sequence.state == OVER:  # SGLang has yet to end it
                if sequence not in self.running:
                    self.running.append(sequence)
            elif sequence.state == WAITING:
                sequence.state = RUNNING
                self.running.append(sequence)
                if request.num_retractions:
                    batch.resumed = [*batch.resumed, sequence]
                else:
                    batch.admitted = [*batch.admitted, sequence]
                    self._count_hits(sequence, before, request.num_loaded)

    def _count_hits(self, sequence: Sequence, num_tokens: int, num_loaded: int) -> None:
        """Count the tokens of a prompt that were found, of which some were loaded from the host."""
        stats = self.prefix_cache_stats
        stats.count(sequence, num_tokens - num_loaded)
        if num_loaded and not sequence.num_preemptions:
            sequence.host_tokens = num_loaded
            stats.count_load(sequence, 0)

    def update(self, batch: Batch, num_iterations: int = 1) -> tuple[list[Sequence], list[Sequence]]:
        """See `Core`."""
        if batch.is_empty:
            return NOBODY, NOBODY
        scheduler = self.scheduler
        work = scheduler.in_flight[0]
        if num_iterations > 1:
            scheduler.pass_iterations(num_iterations - 1)
        outcome = scheduler.process(work)
        self._num_ended += num_iterations
        sampled = NOBODY
        if work.prefills:
            prefilled = {request for request, _, _ in work.prefills}
            tokens = [sequence_of(request) for request in outcome.tokens if request in prefilled]
            sampled = [sequence for sequence in tokens if sequence.state != OVER and sequence not in self.dropped]
        finished = [sequence for request in outcome.finished if (sequence := self._end(request)) is not None]
        if self._failed:
            finished, self._failed = [*finished, *self._failed], []
        if self.dropped:
            self.dropped = [sequence for sequence in self.dropped if sequence.is_over and self._has_rows(sequence)]
        return sampled, finished

    def take_failed(self) -> list[Sequence]:
        """See `Core`."""
        failed, self._failed = self._failed, []
        return failed

    def _has_rows(self, sequence: Sequence) -> bool:
        """Return whether an aborted sequence is still computed."""
        in_flight = self.scheduler.in_flight
        return sequence in self._requests or any(
            request.payload is sequence for work in in_flight for request in work.decodes
        )

    def _end(self, request: Request) -> Sequence | None:
        """End the sequence of a request that has ended; return it unless the driver knows already."""
        sequence = sequence_of(request)
        del self._requests[sequence]
        sequence.num_known = request.known
        if sequence in self.running:
            self.running.remove(sequence)
        if sequence.state == OVER:
            return None
        sequence.state = OVER
        return sequence

    def _take_aborted(self) -> None:
        """End the sequences whose requests ended outside of an iteration."""
        for request in self.scheduler.take_aborted():
            was_waiting = sequence_of(request).state == WAITING
            sequence = self._end(request)
            if sequence is not None:
                if not self._requests:
                    raise EngineStoppedError(f"{sequence} fills the KV cache alone, and SGLang aborts it")
                sequence.is_failed = True
                limit = self.config.max_queued_requests
                sequence.failure = NO_ROOM if limit is None or not was_waiting else QUEUE_FULL.format(limit)
                self.dropped.append(sequence)
                self._failed.append(sequence)
        self.dropped = [sequence for sequence in self.dropped if self._has_rows(sequence)]

    def publish(self) -> None:
        """See `Core`. SGLang sends them seldom while it decodes, and what is left when it becomes idle."""
        tree, scheduler = self._pool.tree, self.scheduler
        is_idle = not (self._requests or scheduler.in_flight or self._pool.is_copying)
        if tree.events and (scheduler.sends_events or is_idle):
            self.outbox.events += tree.events
            tree.events = []
        scheduler.sends_events = False

    # Leaps

    def num_leap_iterations(self, batch: Batch, limit: int) -> int:
        """See `Core`."""
        if not batch.is_undisturbed or self.dropped or self._to_abort:
            return 1
        count, tree = self._leaps.num_iterations(limit), self._pool.tree
        if tree.has_listener and (tree.events or self._leaps.may_evict(count)):
            interval = self.config.decode_log_interval
            return min(count, interval - self.scheduler.num_decoded % interval)  # it ends when events are sent
        return count

    def may_evict(self, num_iterations: int) -> bool:
        """See `Core`."""
        return self._leaps.may_evict(num_iterations)

    def leap(self, num_iterations: int, *, is_ordered: bool) -> None:
        """See `Core`."""
        assert self._steady is not None, "no steady decoding is in progress"
        self._iteration += num_iterations
        self._leaps.take(num_iterations)

    def end_iterations(self, num_iterations: int) -> None:
        """See `Core`."""
        self._num_ended += num_iterations
        self.scheduler.pass_iterations(num_iterations)

    # Sequences

    @property
    def is_done(self) -> bool:
        """Whether it has no requests, and no iteration is in flight."""
        return not (self._requests or self.scheduler.in_flight)

    def has(self, sequence: Sequence) -> bool:
        """Return whether a sequence's request has not ended."""
        return sequence in self._requests

    def add(self, sequence: Sequence) -> None:
        """See `Core`."""
        if self.is_done:
            self.spin()
        self.queue(sequence)

    def queue(self, sequence: Sequence) -> None:
        """Queue a new sequence.

        Raises:
            ValueError: it can never fit, or asks for what is not modelled.
        """
        scheduler = self.scheduler
        self._check_role(sequence)
        if sequence.adapter:
            raise ValueError("adapters (LoRA) with SGLang's scheduler are not modelled yet")
        refuse_long_prompt(sequence, scheduler.max_input_tokens)
        request = Request(
            sequence.id,
            sequence.chain,
            num_prompt=sequence.num_prompt,
            max_new=sequence.max_tokens,
            stop_after=sequence.stop_after,
            ignores_eos=sequence.ignores_eos,
            priority=sequence.priority,
        )
        request.payload = sequence
        request.reads_cache = sequence.reads_cache
        self._requests[sequence] = request
        scheduler.add(request)
        sequence.num_limit = sequence.num_prompt + max(request.max_new, 1)
        sequence.num_total = min(sequence.num_total, sequence.num_limit)
        if scheduler.aborted:
            self._take_aborted()

    def _check_role(self, sequence: Sequence) -> None:
        """Refuse a sequence that is not for an engine of this role.

        Raises:
            ValueError: it is to be shared with another engine.
        """
        if sequence.is_remote_prefill or sequence.is_remote_decode:
            raise ValueError(
                f"{sequence} is shared with another engine; expected disaggregation_mode prefill or decode, not null"
            )

    def spin(self) -> None:
        """Let SGLang's loop turn, as it does while there is nothing to do."""
        scheduler, num_turns = self.scheduler, 2  # with overlap, the first turn still processes a result
        while num_turns > 0 or scheduler.is_deferring:
            scheduler.schedule()
            scheduler.rest()
            num_turns -= 1

    def abort(self, sequence: Sequence) -> None:
        """See `Core`."""
        if sequence.state == OVER:
            return
        request = self._requests[sequence]
        is_waiting = sequence.state == WAITING
        sequence.state = OVER
        if is_waiting:
            self.scheduler.abort(request)
            self._take_aborted()
        else:
            self._to_abort.append(request)
            self.dropped.append(sequence)

    def end_load(self, sequence: Sequence, num_valid_blocks: int | None = None) -> bool:
        """See `Core`: no sequence of this family loads."""
        raise NotImplementedError

    def release_kept(self, sequence: Sequence) -> None:
        """See `Core`: no sequence of this family leaves KV to others."""
        raise NotImplementedError

    def reset_prefix_cache(self, *, preempts_running: bool = False) -> bool:
        """See `Core`.

        Raises:
            RuntimeError: running requests are to be preempted for it, which SGLang does not do.
        """
        if self.is_done:
            self.spin()
        if self.scheduler.flush():
            return True
        if preempts_running:
            raise RuntimeError("SGLang flushes its cache only when it is idle: reset again later")
        return False

    # Host memory

    def take_copies(self) -> CopyWork:
        """See `Core`."""
        return NO_WORK if self._host is None else self._host.take_copies()

    def end_copy(self, copy: Copy) -> None:
        """See `Core`. SGLang notices at its next step, which it makes at once if it has nothing else to do."""
        assert self._host is not None and isinstance(copy, NodeCopy)
        self._host.end_copy(copy)
        if self.is_done:
            self.spin()

    @property
    def ends_at_stores(self) -> bool:
        """See `Core`: what was stored is unlocked then, and may be evicted."""
        return self._host is not None

    def publish_host_events(self) -> None:
        """See `Core`: they are among the other events."""

    def host_chunks(self) -> HostChunks:
        """See `Core`."""
        assert self._host is not None, "there is no host memory"
        tree = self._host.hosted
        return HostChunks(tree.num_host_pages - tree.num_host_free, tree.num_host_evicted, tree.num_refused)

    # What it is doing

    @property
    def num_ended(self) -> int:
        """See `Core`."""
        return self._num_ended

    @property
    def num_waiting(self) -> int:
        """See `Core`."""
        return len(self.scheduler.waiting) + len(self.scheduler.inbox.requests)

    @property
    def num_queued(self) -> int:
        """See `Core`."""
        return self.num_waiting

    @property
    def num_blocks(self) -> int:
        """See `Core`."""
        return self._pool.num_pages

    @property
    def num_free_blocks(self) -> int:
        """See `Core`."""
        return self._pool.num_free + self._pool.tree.num_evictable

    @property
    def is_stuck(self) -> bool:
        """See `Core`: all that runs can go on."""
        return False

    def stall(self) -> NeverAdmittedError | None:
        """See `Core`."""
        scheduler = self.scheduler
        if not scheduler.waiting or self.running or self.pause or self._pool.is_copying:
            return None
        first = sequence_of(scheduler.waiting[0])
        room = f"{self._pool.available} of {self._pool.num_tokens} tokens of KV are available"
        return NeverAdmittedError(first, f"{room}, nothing runs, and SGLang's rule of admission asks for more")

    def num_tokens(self, sequence: Sequence, num_starved: int = 0) -> int:
        """See `Core`."""
        request = self._requests.get(sequence)
        return sequence.num_known if request is None else request.known

    def is_delivered(self, sequence: Sequence) -> bool:
        """See `Core`."""
        return sequence.state != OVER and sequence not in self.dropped

    def sequences(self) -> list[Sequence]:
        """See `Core`."""
        return [sequence for sequence in self._requests if not sequence.is_over]

    def view(self) -> View:
        """See `Core`."""
        return View(
            num_running=len(self.running),
            num_queued=self.num_queued,
            num_fetching=0,
            num_to_load=0,
            num_loading=0,
            num_loaded=0,
            num_retained=0,
            num_blocks=self.num_blocks,
            num_free_blocks=self.num_free_blocks,
        )

    def backlog(self) -> Backlog:
        """See `Core`."""
        to_compute = decode_kv = queued_decode_kv = 0
        for sequence, request in self._requests.items():
            if sequence.is_over:
                continue
            if request.is_retracted:
                queued_decode_kv += request.known
            elif num_left := num_to_compute(request):
                to_compute += num_left
            else:
                decode_kv += request.known
        return Backlog(to_compute, decode_kv, queued_decode_kv)

    def remaining(self) -> list[Remaining]:
        """See `Core`."""
        return [
            Remaining(num_to_compute(request), max(sequence.num_total - request.known, 0), request.known)
            for sequence, request in self._requests.items()
            if not sequence.is_over
        ]


def refuse_long_prompt(sequence: Sequence, limit: int) -> None:
    """Refuse a sequence whose prompt has so many tokens, or more.

    Raises:
        ValueError: it has.
    """
    if sequence.num_prompt >= limit:
        raise ValueError(
            f"prompt of {sequence.num_prompt} tokens; expected fewer than {limit}, the most that SGLang computes with this "
            "context_length and KV cache"
        )


def sequence_of(request: Request) -> Sequence:
    """Return the sequence for which a request was made."""
    sequence = request.payload
    assert isinstance(sequence, Sequence)
    return sequence


def num_to_compute(request: Request) -> int:
    """Return how many known tokens of a request no iteration has been scheduled for, but for the next decode's."""
    num_left = request.known - request.committed
    return num_left if num_left > 1 or not request.holds_kv else 0
