"""vLLM V1's scheduler: running sequences first under one token budget, then waiting ones."""

from bisect import insort
from collections import deque
from collections.abc import Iterator

from mocker.block_pool import BlockPool
from mocker.config import EngineConfig
from mocker.sequence import Sequence

NOBODY: list[Sequence] = []  # shared, never changed
NEVER = 1 << 62


class Batch:
    """What one iteration computes. Sequences that decode are implied: all that run and are not named here."""

    __slots__ = ("admitted", "chunks", "delayed", "num_decodes", "preempted", "resumed", "starved")

    def __init__(self) -> None:
        self.chunks: list[tuple[Sequence, int]] = []  # prefill: sequence, tokens
        self.admitted: list[Sequence] = NOBODY
        self.resumed: list[Sequence] = NOBODY
        self.preempted: list[Sequence] = NOBODY
        self.starved: list[Sequence] = NOBODY  # decoding, but the budget was spent
        self.delayed: list[Sequence] = NOBODY  # decoding again after having been starved
        self.num_decodes = 0

    @property
    def is_undisturbed(self) -> bool:
        """True if all that happens is a token for each sequence that runs."""
        return not (self.chunks or self.preempted or self.starved or self.delayed)


class Scheduler:
    """Who runs, with how many tokens, in which blocks. Iterations are counted; time is not known here."""

    def __init__(self, config: EngineConfig, num_blocks: int) -> None:
        self.config = config
        self.pool = BlockPool(num_blocks - 1, enable_prefix_caching=config.enable_prefix_caching)
        self._budget = config.max_num_batched_tokens
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.iteration = 0
        self.origin_sum = 0  # over the decoding sequences
        self.num_decoding = 0
        self._next_finish = NEVER  # the iteration at whose end the next decoding sequence finishes
        self._is_one_starved = False  # in the last iteration
        self._max_running = config.max_num_active_seqs or config.max_num_seqs
        self._watermark_blocks = int(config.watermark * num_blocks)
        self._by_priority = config.scheduling_policy == "priority"

    def schedule(self) -> Batch | None:
        """Close the next iteration's batch, or return None when nothing can run.

        vLLM's rule: the running sequences one by one, then, unless one was preempted, the waiting ones.
        """
        batch = Batch()
        budget = self._schedule_at_once(batch)
        if budget is None:
            budget = self._schedule_one_by_one(batch)
        if not batch.preempted and self.waiting:
            self._admit(batch, budget)
        # vLLM may preempt and then schedule nothing for those that still run: a step of no tokens and no time.
        return batch if self.running else None

    def _schedule_one_by_one(self, batch: Batch) -> int:
        """Give each running sequence its next tokens, preempting where blocks run out; return what is left of the budget."""
        budget, size = self._budget, self.config.block_size
        batch.preempted, batch.starved, batch.delayed = [], [], []
        granted: dict[Sequence, int] = {}  # of `running`, those before the one whose turn it is
        while len(granted) < len(self.running) and budget > 0:
            sequence = self.running[len(granted)]
            computed = self.iteration - sequence.origin if sequence.decoding else sequence.num_computed
            count = 1 if sequence.decoding else self._chunk_size(sequence, budget)
            needed = _blocks(computed + count, size) - _blocks(computed, size)
            victim: Sequence | None = None
            while victim is not sequence and self.pool.num_free < needed:
                victim = self._victim()
                refund = granted.pop(victim, 0)
                budget += refund
                self._preempt(batch, victim, was_granted=refund > 0)
            if victim is sequence:
                break
            self._grant(sequence, computed + count, needed)
            granted[sequence] = count
            budget -= count
        self._describe(batch, granted)
        return budget

    def _admit(self, batch: Batch, budget: int) -> None:
        """Let waiting sequences run, first come first served, while budget, seats and blocks last."""
        size = self.config.block_size
        while self.waiting and budget > 0 and len(self.running) < self._max_running:
            sequence = self.waiting[0]
            known, hits = sequence.num_known, 0
            if self.config.enable_prefix_caching:
                hits = self.pool.lookup(sequence.chain, (known - 1) // size)
            count = self._cut_to_threshold(known - hits * size)
            if count > budget:
                if not self.config.enable_chunked_prefill:
                    return
                count = budget
            if self._num_blocks_to_admit(sequence, hits, count) > self.pool.num_free:
                return
            self.waiting.popleft()
            self._start(batch, sequence, hits, count)
            budget -= count

    # The steps of the rule

    def _victim(self) -> Sequence:
        return max(self.running, key=_priority) if self._by_priority else self.running[-1]

    def _preempt(self, batch: Batch, sequence: Sequence, *, was_granted: bool) -> None:
        """Throw a running sequence back to the waiting queue; it keeps its tokens, not its blocks."""
        self.running.remove(sequence)
        sequence.num_known = self.num_tokens(sequence)
        self._vacate(sequence, num_granted=int(was_granted))
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        batch.preempted.append(sequence)
        if self._by_priority:
            self._enqueue(sequence)
        else:
            self.waiting.appendleft(sequence)

    def _grant(self, sequence: Sequence, computed: int, needed: int) -> None:
        """Give a running sequence the blocks for its tokens up to `computed`."""
        self.pool.allocate(needed)
        if not sequence.decoding:
            sequence.num_computed = computed
            sequence.num_blocks += needed
        self.pool.store(sequence, computed // self.config.block_size)

    def _describe(self, batch: Batch, granted: dict[Sequence, int]) -> None:
        """Enter in the batch what became of those that still run; a decode without a token is one iteration later."""
        for sequence in self.running:
            if not sequence.decoding:
                if sequence in granted:
                    batch.chunks.append((sequence, granted[sequence]))
            elif sequence not in granted:
                sequence.origin += 1
                sequence.last_iteration += 1
                self.origin_sum += 1
                batch.starved.append(sequence)
            else:
                batch.num_decodes += 1
                if sequence.waited_since_s >= 0:
                    batch.delayed.append(sequence)
        self._is_one_starved = bool(batch.starved)
        self._find_next_finish()

    def _chunk_size(self, sequence: Sequence, budget: int) -> int:
        """Return how many tokens of a prefill to compute, vLLM's cuts in vLLM's order."""
        count = self._cut_to_threshold(sequence.num_known - sequence.num_computed)
        return min(count, budget)

    def _cut_to_threshold(self, count: int) -> int:
        threshold = self.config.long_prefill_token_threshold
        present = len(self.running) + len(self.waiting)
        if threshold > 0 and present > 1:
            if self.config.long_prefill_token_threshold_adaptive:
                threshold = max(threshold, self.config.max_num_batched_tokens // present)
            return min(count, threshold)
        return count

    def _num_blocks_to_admit(self, sequence: Sequence, hits: int, count: int) -> int:
        """Count the blocks that must be free: those to compute, those to share that are in the free queue, a reserve."""
        size = self.config.block_size
        reach = sequence.num_known if self.config.scheduler_reserve_full_isl else hits * size + count
        needed = _blocks(reach, size) - hits
        if hits:
            needed += self.pool.num_unheld(sequence.chain, hits)
        return needed + self._watermark_blocks if self.running else needed

    def _start(self, batch: Batch, sequence: Sequence, hits: int, count: int) -> None:
        """Let a sequence that waited run, with its first chunk behind the cached blocks."""
        size = self.config.block_size
        if hits:
            self.pool.hold(sequence, hits)
        sequence.num_blocks, sequence.num_computed = hits, hits * size
        computed = hits * size + count
        self._grant(sequence, computed, _blocks(computed, size) - hits)
        if sequence.num_preemptions:
            batch.resumed = [*batch.resumed, sequence]
        else:
            sequence.cached_tokens = hits * size
            batch.admitted = [*batch.admitted, sequence]
        batch.chunks.append((sequence, count))
        self.running.append(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        if self._by_priority:
            insort(self.waiting, sequence, key=_priority)
        else:
            self.waiting.append(sequence)

    # Fast paths: what the rule comes to where nobody is preempted or starved

    def _schedule_at_once(self, batch: Batch) -> int | None:
        """Schedule decodes, and a prefill chunk behind them, if budget and blocks last for all; return what is left."""
        running, budget = self.running, self._budget
        if not running:
            return budget
        num_partial = len(running) - self.num_decoding
        if self._is_one_starved or num_partial > 1 or (num_partial and running[-1].decoding):
            return None
        if not num_partial:
            if not (len(running) <= self.pool.num_free or self._decodes_fit(running, None, budget)):
                return None
            decoding, partial = running, None
        else:
            decoding, partial = running[:-1], running[-1]
            if not self._decodes_fit(decoding, partial, budget):
                return None
        self._allocate_decodes(decoding, self.iteration)
        batch.num_decodes = len(decoding)
        budget -= len(decoding)
        if partial is not None and budget > 0:
            count = self._chunk_size(partial, budget)
            computed = partial.num_computed + count
            self._grant(partial, computed, _blocks(computed, self.config.block_size) - partial.num_blocks)
            batch.chunks.append((partial, count))
            budget -= count
        return budget

    def _decodes_fit(self, decoding: list[Sequence], partial: Sequence | None, budget: int) -> bool:
        """Tell whether the budget and the free blocks are enough for all decodes and one prefill chunk after them."""
        free, size = self.pool.num_free, self.config.block_size
        if len(decoding) > budget:
            return False
        if partial:
            free += partial.num_blocks - _blocks(
                partial.num_computed + self._chunk_size(partial, budget - len(decoding)), size
            )
        if free >= len(decoding):
            return True
        iteration = self.iteration
        return free >= sum([(iteration - s.origin) % size == 0 for s in decoding])

    def _allocate_decodes(self, decoding: list[Sequence], iteration: int) -> None:
        pool, size, last = self.pool, self.config.block_size, self.config.block_size - 1
        if size == 1:
            touching = decoding
        else:
            touching = [s for s in decoding if (p := (iteration - s.origin) % size) == 0 or p == last]
        for sequence in touching:
            computed = iteration - sequence.origin
            if computed % size == 0:
                pool.allocate(1)
            if (computed + 1) % size == 0:
                pool.store(sequence, (computed + 1) // size)

    # Leaps: many iterations of a batch in which each sequence decodes

    def num_leap_iterations(self, batch: Batch, limit: int) -> int:
        """Count the iterations, from this batch's on, in which nothing happens but one token for each sequence."""
        if limit <= 1 or not batch.is_undisturbed:
            return 1
        running = self.running
        if self.waiting and any(s.chain.num_named * self.config.block_size > s.num_prompt for s in running):
            return 1  # named output blocks, once cached, may let a waiting sequence in
        first = self.iteration
        count = min(limit, self._next_finish - first + 1)
        size, free = self.config.block_size, self.pool.num_free
        if len(running) * (count // size + 1) > free:
            origins = [s.origin for s in running]
            low, high = 1, count  # the first iteration has its blocks
            while low < high:
                middle = (low + high + 1) // 2
                if _blocks_taken(origins, first + 1, first + middle, size) <= free:
                    low = middle
                else:
                    high = middle - 1
            count = low
        return count

    def allocate_leap(self, first: int, stop: int) -> None:
        """Give the running sequences the blocks of decode iterations `first` to `stop`, and cache what they fill."""
        size = self.config.block_size
        taken = _blocks_taken([s.origin for s in self.running], first, stop, size)
        if taken:
            self.pool.allocate(taken)
        if self.config.enable_prefix_caching:
            for sequence in self.running:
                if (stop - sequence.origin) // size > sequence.num_cached_blocks:
                    self.pool.store(sequence, (stop - sequence.origin) // size)

    def allocate_iteration(self, iteration: int) -> None:
        """Do what `allocate_leap` does, for one iteration and in vLLM's order."""
        self._allocate_decodes(self.running, iteration)

    # What else the engine asks

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence.

        Raises:
            ValueError: it can never fit.
        """
        limit = self.config.max_model_len
        if limit is not None:
            if sequence.num_prompt >= limit:
                raise ValueError(f"prompt of {sequence.num_prompt} tokens reaches max_model_len ({limit})")
            sequence.num_total = min(sequence.num_total, limit)
        needed = -(-(sequence.num_total - 1) // self.config.block_size)
        if needed > self.pool.num_blocks:
            raise ValueError(
                f"{sequence.num_prompt} prompt and {sequence.max_tokens} output tokens need {needed} KV blocks; "
                f"the cache has {self.pool.num_blocks}"
            )
        self._enqueue(sequence)

    def update(self, batch: Batch, num_iterations: int) -> tuple[list[Sequence], list[Sequence]]:
        """End `num_iterations` iterations of a batch: return the sequences that got past their prefill, and the finished."""
        self.iteration += num_iterations
        sampled = [s for s, _ in batch.chunks if s.num_computed == s.num_known]
        for sequence in sampled:
            self._start_decoding(sequence)
        if self._next_finish >= self.iteration:
            return sampled, NOBODY
        finished = [s for s in self.running if s.decoding and s.last_iteration < self.iteration]
        for sequence in finished:
            self.remove(sequence)
        return sampled, finished

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out and free its blocks."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self._vacate(sequence)

    def num_new_tokens(self, batch: Batch) -> Iterator[tuple[Sequence, int]]:
        """Yield each sequence of the batch in flight with its tokens, in vLLM's order."""
        chunks = dict(batch.chunks)
        for sequence in self.running:
            if sequence in chunks:
                yield sequence, chunks[sequence]
            elif sequence.decoding and sequence not in batch.starved:
                yield sequence, 1

    def num_tokens(self, sequence: Sequence) -> int:
        """Count a sequence's tokens, prompt and output, between two iterations."""
        return self.iteration - sequence.origin + 1 if sequence.decoding else sequence.num_known

    @property
    def num_kv_tokens(self) -> int:
        """Context the decoding sequences read in the coming iteration, summed."""
        return self.num_decoding * (self.iteration + 1) - self.origin_sum

    # Decoding and release

    def _start_decoding(self, sequence: Sequence) -> None:
        sequence.decoding = True
        sequence.origin = self.iteration - sequence.num_known
        sequence.last_iteration = sequence.origin + sequence.num_total - 2
        self.origin_sum += sequence.origin
        self.num_decoding += 1
        self._next_finish = min(self._next_finish, sequence.last_iteration)

    def _vacate(self, sequence: Sequence, *, num_granted: int = 0) -> None:
        if sequence.decoding:
            computed = self.iteration - sequence.origin + num_granted
            sequence.num_blocks = _blocks(computed, self.config.block_size)
            sequence.decoding = False
            self.origin_sum -= sequence.origin
            self.num_decoding -= 1
            self._find_next_finish()
        self.pool.release(sequence, sequence.num_blocks)

    def _find_next_finish(self) -> None:
        self._next_finish = min([s.last_iteration for s in self.running if s.decoding], default=NEVER)


def _blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def _blocks_taken(origins: list[int], first: int, stop: int, block_size: int) -> int:
    """Count the blocks that decodes with these origins take in iterations `first` to `stop`, exclusive."""
    begin, end = first - 1, stop - 1  # ceil((i - origin) / size) = (i - 1 - origin) // size + 1
    return sum([(end - origin) // block_size - (begin - origin) // block_size for origin in origins])


def _priority(sequence: Sequence) -> tuple[int, float]:
    return sequence.priority, sequence.arrival
