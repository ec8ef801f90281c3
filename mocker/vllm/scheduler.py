"""vLLM V1's scheduler: running sequences first under one token budget, then waiting ones.

    batch = scheduler.schedule()                  # iteration i: who computes what
    sampled, finished = scheduler.update(batch)   # what it brought is known

A sequence advances when it is scheduled. Synchronously every `schedule` is followed by its `update`; asynchronously
iteration i + 1 is scheduled before iteration i is known. Then a sequence that ends by length is left out of the iteration
after its last, but one that turns out to have stopped is not. A block that decoding fills is cached an iteration later.

The parts, each with its own rule:

    `Queues`     who waits            -- `Admission` --> `Running`    who runs; `FastPaths` and `Leaps` are beside its rule;
        ^                                                    |        or `CountedRunning`, if decodes get several tokens,
        |                                                    |        or prompts have media (`Encoder`)
        +---------------------- preempted -------------------+-- ends --> over
    `Loads`      KV comes from another engine or from host memory: blocks first, then a wait in `Queues.holding`
    `Memory`     blocks on the GPU, those that others still need (`Retention`), host memory (`HostOffload`)
    `Offers`     prompts are fetched into host memory, and new KV is offered to it

Transfers are not part of iterations: those from other engines that start are in the outbox; the driver reports when each
has arrived (`end_load`) or was read (`release_kept`).
"""

from collections.abc import Iterator

from mocker.batch import NOBODY, Batch
from mocker.contract import Outbox, Pause
from mocker.core import Core
from mocker.models.kv_groups import KvLayout
from mocker.sequence import LOADING, OVER, RUNNING, Sequence
from mocker.speculation.drafter import Drafter
from mocker.tiers.config import HostMemory
from mocker.vllm.adapters import AdapterSeats
from mocker.vllm.admission import Admission
from mocker.vllm.config import EngineConfig
from mocker.vllm.counted_running import CountedRunning
from mocker.vllm.encoder import Encoder
from mocker.vllm.fast_paths import FastPaths
from mocker.vllm.groups.running import GroupedRunning
from mocker.vllm.groups.settings import group_settings
from mocker.vllm.leaps import Leaps
from mocker.vllm.loads import Loads
from mocker.vllm.memory import Memory
from mocker.vllm.offload.offers import Offers
from mocker.vllm.queues import Queues
from mocker.vllm.running import Running
from mocker.vllm.running_queue import RunningQueue
from mocker.vllm.speculation import Speculation


class Scheduler(Core):
    """Decides who runs, with how many tokens, in which blocks. It counts iterations and does not know the time."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        host: HostMemory | None = None,
        layout: KvLayout | None = None,
        *,
        drafter: Drafter | None = None,
        num_stages: int = 1,
        is_counted: bool = False,
    ) -> None:
        """Start idle; see `VllmCore` for the arguments."""
        self.config = config
        self.outbox = outbox = Outbox()
        self.pause: Pause | None = None
        self.has_fast_paths = True  # else the rule alone decides, with the same result
        self._reset = NOBODY  # preempted by a reset of the prefix cache, until a batch reports them
        groups = (
            None if layout is None else group_settings(config, layout, num_batches=num_stages + int(config.is_async))
        )
        memory = Memory(config, num_blocks, host, outbox, groups=groups, num_stages=num_stages)
        queues = Queues(by_priority=config.scheduling_policy == "priority")
        adapters = AdapterSeats(config.max_loras, config.rules) if config.enable_lora else None
        self._has_host = memory.has_host
        self._has_groups = memory.has_groups
        self._queues = queues
        self._fast_paths: FastPaths | None = None
        self._leaps: Leaps | None = None
        running: RunningQueue
        self.is_locked = False
        """Whether those that run hold up each other forever: the last `schedule` had nothing for any of them.

        Each needs an item for which the encoder has no room, or a part of one.
        """
        self.encoder = encoder = Encoder(config) if config.has_encoder else None
        if is_counted or config.num_speculative_tokens or num_stages > 1 or encoder is not None:
            running = CountedRunning(config, memory, queues, drafter, encoder, num_stages=num_stages)
        else:
            kind = GroupedRunning if memory.has_groups else Running
            running = in_closed_form = kind(config, memory, queues)
            self._fast_paths = FastPaths(config, memory, in_closed_form)
            self._leaps = Leaps(config, memory, in_closed_form, queues, has_adapters=adapters is not None)
        self._running = running
        self._interval = running.interval if running.interval.is_on else None
        self._is_special = self._has_groups or self._interval is not None
        self.is_counted = self._fast_paths is None
        """Whether batches say how many tokens each decode has."""
        self._loads: Loads | None = None
        if not memory.has_groups:
            self._loads = Loads(config, memory, self._running, queues, outbox)
        self._admission = Admission(config, memory, self._running, queues, self._loads, adapters, encoder, outbox)
        self._offers = Offers(memory, self._running)
        self._speculation = Speculation(config)
        # What callers read. The lists stay the same ones.
        self.pool = memory.pool
        self.blocks = memory.blocks
        self.offload = memory.offload
        self.retention = memory.retention
        self.num_named_ahead = memory.num_named_ahead
        self.prefix_cache_stats = memory.prefix_cache_stats
        self.running = self._running.sequences
        self.dropped = self._running.dropped
        self.waiting = queues.waiting
        self.fetching = queues.fetching
        self.holding = queues.holding

    def schedule(self) -> Batch | None:
        """Close the next iteration's batch, or return None when nothing can run.

        vLLM's rule: the running sequences one by one, then, unless one was preempted, the waiting ones. While nothing
        changes, the batch of the previous iteration is returned again.
        """
        if self.pause == "all":
            return None
        running = self._running
        if self._offers.to_prefetch:
            self._offers.prefetch()
        if self._is_special:
            self._begin_step()
        batch, fast_paths = Batch(running.iteration), self._fast_paths
        budget = fast_paths.schedule(batch) if fast_paths is not None and self.has_fast_paths else None
        if budget is None:
            budget = running.schedule(batch)
        if not batch.preempted and (self.waiting or self.holding):
            self._admission.admit(batch, budget, takes_new=self.pause is None)
        if self._interval is not None:
            self._interval.end_step(batch, self._queues, is_closed=bool(self.running or batch.preempted or self._reset))
        if self._reset:  # not before: what a reset preempts may be admitted at once
            batch.preempted, self._reset = [*self._reset, *batch.preempted], NOBODY
        has_copies = self._has_host and self._offers.offer(batch)
        may_lock = self.encoder is not None and bool(self.running)
        self.is_locked = may_lock and batch.is_empty and not batch.preempted and not running.has_batch_in_flight
        if self.is_locked or not (self.running or batch.preempted):
            return None
        # vLLM may preempt and then schedule nothing for those that still run: a step of no tokens and no time.
        return running.close(batch, is_disturbed=has_copies)

    def _begin_step(self) -> None:
        if self._has_groups:
            self.blocks.begin_step()
        if self._interval is not None:
            self._interval.begin(self._running.iteration, has_decodes=self._running.has_decodes)

    def update(self, batch: Batch, num_iterations: int = 1) -> tuple[list[Sequence], list[Sequence]]:
        """See `Core`."""
        sampled, finished = self._running.end(batch, num_iterations)
        for sequence in finished:
            num_computed = max(sequence.num_prompt, sequence.num_total - 1)
            self._end(sequence, num_computed, is_kept=sequence.is_remote_decode and sequence.num_blocks > 0)
        return sampled, finished

    def add(self, sequence: Sequence) -> None:
        """See `Core`."""
        limit, budget = self.config.max_model_len, self.config.max_num_batched_tokens
        if limit is not None:
            sequence.cut_at(limit)
        if not self.config.enable_chunked_prefill and sequence.num_prompt > budget:
            raise ValueError(
                f"prompt of {sequence.num_prompt} tokens; without chunked prefill it must be at most max_num_batched_tokens "
                f"({budget})"
            )
        if sequence.media:
            self._check_media(sequence)
        speculation = self._speculation
        num_places = speculation.num_places(sequence.num_total - 1 + speculation.num_drafts)
        needed = self.blocks.most_needed(num_places)
        if sequence.is_remote_prefill:
            assert self._loads is not None, "KV of several groups comes from nowhere else"
            needed = max(needed, self._loads.num_needed(sequence))
        if needed > self.pool.num_blocks:
            raise ValueError(
                f"{sequence.num_prompt} prompt and {sequence.max_tokens} output tokens need {needed} KV blocks; "
                f"the cache has {self.pool.num_blocks}"
            )
        self._queues.add(sequence)
        self._offers.queue_prefetch(sequence)

    def _check_media(self, sequence: Sequence) -> None:
        """Refuse media that the encoder does not take."""
        for item in sequence.media:
            if why := self.config.why_not_encoded(item.num_tokens):
                raise ValueError(f"item {item.id!r} of its prompt cannot be encoded: {why}")

    def abort(self, sequence: Sequence) -> None:
        """See `Core`."""
        if sequence.state != OVER:
            num_known = self.num_tokens(sequence) if sequence.state == RUNNING else 0
            num_computed = min(sequence.computed(self.iteration), num_known)
            self._end(sequence, num_computed, is_kept=sequence.state == LOADING)

    def _end(self, sequence: Sequence, num_computed: int, *, is_kept: bool) -> None:
        """End a sequence that leaves this many tokens' KV; a transfer still needs its blocks if they are kept."""
        running, retention = self._running, self.retention
        is_fenced = retention.has_fence and running.is_in_flight(sequence)
        if sequence.state != RUNNING:
            self._queues.leave(sequence)
        running.leave(sequence)
        sequence.state = OVER
        running.interval.forget(sequence)
        self.offload.end(sequence, num_computed)
        if is_kept:
            retention.keep(sequence)
        elif is_fenced:
            retention.fence(sequence, running.fence())
        else:
            self.blocks.release(sequence)

    def end_load(self, sequence: Sequence, num_valid_blocks: int | None = None) -> bool:
        """See `Core`; the rest is computed if `kv_load_failure_policy` asks for it."""
        assert self._loads is not None, "KV of several groups comes from nowhere else"
        is_over = self._loads.end(sequence, num_valid_blocks)
        if is_over:
            self.abort(sequence)
        return is_over

    def end_fetch(self, sequence: Sequence) -> None:
        """Try a sequence again after tiers have done something for it, unless it can only wait for more."""
        if not self.offload.is_fetching(sequence):
            self._queues.end_fetch(sequence)

    def reset_prefix_cache(self, *, preempts_running: bool = False) -> bool:
        """Forget all cached blocks, unless any is in use (then False). At most one iteration is in flight.

        With `preempts_running`, sequences that run do not stand in the way: they are preempted, the last one first, and
        what is being computed for them is dropped.

        Raises:
            RuntimeError: they were preempted, or cannot be, and blocks are still in use.
        """
        if not preempts_running:
            return self.pool.reset()
        if self.retention.has_fence and any(map(self._running.is_in_flight, self.running)):
            raise RuntimeError("a step in flight may still write blocks that a load could take: reset again later")
        is_in_flight = self.num_ended < self.iteration  # not after a pause: then all that was computed is known
        while self.running:
            sequence = self.running[-1]
            self._running.preempt(sequence, was_granted=False, is_dropped=is_in_flight)
            self._reset = [*self._reset, sequence]
        if not self.pool.reset():
            raise RuntimeError("blocks are in use for KV that is being transferred: reset again later")
        return True

    # Leaps

    def may_evict(self, num_iterations: int) -> bool:
        """See `Core`."""
        return self._leaps is not None and self._leaps.may_evict(num_iterations)

    def num_leap_iterations(self, batch: Batch, limit: int) -> int:
        """See `Core`."""
        return 1 if self._leaps is None else self._leaps.num_iterations(batch, limit)

    def leap(self, num_iterations: int, *, is_ordered: bool) -> None:
        """See `Core`."""
        assert self._leaps is not None, "each iteration has to be scheduled"
        self._leaps.take(num_iterations, is_ordered=is_ordered)

    def end_iterations(self, num_iterations: int) -> None:
        """See `Core`."""
        self._running.num_ended += num_iterations

    # Counts

    @property
    def iteration(self) -> int:
        """The next iteration to be scheduled."""
        return self._running.iteration

    @property
    def num_ended(self) -> int:
        """See `Core`."""
        return self._running.num_ended

    @property
    def num_waiting(self) -> int:
        """See `Core`."""
        return len(self.waiting) + len(self.fetching) + len(self.holding)

    def queued(self) -> list[Sequence]:
        """Return the sequences that wait and hold no blocks, the next one first."""
        return self._queues.without_blocks()

    def num_reserved_blocks(self) -> int:
        """Count the blocks that prefills in flight still need to compute their prompts: see `Loads`."""
        return 0 if self._loads is None else self._loads.num_reserved_blocks()

    def is_delivered(self, sequence: Sequence) -> bool:
        """See `Core`."""
        return sequence.state != OVER and sequence not in self.dropped

    def is_ending(self, sequence: Sequence) -> bool:
        """Return whether a sequence waits only for its last token, which is in flight."""
        return self._running.is_ending(sequence)

    def num_new_tokens(self, batch: Batch) -> Iterator[tuple[Sequence, int]]:
        """Yield each sequence of the batch in flight with its tokens, in vLLM's order."""
        return self._running.num_new_tokens(batch)

    def num_tokens(self, sequence: Sequence, num_starved: int = 0) -> int:
        """See `Core`."""
        return self._running.num_tokens(sequence, num_starved)
