"""vLLM's scheduler as the core of an engine."""

from mocker.contract import Backlog, HostChunks, NeverAdmittedError, Remaining, View
from mocker.models.kv_groups import KvLayout
from mocker.sequence import LOADING, Sequence
from mocker.speculation.drafter import Drafter
from mocker.tiers.config import HostMemory
from mocker.tiers.copies import Copy, SequenceCopy, Work
from mocker.tiers.work import Found, LookUp, Read, Write
from mocker.vllm.config import EngineConfig
from mocker.vllm.scheduler import Scheduler


class VllmCore(Scheduler):
    """The scheduler, and what engines and drivers ask beyond its rule."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        host: HostMemory | None = None,
        layout: KvLayout | None = None,
        *,
        kv_events: bool = True,
        drafter: Drafter | None = None,
        num_stages: int = 1,
        is_counted: bool = False,
    ) -> None:
        """Start idle; see `new_engine` for the arguments that are not described here.

        Args:
            config: the engine's settings.
            num_blocks: KV blocks.
            host: its host memory.
            layout: the groups of layers that keep different things, if there are any.
            kv_events: report KV events.
            drafter: answers for drafts; needed with speculation.
            num_stages: stages of the model's pipeline. So many batches are in flight, and with asynchronous scheduling
                one more: vLLM's `max_concurrent_batches` with its second model runner.
            is_counted: count the tokens of each sequence in each iteration even if they have a closed form. The
                result is the same, and comes more slowly.
        """
        super().__init__(
            config,
            num_blocks,
            host,
            layout,
            drafter=drafter,
            num_stages=num_stages,
            is_counted=is_counted,
        )
        self.pool.has_listener = kv_events
        self.offload.host.has_listener = kv_events and config.enable_prefix_caching  # without it, vLLM has no events

    def publish(self) -> None:
        """See `Core`."""
        if self.pool.events:
            self.outbox.events += self.pool.events
            self.pool.events = []
        if self.offload.host.events:
            self.publish_host_events()

    def release_kept(self, sequence: Sequence) -> None:
        """See `Core`."""
        self.retention.release(sequence)

    # What it is doing

    @property
    def num_queued(self) -> int:
        """See `Core`."""
        return len(self.waiting) + len(self.fetching)

    @property
    def num_blocks(self) -> int:
        """See `Core`."""
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """See `Core`."""
        return self.pool.num_free

    @property
    def is_stuck(self) -> bool:
        """See `Core`. This happens in vLLM, too (its issues 45388 and 53868).

        Sequences whose KV was loaded hold blocks while they wait, and cannot be preempted. Under pressure, they may
        leave too few for the next tokens of the first; the others wait behind it, and none frees a block.
        """
        if not self.holding or self.running or self.retention.kept or self.offload.is_copying:
            return False
        return not any(each.state == LOADING for each in self.holding)

    def stall(self) -> NeverAdmittedError | None:
        """See `Core`."""
        if self.holding or self.retention.kept or self.offload.is_copying or self.pause:
            return None
        if self.is_locked:
            return NeverAdmittedError(
                self.running[0],
                "it cannot go on: the encoder's cache has no room for its next item beside those that running requests hold, or "
                "no step can compute that item whole",
            )
        if not self.waiting:
            return None
        return NeverAdmittedError(
            self.waiting[0],
            f"{self.pool.num_free} of {self.pool.num_blocks} blocks are free, nothing runs, max_num_batched_tokens is "
            f"{self.config.max_num_batched_tokens} and chunked prefill is "
            f"{'on' if self.config.enable_chunked_prefill else 'off'}",
        )

    def sequences(self) -> list[Sequence]:
        """See `Core`."""
        return [*self.running, *self.holding, *self.queued()]

    def view(self) -> View:
        """See `Core`."""
        num_loading = sum([each.state == LOADING for each in self.holding])
        return View(
            num_running=len(self.running),
            num_queued=self.num_queued,
            num_fetching=len(self.fetching),
            num_to_load=sum([each.is_remote_prefill for each in self.waiting]),
            num_loading=num_loading,
            num_loaded=len(self.holding) - num_loading,
            num_retained=len(self.retention.kept),
            num_blocks=self.pool.num_blocks,
            num_free_blocks=self.pool.num_free,
        )

    def backlog(self) -> Backlog:
        """See `Core`."""
        to_compute = decode_kv = queued_decode_kv = 0
        for sequence in self.running:
            if sequence.decoding or self._running.has_prefilled(sequence):
                decode_kv += self.num_tokens(sequence)
            else:
                to_compute += max(sequence.num_known - sequence.num_computed, 0)
        for sequence in [*self.holding, *self.queued()]:
            if sequence.is_remote_prefill or sequence.is_token_shipped or sequence.num_preemptions:
                queued_decode_kv += sequence.num_known
            else:
                to_compute += max(sequence.num_known - sequence.num_computed, 0)
        return Backlog(to_compute, decode_kv, queued_decode_kv)

    def remaining(self) -> list[Remaining]:
        """See `Core`."""
        found = []
        for sequence in self.sequences():
            known = self.num_tokens(sequence)
            is_prefilled = self._running.has_prefilled(sequence) or sequence.is_remote_prefill
            to_compute = 0 if is_prefilled else max(sequence.num_known - sequence.num_computed, 0)
            found.append(Remaining(to_compute, max(sequence.num_total - known, 0), known))
        return found

    # Host memory

    def take_copies(self) -> Work:
        """See `Core`."""
        return self.offload.take_work()

    def end_copy(self, copy: Copy) -> None:
        """See `Core`."""
        assert isinstance(copy, SequenceCopy)
        self.offload.end_copy(copy.number)
        if not copy.is_store and not copy.is_within_step:
            self.end_load(copy.sequence)

    @property
    def ends_at_stores(self) -> bool:
        """See `Core`."""
        return self.offload.writes_stores

    def end_look_up(self, look_up: LookUp, found: list[Found]) -> None:
        """See `Core`."""
        self.offload.end_look_up(look_up, found)
        self.end_fetch(look_up.sequence)

    def end_read(self, read: Read, num_chunks: int) -> None:
        """See `Core`."""
        self.offload.end_read(read, num_chunks)
        self.end_fetch(read.sequence)

    def end_write(self, write: Write) -> None:
        """See `Core`."""
        self.offload.end_write(write)

    def publish_host_events(self) -> None:
        """See `Core`."""
        self.outbox.events += self.offload.host.events
        self.offload.host.events = []

    def host_chunks(self) -> HostChunks:
        """See `Core`."""
        host = self.offload.host
        return HostChunks(host.num_used, host.num_evicted, self.offload.num_refused)
