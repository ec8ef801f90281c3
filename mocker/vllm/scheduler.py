"""vLLM V1's scheduler: running sequences first under one token budget, then waiting ones.

    batch = scheduler.schedule()                  # iteration i: who computes what
    sampled, finished = scheduler.update(batch)   # what it brought is known

A sequence advances when it is scheduled. Synchronously every `schedule` is followed by its `update`; asynchronously
iteration i + 1 is scheduled before iteration i is known. Then a sequence that ends by length is left out of the iteration
after its last, but one that turns out to have stopped is not. A block that decoding fills is cached an iteration later.

A sequence whose prompt another engine computes gets blocks first, then waits in `holding`, scanned before `waiting`:

    in `waiting`                             in `holding`                                               in `running`
    WAITING -- its turn, blocks are free --> LOADING -- `arrive` --> LOADED -- its turn --> WAITING --> RUNNING

KV may also come from host memory (`offload`): with a part of a prompt there, a sequence goes the same way, and computes
the rest when it runs. It may also have to ask again later; then those behind it are not held up. While tiers behind
host memory work for it, it is in `fetching` instead of `waiting`, and is skipped.

A sequence whose KV another engine will read keeps its blocks when it is over (`retention`). Transfers are not part of
iterations: `loads` lists those from other engines that have started; the driver reports when each has arrived
(`arrive`) or was read (`retention.let_go`).
"""

from bisect import insort
from collections import deque
from collections.abc import Iterator
from typing import Literal

from mocker.batch import NOBODY, Batch
from mocker.models.kv_cache import MoreBlocks
from mocker.sequence import LOADED, LOADING, NEVER, OVER, RUNNING, WAITING, Sequence
from mocker.vllm.adapters import AdapterSeats
from mocker.vllm.block_pool import BlockPool
from mocker.vllm.config import EngineConfig
from mocker.vllm.decoding import Decoding
from mocker.vllm.look_ups import LookUps
from mocker.vllm.offload.config import HostMemory
from mocker.vllm.offload.offload import Offload
from mocker.vllm.retention import Retention

Pause = Literal["new", "all"]
"""What a paused scheduler leaves alone: those that do not run yet and hold no blocks, or all sequences."""

SKIPPED = -1
"""For a waiting sequence: try it again later, without holding up those behind it."""


class Scheduler:
    """Decides who runs, with how many tokens, in which blocks. It counts iterations and does not know the time."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int,
        host: HostMemory | None = None,
        more: MoreBlocks | None = None,
        *,
        max_loras: int | None = None,
    ) -> None:
        self.config = config
        self.pause: Pause | None = None
        self._adapters = None if max_loras is None else AdapterSeats(max_loras)
        self._more = more
        self.pool = BlockPool(num_blocks - 1, enable_prefix_caching=config.enable_prefix_caching)
        self._budget = config.max_num_batched_tokens
        self._lag = int(config.is_async)  # iterations from computing a token to knowing it
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.fetching: dict[Sequence, None] = {}  # these also wait, until tiers behind host memory have answered
        self.holding: list[Sequence] = []  # these wait and hold blocks: their KV is on its way or has arrived
        self.loads: list[Sequence] = []  # those whose load has started, until the driver takes them
        self.shipped: list[Sequence] = []  # recently admitted, with a token that arrived with the KV
        self.look_ups = LookUps()
        self.retention = Retention(self.pool)
        self.iteration = 0  # the next to be scheduled
        self.num_ended = 0  # iterations passed to `update`
        self.has_fast_paths = True  # else the rule alone decides, with the same result
        self._decoding = Decoding(self.pool, block_size=config.block_size, lag=self._lag)
        self._ending: list[Sequence] = []  # no longer decoding, but their last token is not known yet
        self._starved = NOBODY  # in the last iteration
        self._steady: Batch | None = None  # the last batch, if it continues unless something happens
        self._max_running = min(config.max_num_active_seqs or config.max_num_seqs, config.max_num_seqs)
        self._watermark_blocks = int(config.watermark * num_blocks)
        self._num_added = self._num_put_back = 0
        self._by_priority = config.scheduling_policy == "priority"
        if host is not None and not config.enable_prefix_caching:
            raise ValueError(
                "KV is offloaded, and enable_prefix_caching is false; expected true: prefix caching finds it by its "
                "content"
            )
        self.offload = None if host is None else Offload(host, self.pool, config.block_size)
        self._expected: list[Sequence] = []  # arrived, and tiers behind host memory may have parts of them
        self._has_fence = config.is_async and (config.is_kv_consumer or self.offload is not None)
        self._drops_output = config.is_async and config.is_kv_producer  # if preempted: its KV is gone
        self.dropped = NOBODY  # whose output in flight does not count
        self._reset = NOBODY  # preempted by a reset of the prefix cache, until a batch reports them
        self._before = self._latest = Batch(0)  # the two batches closed last, if there is a fence

    def schedule(self) -> Batch | None:
        """Close the next iteration's batch, or return None when nothing can run.

        vLLM's rule: the running sequences one by one, then, unless one was preempted, the waiting ones. While nothing
        changes, the batch of the previous iteration is returned again.
        """
        if self.pause == "all":
            return None
        if self._expected:
            self._prefetch()
        if self._decoding.next_finish < self.iteration:
            self._retire()
        batch = Batch(self.iteration)
        budget = self._schedule_at_once(batch) if self.has_fast_paths else None
        if budget is None:
            budget = self._schedule_one_by_one(batch)
        if not batch.preempted and (self.waiting or self.holding):
            self._admit(batch, budget)
        if self._reset:  # not before: what a reset preempts may be admitted at once
            batch.preempted, self._reset = [*self._reset, *batch.preempted], NOBODY
        has_copies = self.offload is not None and self._offer(self.offload, batch)
        if not (self.running or batch.preempted):
            return None
        # vLLM may preempt and then schedule nothing for those that still run: a step of no tokens and no time.
        self.iteration += 1
        self._starved = batch.starved
        if has_copies or batch.chunks or batch.preempted or batch.starved or batch.delayed:
            self._steady = None
        elif self._steady is not None:
            return self._steady
        else:
            batch.is_undisturbed = True
            self._steady = batch
        if self._has_fence:
            self._before, self._latest = self._latest, batch
        self._advance(batch)
        return batch

    def _schedule_one_by_one(self, batch: Batch) -> int:
        """Give each running sequence its next tokens, preempting when blocks run out; return the rest of the budget."""
        budget, size = self._budget, self.config.block_size
        batch.preempted, batch.starved, batch.delayed = [], [], []
        granted: dict[Sequence, int] = {}  # of `running`, those before the one whose turn it is
        while len(granted) < len(self.running) and budget > 0:
            sequence = self.running[len(granted)]
            if sequence in self._ending:
                granted[sequence] = 0
                continue
            computed = self.iteration - sequence.origin if sequence.decoding else sequence.num_computed
            count = 1 if sequence.decoding else self._chunk_size(sequence, budget)
            held = _blocks(computed, size) if sequence.decoding else sequence.num_blocks
            needed = max(_blocks(computed + count, size) - held, 0)
            refund = self._make_room(batch, sequence, needed, granted) if self.pool.num_free < needed else 0
            if refund is None:
                break
            budget += refund
            is_last_known = not sequence.decoding or not self._lag or sequence in self._starved
            self._grant(
                sequence, computed + count, needed, num_cacheable=computed + count if is_last_known else computed
            )
            granted[sequence] = count
            budget -= count
        self._describe(batch, granted)
        return budget

    def _make_room(self, batch: Batch, sequence: Sequence, needed: int, granted: dict[Sequence, int]) -> int | None:
        """Preempt until this many blocks are free; return the tokens taken back, None if it cannot continue."""
        refunds = 0
        while self.pool.num_free < needed:
            victim = self._victim()
            if self._has_fence and self._is_in_flight(victim):
                return None  # its blocks would not be free at once
            refund = granted.pop(victim, 0)
            self._preempt(victim, was_granted=refund > 0, is_dropped=self._drops_output)
            batch.preempted.append(victim)
            if victim is sequence:
                return None
            refunds += refund
        return refunds

    def _admit(self, batch: Batch, budget: int) -> None:
        """Start waiting sequences, or loads of their KV, while budget, seats and blocks last.

        Those that hold blocks come first; each queue is first come, first served.
        """
        place = 0  # in `holding`, after those that are loading or skipped
        num_skipped = 0  # of `waiting`
        if self._adapters is not None:
            self._adapters.seat(s for s in self.running if s not in self._ending and s not in batch.starved)
        while budget > 0 and len(self.running) < self._max_running:
            is_holding = place < len(self.holding)
            if is_holding:
                sequence = self.holding[place]
                if sequence.state == LOADING:
                    place += 1
                    continue
                if sequence.state == LOADED:
                    self._promote(sequence)
            elif num_skipped < len(self.waiting) and self.pause is None:
                sequence = self.waiting[num_skipped]
            else:
                return
            has_seat = self._adapters is None or self._adapters.has_seat_for(sequence)
            count = self._admit_next(batch, sequence, budget) if has_seat else SKIPPED
            if count is None:
                return
            if count != SKIPPED:
                budget -= count
            elif is_holding:
                place += 1
            elif self.offload is not None and self.offload.is_fetching(sequence):
                del self.waiting[num_skipped]
                self.fetching[sequence] = None
            else:
                num_skipped += 1

    def _admit_next(self, batch: Batch, sequence: Sequence, budget: int) -> int | None:
        """Start or load the sequence whose turn it is, and return the tokens it gets.

        None: it must keep waiting, and so must those behind it; SKIPPED: they need not.
        """
        size, known, computed, hits = self.config.block_size, sequence.num_known, sequence.num_computed, 0
        if not computed and self.config.enable_prefix_caching and sequence.reads_cache:
            hits = self.pool.lookup(sequence.chain, (known - 1) // size)
            computed = hits * size
        if sequence.is_remote_prefill:
            return 0 if self._load(sequence, hits, known) else None
        if self.offload is not None and not sequence.num_blocks and sequence.reads_cache:
            more = self.offload.ask(sequence, computed)
            if more is None:
                return SKIPPED
            if more:
                return 0 if self._load(sequence, hits, computed + more) else None
        count = self._cut_to_threshold(known - computed)
        if count > budget:
            if not self.config.enable_chunked_prefill:
                return None
            count = budget
        reach = max(computed + count, known) if self.config.scheduler_reserve_full_isl else computed + count
        if self._num_blocks_to_admit(sequence, hits, reach) > self.pool.num_free:
            return None
        self._start(batch, sequence, hits, computed, count)
        return count

    def _advance(self, batch: Batch) -> None:
        """Sum up what the decodes read, and let sequences whose prefill is now fully scheduled decode from here on."""
        batch.num_kv_tokens = self._decoding.num_kv_tokens(self.iteration)
        for sequence in batch.starved:
            batch.num_kv_tokens -= self.iteration - sequence.origin
        if batch.chunks:
            batch.sampled = [sequence for sequence, _ in batch.chunks if sequence.num_computed == sequence.num_known]
            for sequence in batch.sampled:
                self._decoding.start(sequence, self.iteration)

    # The steps of the rule

    def _retire(self) -> None:
        """Remove running sequences whose last token, by length, is in flight."""
        for sequence in self.running:
            if (
                sequence.last_iteration < self.iteration
                and sequence.decoding
                and sequence.num_total == sequence.num_limit
            ):
                sequence.num_known = sequence.num_total
                self._stop_decoding(sequence, self.iteration - sequence.origin)
                self._ending.append(sequence)
        self._decoding.find_next_finish(self.running)

    def _victim(self) -> Sequence:
        return max(self.running, key=_priority) if self._by_priority else self.running[-1]

    def _preempt(self, sequence: Sequence, *, was_granted: bool, is_dropped: bool) -> None:
        """Return a running sequence to the waiting queue; it keeps its tokens, but not its blocks.

        With `is_dropped`, it does not keep a token that is in flight.
        """
        self.running.remove(sequence)
        sequence.state = WAITING
        self._stop_computing(sequence, was_granted=was_granted, is_dropped=is_dropped)
        self.pool.release(sequence, sequence.num_blocks)
        if self.offload is not None:
            self.offload.preempt(sequence)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        if self._by_priority:
            self._enqueue(self.waiting, sequence)
        else:
            self._num_put_back += 1
            sequence.order = -self._num_put_back
            self.waiting.appendleft(sequence)

    def _stop_computing(self, sequence: Sequence, *, was_granted: bool, is_dropped: bool) -> None:
        """Stop the decoding of a preempted sequence; a token in flight is delivered unless it is dropped."""
        is_dropped &= (sequence.decoding or sequence in self._ending) and sequence not in self._starved
        if sequence.decoding:
            sequence.num_known = self.iteration - sequence.origin + 1 - int(is_dropped)
            if sequence.last_iteration < self.iteration and not is_dropped:
                self._ending.append(sequence)
            else:
                sequence.last_iteration = NEVER
            self._stop_decoding(sequence, self.iteration - sequence.origin + int(was_granted))
            self._decoding.find_next_finish(self.running)
        elif is_dropped:
            sequence.num_known -= 1
            sequence.last_iteration = NEVER
            self._ending.remove(sequence)
        if is_dropped:
            self.dropped = [*self.dropped, sequence]

    def _grant(self, sequence: Sequence, computed: int, needed: int, *, num_cacheable: int) -> None:
        """Give a running sequence the blocks for its tokens up to `computed`, and cache those whose tokens are known."""
        self.pool.allocate(needed)
        if not sequence.decoding:
            sequence.num_computed = computed
            sequence.num_blocks += needed
        self.pool.store(sequence, num_cacheable // self.config.block_size)

    def _describe(self, batch: Batch, granted: dict[Sequence, int]) -> None:
        """Record the still running sequences in the batch; a decode without a token is now an iteration later."""
        batch.decodes = []
        for sequence in self.running:
            if not sequence.decoding:
                if granted.get(sequence):
                    batch.chunks.append((sequence, granted[sequence]))
            elif sequence not in granted:
                self._decoding.delay(sequence, self.iteration)
                batch.starved.append(sequence)
            else:
                batch.decodes.append(sequence)
                if sequence in self._starved:
                    batch.delayed.append(sequence)
        self._decoding.find_next_finish(self.running)

    def _chunk_size(self, sequence: Sequence, budget: int) -> int:
        """Return how many tokens of a prefill to compute, with vLLM's cuts in vLLM's order."""
        count = self._cut_to_threshold(sequence.num_known - sequence.num_computed)
        return min(count, budget)

    def _cut_to_threshold(self, count: int) -> int:
        threshold = self.config.long_prefill_token_threshold
        if threshold <= 0:
            return count
        present = len(self.running) + self.num_waiting
        if present == 1:
            return count
        if self.config.long_prefill_token_threshold_adaptive:
            threshold = max(threshold, self.config.max_num_batched_tokens // present)
        return min(count, threshold)

    def _num_blocks_to_admit(self, sequence: Sequence, hits: int, computed: int) -> int:
        """Count the blocks that must be free for tokens up to `computed`.

        These are the blocks to fill, those to share that are in the free queue, and a reserve.
        """
        needed = max(_blocks(computed, self.config.block_size) - hits - sequence.num_blocks, 0)
        if not sequence.num_blocks:
            needed += sequence.num_more_blocks
        if hits:
            needed += self.pool.num_unheld(sequence.chain, hits)
        return needed + self._watermark_blocks if self.running else needed

    def _start(self, batch: Batch, sequence: Sequence, hits: int, computed: int, count: int) -> None:
        """Start a waiting sequence, with its first chunk after the cached or loaded part."""
        size = self.config.block_size
        self._leave_queue(sequence)
        if not sequence.num_blocks:
            self._share(sequence, hits)
        computed += count
        needed = max(_blocks(computed, size) - sequence.num_blocks, 0)
        self._grant(sequence, computed, needed, num_cacheable=computed)
        if sequence.num_preemptions:
            batch.resumed = [*batch.resumed, sequence]
        else:
            batch.admitted = [*batch.admitted, sequence]
            if sequence.is_token_shipped:
                self.shipped.append(sequence)
        batch.chunks.append((sequence, count))
        sequence.state = RUNNING
        self.running.append(sequence)
        if self._adapters is not None:
            self._adapters.seat((sequence,), is_more=True)

    def _share(self, sequence: Sequence, hits: int) -> None:
        """Give a sequence the cached blocks at the start of its prompt, and what it holds beside its tokens' blocks."""
        if hits:
            self.pool.hold(sequence, hits)
        sequence.num_blocks = hits
        if sequence.num_more_blocks:
            self.pool.allocate_more(sequence)
        if not sequence.num_preemptions:
            sequence.cached_tokens = hits * self.config.block_size
            self.look_ups.count(sequence.num_prompt, sequence.cached_tokens, reads_cache=sequence.reads_cache)

    def _enqueue(self, queue: list[Sequence] | deque[Sequence], sequence: Sequence) -> None:
        if self._by_priority:
            insort(queue, sequence, key=_priority)
        else:
            queue.append(sequence)

    def _leave_queue(self, sequence: Sequence) -> None:
        if self.holding and sequence in self.holding:
            self.holding.remove(sequence)
        elif sequence in self.fetching:
            del self.fetching[sequence]
        elif self.waiting[0] is sequence:
            self.waiting.popleft()
        else:
            self.waiting.remove(sequence)

    # KV that another engine computed, or that is in host memory

    def _load(self, sequence: Sequence, hits: int, num_computed: int) -> bool:
        """Allocate the blocks of this many tokens after the cached ones, and start their load; False if not free.

        Blocks that prefills in flight still need stay free, so that loads, which cannot be preempted, never block them.
        A token that arrives with the KV has its place at once: it can be the first of a block.
        """
        reach = num_computed + int(sequence.is_token_shipped)
        free, is_whole = self.pool.num_free, self.config.scheduler_reserve_full_isl
        if is_whole and self._num_blocks_to_admit(sequence, hits, max(reach, sequence.num_known)) > free:
            return False
        if self._num_blocks_to_admit(sequence, hits, reach) + self.num_reserved_blocks() > free:
            return False
        self._leave_queue(sequence)
        self._share(sequence, hits)
        sequence.num_blocks = _blocks(reach, self.config.block_size)
        self.pool.allocate(sequence.num_blocks - hits)
        sequence.num_computed = num_computed
        sequence.state = LOADING
        self._enqueue(self.holding, sequence)
        if sequence.is_remote_prefill:
            sequence.is_remote_prefill = False
            self.loads.append(sequence)
            if not sequence.num_preemptions:
                self.look_ups.num_elsewhere += num_computed - sequence.cached_tokens
        elif self.offload is not None:
            num_local = hits * self.config.block_size
            if not sequence.num_preemptions:
                sequence.cached_tokens = num_computed
            self.offload.load(sequence, num_local, num_computed - num_local)
            if not sequence.num_preemptions:
                self.look_ups.num_host += sequence.host_tokens
                self.look_ups.num_disk += sequence.disk_tokens + sequence.store_tokens
        return True

    def num_reserved_blocks(self) -> int:
        """Count the blocks that prefills in flight still need to compute their prompts.

        vLLM counts a prompt from its first chunk, or from the start of its load, until it is computed. A load from
        another engine already has all its blocks, so of those only a prompt whose load failed counts.
        """
        size = self.config.block_size
        prefills = [s for s in self.running if not (s.decoding or s in self._ending)]
        return sum([max(_blocks(s.num_known, size) - s.num_blocks, 0) for s in (*prefills, *self.holding)])

    def arrive(self, sequence: Sequence, num_valid_blocks: int | None = None) -> bool:
        """Record that a sequence's KV, or only this many of its first blocks, is loaded; return whether that ends it.

        The rest is computed if `kv_load_failure_policy` asks for it.
        """
        if self.retention.let_go(sequence):  # it was aborted meanwhile
            return False
        sequence.state = LOADED
        if num_valid_blocks is None:
            is_over = sequence.is_token_shipped and sequence.num_total == sequence.num_prompt + 1
        else:
            sequence.num_computed = min(num_valid_blocks * self.config.block_size, sequence.num_known)
            is_over = sequence.is_failed = self.config.kv_load_failure_policy == "fail"
        if is_over:
            self.abort(sequence)
        return is_over

    def _promote(self, sequence: Sequence) -> None:
        """Cache the loaded blocks, and let the sequence wait for a seat.

        The prompt's last token is computed here again, unless the next token arrived with the KV. If KV is missing,
        that token is useless: it is computed here, and gets its place then.
        """
        size = self.config.block_size
        sequence.state = WAITING
        is_whole = sequence.num_computed == sequence.num_known
        sequence.is_token_shipped &= is_whole
        if not sequence.num_computed:
            self.pool.release(sequence, sequence.num_blocks)
            return
        self.pool.store(sequence, sequence.num_computed // size)
        if not is_whole:
            needed = _blocks(sequence.num_known, size)
            if sequence.num_blocks > needed:  # a place for a token that did not arrive
                self.pool.give_back(sequence.num_blocks - needed)
                sequence.num_blocks = needed
        elif sequence.is_token_shipped:
            sequence.num_known += 1
        else:
            sequence.num_computed -= 1

    def _prefetch(self) -> None:
        """Start fetching the parts of arrived prompts that are neither here nor in host memory."""
        assert self.offload is not None
        for sequence in self._expected:
            if sequence.state == WAITING:
                hits = self.pool.lookup(sequence.chain, (sequence.num_known - 1) // self.config.block_size)
                self.offload.expect(sequence, hits * self.config.block_size)
        self._expected.clear()

    # KV that goes to host memory

    def _offer(self, offload: Offload, batch: Batch) -> bool:
        """Offer the chunks that a batch completes, and those of sequences ended since; return whether copies result."""
        is_prompt_only = offload.is_prompt_only
        if is_prompt_only and not offload.refused:
            if not batch.chunks:
                return not offload.is_quiet and offload.end_schedule(())
            return offload.end_schedule([(sequence, sequence.num_computed) for sequence, _ in batch.chunks])
        chunks = {sequence for sequence, _ in batch.chunks}
        offers = []
        for sequence in self.running:
            if sequence in chunks:
                offers.append((sequence, sequence.num_computed))
            elif (
                sequence.decoding
                and sequence not in batch.starved
                and (not is_prompt_only or sequence in offload.refused)
            ):
                is_last_known = not self._lag or sequence in self._starved
                offers.append((sequence, self.iteration - sequence.origin + int(is_last_known)))
        return offload.end_schedule(offers)

    # Fences

    def _is_in_flight(self, sequence: Sequence) -> bool:
        """Return whether an unfinished iteration computes tokens of a sequence."""
        if self.num_ended < self.iteration and self._latest.computes(sequence):
            return True
        return self.num_ended < self._latest.iteration and self._before.computes(sequence)

    def _free(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence that is over, once nothing can write them any more."""
        if self._has_fence and self._is_in_flight(sequence):
            is_last_empty = self._latest.is_empty  # then there is nothing to wait for in it
            self.retention.fence(sequence, self.iteration - 1 - int(is_last_empty))
        else:
            self.pool.release(sequence, sequence.num_blocks)

    # Fast paths: the rule's result if nobody is preempted or starved

    def _schedule_at_once(self, batch: Batch) -> int | None:
        """Schedule decodes, and a prefill chunk after them, if budget and blocks suffice for all; return the rest."""
        running, budget = self.running, self._budget
        if not running:
            return budget
        num_partial = len(running) - self._decoding.num_sequences
        if self._ending:
            num_partial -= sum([s.state == RUNNING for s in self._ending])
        partial = running[-1] if num_partial else None
        if self._starved or num_partial > 1 or (partial is not None and (partial.decoding or partial in self._ending)):
            return None
        if self._steady is not None:
            decoding = self._steady.decodes
        elif self._ending:
            decoding = [s for s in running if s.decoding]
        else:
            decoding = running[:-1] if num_partial else running[:]
        if (num_partial or len(decoding) > self.pool.num_free) and not self._decodes_fit(decoding, partial, budget):
            return None
        self._decoding.grow(decoding, self.iteration)
        batch.decodes = decoding
        budget -= len(decoding)
        if partial is not None and budget > 0:
            count = self._chunk_size(partial, budget)
            computed = partial.num_computed + count
            needed = max(_blocks(computed, self.config.block_size) - partial.num_blocks, 0)
            self._grant(partial, computed, needed, num_cacheable=computed)
            batch.chunks.append((partial, count))
            budget -= count
        return budget

    def _decodes_fit(self, decoding: list[Sequence], partial: Sequence | None, budget: int) -> bool:
        """Return whether the budget and the free blocks suffice for all decodes and one prefill chunk after them."""
        free, size = self.pool.num_free, self.config.block_size
        if len(decoding) > budget:
            return False
        if partial:
            computed = partial.num_computed + self._chunk_size(partial, budget - len(decoding))
            free -= max(_blocks(computed, size) - partial.num_blocks, 0)
        if free >= len(decoding):
            return True
        return free >= self._decoding.num_new_blocks(decoding, self.iteration)

    # Leaps: many iterations of a batch in which each sequence decodes

    def num_leap_iterations(self, batch: Batch, limit: int) -> int:
        """Return how many iterations the batch in flight may span; it must be the last scheduled one."""
        if limit <= 1 or not batch.is_undisturbed or (self._has_fence and self.retention.fenced):
            return 1
        decodes, size = batch.decodes, self.config.block_size
        if self.offload is not None and not self._is_host_idle(self.offload):
            return 1
        if (self.waiting or self.holding) and any(s.chain.num_named * size > s.num_prompt for s in decodes):
            return 1  # named output blocks, once cached, may admit a waiting sequence
        first = self.iteration
        # In flight is `first - 1`. Asynchronously it is `first - 2`, but the batch without the sequence that ends is also
        # closed one iteration earlier.
        count = min(limit, self._decoding.next_finish - first + 2)
        return 1 + self._decoding.num_iterations(decodes, first, count - 1) if count > 1 else 1

    def _is_host_idle(self, offload: Offload) -> bool:
        """Return whether host memory has no part in iterations that only decode.

        These evict blocks. If the next waiting sequence would have shared them, it may have to ask host memory again,
        so that those behind it continue, or it may load instead of computing. The first needs a copy in progress, or a
        look-up that was not made; the second admits nobody who needs the blocks of a whole prompt anyway.
        """
        if not (offload.is_prompt_only and offload.is_quiet):
            return False
        is_nobody_asked = not self.waiting and all(sequence.num_blocks for sequence in self.holding)
        if is_nobody_asked or len(self.running) == self._max_running:
            return True
        if not self.config.scheduler_reserve_full_isl or offload.is_copying or self._adapters is not None:
            return False  # with adapters, the first that waits need not be the next
        return not (self.waiting and offload.may_look_up(self.waiting[0]))

    def leap(self, num_iterations: int, *, is_ordered: bool) -> None:
        """Schedule the last batch for this many more iterations, in which only a token for each sequence happens.

        Blocks are allocated and cached in vLLM's order or, unless `is_ordered`, at once.
        """
        assert self._steady is not None, "no steady decoding is in progress"
        decodes, first, stop = self._steady.decodes, self.iteration, self.iteration + num_iterations
        self.iteration = stop
        if is_ordered:
            for iteration in range(first, stop):
                self._decoding.grow(decodes, iteration)
            return
        self._decoding.grow_at_once(decodes, first, stop)

    # What else the engine asks

    @property
    def num_waiting(self) -> int:
        """Count the sequences that wait for blocks, for their KV or for a seat."""
        return len(self.waiting) + len(self.fetching) + len(self.holding)

    def queued(self) -> list[Sequence]:
        """Return the sequences that wait and hold no blocks, the next one first."""
        return sorted((*self.waiting, *self.fetching), key=self._place) if self.fetching else list(self.waiting)

    def end_fetch(self, sequence: Sequence) -> None:
        """Try a sequence again after tiers have done something for it, unless it can only wait for more."""
        assert self.offload is not None
        if sequence in self.fetching and not self.offload.is_fetching(sequence):
            del self.fetching[sequence]
            insort(self.waiting, sequence, key=self._place)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence.

        Raises:
            ValueError: it can never fit.
        """
        limit = self.config.max_model_len
        if limit is not None:
            if sequence.num_prompt >= limit:
                raise ValueError(f"prompt of {sequence.num_prompt} tokens reaches max_model_len ({limit})")
            sequence.num_limit = min(sequence.num_limit, limit)
            sequence.num_total = min(sequence.num_total, limit)
        if not self.config.enable_chunked_prefill and sequence.num_prompt > self._budget:
            raise ValueError(
                f"prompt of {sequence.num_prompt} tokens; without chunked prefill it must be at most max_num_batched_tokens "
                f"({self._budget})"
            )
        if self._more is not None:
            sequence.num_more_blocks = self._more.of(sequence.num_total)
        needed = _blocks(sequence.num_total - 1, self.config.block_size) + sequence.num_more_blocks
        if needed > self.pool.num_blocks:
            raise ValueError(
                f"{sequence.num_prompt} prompt and {sequence.max_tokens} output tokens need {needed} KV blocks; "
                f"the cache has {self.pool.num_blocks}"
            )
        sequence.order = self._num_added
        self._num_added += 1
        self._enqueue(self.waiting, sequence)
        if (
            self.offload is not None
            and self.offload.prefetches
            and sequence.reads_cache
            and not sequence.is_remote_prefill
        ):
            self._expected.append(sequence)

    def update(self, batch: Batch, num_iterations: int = 1) -> tuple[list[Sequence], list[Sequence]]:
        """End `num_iterations` iterations of a batch: return sequences that completed prefill, and finished ones."""
        self.num_ended += num_iterations
        if self._has_fence:
            self.retention.pass_fences(self.num_ended)
        last, finished = self.num_ended - 1, NOBODY
        dropped = self.dropped
        if dropped:
            self.dropped = NOBODY
        if self._decoding.next_finish <= last or self._ending:
            finished = [s for s in self.running if s.last_iteration <= last]
        if self._lag and (finished or self._starved):
            self._cache_late(finished)
        sampled = [s for s in batch.sampled if s.state != OVER and s not in dropped] if batch.sampled else NOBODY
        if self._ending:
            finished = [*finished, *[s for s in self._ending if s.state == WAITING]]
        for sequence in finished:
            self._take_out(sequence)
            if self.offload is not None:
                self.offload.end(sequence, max(sequence.num_prompt, sequence.num_total - 1))
            if sequence.is_remote_decode and sequence.num_blocks:
                self.retention.hold(sequence)
            else:
                self._free(sequence)
        return sampled, finished

    def _cache_late(self, finished: list[Sequence]) -> None:
        """Cache the blocks of sequences that have not been scheduled since, which would have cached them."""
        size = self.config.block_size
        for sequence in [s for s in self.running if s in finished or s in self._starved]:
            computed = self.iteration - sequence.origin if sequence.decoding else sequence.num_computed
            self.pool.store(sequence, min(computed, sequence.num_total - 1) // size)

    def abort(self, sequence: Sequence) -> None:
        """Remove a sequence, unless it has ended, and free its blocks; its tokens in flight are dropped."""
        if sequence.state != OVER:
            is_loading = sequence.state == LOADING
            num_known = self.num_tokens(sequence) if sequence.state == RUNNING else 0
            self._take_out(sequence)
            if self.offload is not None:
                self.offload.end(sequence, min(sequence.num_computed, num_known))
            if is_loading:
                self.retention.hold(sequence)
            else:
                self._free(sequence)

    def reset_prefix_cache(self, *, preempts_running: bool = False) -> bool:
        """Forget all cached blocks, unless any is in use (then False). At most one iteration is in flight.

        With `preempts_running`, sequences that run do not stand in the way: they are preempted, the last one first, and
        what is being computed for them is dropped.

        Raises:
            RuntimeError: they were preempted, or cannot be, and blocks are still in use.
        """
        if not preempts_running:
            return self.pool.reset()
        if self._has_fence and any(map(self._is_in_flight, self.running)):
            raise RuntimeError("a step in flight may still write blocks that a load could take: reset again later")
        is_in_flight = self.num_ended < self.iteration  # not after a pause: then all that was computed is known
        while self.running:
            sequence = self.running[-1]
            self._preempt(sequence, was_granted=False, is_dropped=is_in_flight)
            self._reset = [*self._reset, sequence]
        if not self.pool.reset():
            raise RuntimeError("blocks are in use for KV that is being transferred: reset again later")
        return True

    def _place(self, sequence: Sequence) -> tuple[int, float, int]:
        return _priority(sequence) if self._by_priority else (0, 0.0, sequence.order)

    def _take_out(self, sequence: Sequence) -> None:
        """Mark a sequence as over; it still has its blocks."""
        if sequence.state == RUNNING:
            self.running.remove(sequence)
            if sequence.decoding:
                self._stop_decoding(sequence, self.iteration - sequence.origin)
                self._decoding.find_next_finish(self.running)
        else:
            self._leave_queue(sequence)
        sequence.state = OVER
        if sequence in self._ending:
            self._ending.remove(sequence)

    def is_delivered(self, sequence: Sequence) -> bool:
        """Return whether the token counts that the oldest step in flight computes for a sequence."""
        return sequence.state != OVER and sequence not in self.dropped

    def is_ending(self, sequence: Sequence) -> bool:
        """Return whether a sequence waits only for its last token, which is in flight."""
        return sequence in self._ending

    def num_new_tokens(self, batch: Batch) -> Iterator[tuple[Sequence, int]]:
        """Yield each sequence of the batch in flight with its tokens, in vLLM's order."""
        chunks = dict(batch.chunks)
        for sequence in self.running:
            if sequence in chunks:
                yield sequence, chunks[sequence]
            elif sequence.decoding and sequence not in batch.starved:
                yield sequence, 1

    def num_tokens(self, sequence: Sequence, num_starved: int = 0) -> int:
        """Count a sequence's tokens, prompt and output, that are known (or about to be, if it was preempted).

        `num_starved` of the batches that have not ended have no place for it: they bring it no token.
        """
        if sequence in self._ending:
            return sequence.num_total - 1
        if not sequence.decoding:
            return sequence.num_known
        return max(self.num_ended - sequence.origin + 1 + num_starved, sequence.num_known)

    def know(self, num_iterations: int) -> None:
        """Record this many iterations of a leap, which produce only a token for each sequence."""
        self.num_ended += num_iterations

    def _stop_decoding(self, sequence: Sequence, num_computed: int) -> None:
        self._decoding.stop(sequence, num_computed)
        self._steady = None


def _blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def _priority(sequence: Sequence) -> tuple[int, float, int]:
    return sequence.priority, sequence.arrival, sequence.order
