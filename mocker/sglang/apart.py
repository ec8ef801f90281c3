"""SGLang's scheduler as the core of an engine that only computes prompts, or only answers.

One that computes prompts ends a sequence with its first token, and keeps its KV until `release_kept`. One that answers takes
sequences whose KV comes from elsewhere, with the first token of the answer:

    WAITING -- room --> LOADING -- `end_load` --> LOADED -- a free row --> RUNNING
"""

from typing import Final

from mocker.batch import NOBODY, Batch
from mocker.contract import Backlog, NeverAdmittedError, Remaining, View
from mocker.models.kv_groups import KvLayout
from mocker.sequence import LOADED, LOADING, OVER, RUNNING, Sequence
from mocker.sglang.config import SglangConfig
from mocker.sglang.core import SglangCore, sequence_of
from mocker.sglang.decode import DecodeScheduler
from mocker.sglang.prefill import PrefillScheduler
from mocker.sglang.request import Request
from mocker.sglang.rows import Work
from mocker.sglang.scheduler import Scheduler
from mocker.tiers.config import HostMemory


def new_sglang_core(
    config: SglangConfig,
    num_blocks: int,
    host: HostMemory | None = None,
    layout: KvLayout | None = None,
    *,
    kv_events: bool = True,
) -> SglangCore:
    """Return an idle core for the role that the settings give; see `new_engine` for the arguments."""
    core = CORES.get(config.disaggregation_mode, SglangCore)
    return core(config, num_blocks, host, layout, kv_events=kv_events)


class SglangPrefillCore(SglangCore):
    """The core of an engine that computes prompts for others."""

    def __init__(
        self,
        config: SglangConfig,
        num_blocks: int,
        host: HostMemory | None = None,
        layout: KvLayout | None = None,
        *,
        kv_events: bool = True,
    ) -> None:
        super().__init__(config, num_blocks, host, layout, kv_events=kv_events)
        self._kept: dict[Sequence, Request] = {}

    def _new_scheduler(self, num_pages: int, num_host_pages: int) -> Scheduler:
        return PrefillScheduler(self.config, num_pages)

    def _check_role(self, sequence: Sequence) -> None:
        if not sequence.is_remote_decode:
            raise ValueError(
                f"{sequence} is to be answered here; expected its prompt alone: disaggregation_mode is prefill"
            )

    def _end(self, request: Request) -> Sequence | None:
        sequence = super()._end(request)
        if request.holds_kv:
            if sequence is not None:
                self._kept[sequence] = request
            else:  # it was aborted meanwhile
                self._pool.release(request, is_kept=True)
        return sequence

    def release_kept(self, sequence: Sequence) -> None:
        """See `Core`."""
        request = self._kept.pop(sequence, None)
        if request is not None:
            self._pool.release(request, is_kept=True)

    def stall(self) -> NeverAdmittedError | None:
        """See `Core`: KV that is kept leaves room when it is read."""
        return None if self._kept else super().stall()

    def view(self) -> View:
        """See `Core`."""
        return super().view()._replace(num_retained=len(self._kept))


class SglangDecodeCore(SglangCore):
    """The core of an engine that answers requests whose prompts others compute."""

    def __init__(
        self,
        config: SglangConfig,
        num_blocks: int,
        host: HostMemory | None = None,
        layout: KvLayout | None = None,
        *,
        kv_events: bool = True,
    ) -> None:
        super().__init__(config, num_blocks, host, layout, kv_events=kv_events)
        scheduler = self.scheduler
        assert isinstance(scheduler, DecodeScheduler)
        self._decoder = scheduler
        self._held: dict[Sequence, Request] = {}  # aborted while their KV was on its way
        self._late: dict[Sequence, None] = {}  # started or resumed, and did not decode since
        self._has_one_token: dict[Sequence, None] = {}  # started, and their second token is not known yet

    def _new_scheduler(self, num_pages: int, num_host_pages: int) -> Scheduler:
        return DecodeScheduler(self.config, num_pages)

    # Iterations

    def _next_work(self) -> Work:
        """Return the next iteration. One in which the last running requests were found to have ended is followed by another."""
        decoder = self._decoder
        while True:
            had_rows = bool(decoder.running.requests)
            work = super()._next_work()
            for request in decoder.take_allocated():
                self._begin_load(request)
            is_over = had_rows and work.kind == "idle" and not (decoder.in_flight or decoder.started or work.requeued)
            if not is_over:
                return work

    def _begin_load(self, request: Request) -> None:
        sequence, size = sequence_of(request), self._pool.page_size
        sequence.is_remote_prefill = False
        sequence.state = LOADING
        sequence.num_blocks = -(-request.committed // size)
        sequence.num_cached_blocks = request.prefix // size
        self.prefix_cache_stats.count(sequence, request.prefix)
        self.prefix_cache_stats.count_load(sequence, request.num_prompt - request.prefix)
        self.outbox.loads.append(sequence)

    def _has_started(self) -> bool:
        return bool(self._decoder.started)

    def _describe_started(self, batch: Batch) -> None:
        for request in self._decoder.started:
            sequence = sequence_of(request)
            if not self.has(sequence):  # it found no page for its next token, and ended at once
                continue
            sequence.num_computed = request.committed
            if sequence not in self.running:
                self.running.append(sequence)
            if sequence.state == OVER:  # SGLang has yet to end it
                continue
            sequence.state = RUNNING
            self._late[sequence] = None
            if sequence.first_scheduled_s >= 0:
                batch.resumed = [*batch.resumed, sequence]
            else:  # even if it is retracted in the same iteration
                batch.admitted = [*batch.admitted, sequence]
                self._has_one_token[sequence] = None
                self.outbox.shipped.append(sequence)

    def _describe_late(self, batch: Batch) -> None:
        """Record who decodes for the first time since it started: its gap began then, not with the iteration."""
        if not (self._late and batch.decodes):
            return
        batch.delayed = [sequence for sequence in batch.decodes if sequence in self._late]
        batch.sampled = [sequence for sequence in batch.delayed if sequence in self._has_one_token]
        decoding = set(batch.delayed)
        self._late = dict.fromkeys([each for each in self._late if each not in decoding and not each.is_over])

    def update(self, batch: Batch, num_iterations: int = 1) -> tuple[list[Sequence], list[Sequence]]:
        """See `Core`; the second token of a sequence, its first one here, counts as that of a completed prompt."""
        sampled = NOBODY
        if batch.sampled:
            sampled = [each for each in batch.sampled if each.state != OVER and each not in self.dropped]
        _, finished = super().update(batch, num_iterations)
        if self._has_one_token:
            for sequence in (*sampled, *finished):
                self._has_one_token.pop(sequence, None)
        return sampled, finished

    # Sequences

    def _check_role(self, sequence: Sequence) -> None:
        if not sequence.is_remote_prefill:
            raise ValueError(
                f"the prompt of {sequence} is to be computed here; expected its KV from another engine: "
                "disaggregation_mode is decode"
            )
        sequence.is_token_shipped = True

    def abort(self, sequence: Sequence) -> None:
        """See `Core`; one whose KV is on its way keeps its pages until that has arrived."""
        self._has_one_token.pop(sequence, None)
        if sequence.state in (OVER, RUNNING):
            super().abort(sequence)
            return
        request, was_loading = self._requests[sequence], sequence.state == LOADING
        sequence.state = OVER
        self.scheduler.abort(request)
        if was_loading:
            self._held[sequence] = request
        self._take_aborted()

    def end_load(self, sequence: Sequence, num_valid_blocks: int | None = None) -> bool:
        """See `Core`; a request whose KV did not arrive fails, as in SGLang."""
        held = self._held.pop(sequence, None)
        if held is not None:
            self._decoder.release_unused(held)
            return False
        request = self._requests[sequence]
        sequence.is_failed = num_valid_blocks is not None
        is_only_token = request.max_new <= 1 or (request.stop_after == 1 and not request.ignores_eos)
        if not (sequence.is_failed or is_only_token):
            self._decoder.arrive(request)
            sequence.state = LOADED
            return False
        self._decoder.leave(request)
        request.generated = 0 if sequence.is_failed else 1
        self._pool.release(request, is_kept=not sequence.is_failed)
        request.ending = "abort" if sequence.is_failed else "length"
        self._end(request)
        return True

    # What it is doing

    @property
    def num_waiting(self) -> int:
        """See `Core`."""
        decoder = self._decoder
        return decoder.num_without_room + len(decoder.transferring) + len(decoder.waiting)

    @property
    def num_queued(self) -> int:
        """See `Core`."""
        return self._decoder.num_without_room

    def stall(self) -> NeverAdmittedError | None:
        """See `Core`."""
        decoder = self._decoder
        is_loading = len(decoder.transferring) > len(decoder.arrived)
        if is_loading or decoder.waiting or self._held or self.running or self.pause:
            return None
        waiting = decoder.retracted or decoder.queue
        if not waiting:
            return None
        pool, reserved = self._pool, self.config.num_reserved_decode_tokens
        return NeverAdmittedError(
            sequence_of(waiting[0]),
            f"{pool.available} of {pool.num_tokens} tokens of KV are available, nothing runs, and a decode worker of SGLang "
            f"asks for more: all its tokens and num_reserved_decode_tokens ({reserved}), or its prompt and limit",
        )

    def view(self) -> View:
        """See `Core`."""
        decoder = self._decoder
        num_arrived = len(decoder.arrived)
        return View(
            num_running=len(self.running),
            num_queued=self.num_queued,
            num_fetching=0,
            num_to_load=len(decoder.queue) + len(decoder.inbox.requests),
            num_loading=len(decoder.transferring) - num_arrived,
            num_loaded=len(decoder.waiting) + num_arrived,
            num_retained=len(self._held),
            num_blocks=self.num_blocks,
            num_free_blocks=self.num_free_blocks,
        )

    def backlog(self) -> Backlog:
        """See `Core`."""
        decode_kv = queued_decode_kv = 0
        for sequence, request in self._requests.items():
            if sequence.state == RUNNING:
                decode_kv += request.known
            elif not sequence.is_over:
                queued_decode_kv += request.known
        return Backlog(0, decode_kv, queued_decode_kv)

    def remaining(self) -> list[Remaining]:
        """See `Core`."""
        return [
            Remaining(0, max(sequence.num_total - request.known, 0), request.known)
            for sequence, request in self._requests.items()
            if not sequence.is_over
        ]


CORES: Final[dict[str, type[SglangCore]]] = {"prefill": SglangPrefillCore, "decode": SglangDecodeCore}
"""Cores for a role, by `disaggregation_mode`."""
