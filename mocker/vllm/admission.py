"""Who starts: vLLM's rule for waiting sequences, after the running ones, unless one of these was preempted.

`holding`, then `waiting`: the next one
     its KV is loading, its adapter has no seat, or it waits for a tier or a copy --> skip it; those behind it may start
     its KV is elsewhere, and blocks are free                                     --> its load starts
     budget and blocks are free                                                   --> it runs, with a first chunk
     otherwise                                                                    --> stop: those behind it wait as well
"""

from typing import Literal

from mocker.batch import NOBODY, Batch
from mocker.contract import Outbox
from mocker.sequence import LOADED, LOADING, RUNNING, Sequence
from mocker.vllm.adapters import AdapterSeats
from mocker.vllm.config import EngineConfig
from mocker.vllm.encoder import Encoder
from mocker.vllm.loads import Loads
from mocker.vllm.memory import Memory
from mocker.vllm.queues import Queues
from mocker.vllm.running_queue import RunningQueue
from mocker.vllm.speculation import Speculation

Outcome = Literal["start", "skip", "stop"]
"""What comes of a waiting sequence's turn: see the module. To start may be to load."""


class Admission:
    """Starts waiting sequences, or loads of their KV, while budget, seats and blocks last."""

    def __init__(
        self,
        config: EngineConfig,
        memory: Memory,
        running: RunningQueue,
        queues: Queues,
        loads: Loads | None,
        adapters: AdapterSeats | None,
        encoder: Encoder | None,
        outbox: Outbox,
    ) -> None:
        self._max_running = config.max_running
        self._config = config
        self._blocks = memory.blocks
        self._has_groups = memory.has_groups
        self._has_threshold = config.long_prefill_token_threshold > 0
        self._running = running
        self._interval = running.interval
        self._speculation = speculation = Speculation(config)
        self._speculates, self._num_slots = speculation.num_drafts > 0, speculation.num_slots
        self._queues = queues
        self._loads = loads
        self._offload = memory.offload
        self._loads_within_step = memory.offload.loads_within_step
        self._stats = memory.prefix_cache_stats
        self._adapters = adapters
        self._encoder = encoder
        self._skips_unencoded = config.rules.skips_unencoded
        self._outbox = outbox

    def admit(self, batch: Batch, budget: int, *, takes_new: bool) -> None:
        """Go through those that hold blocks, then if `takes_new` through the others, each first come, first served."""
        if self._loads_within_step:
            self._offload.begin_step()
        place = 0  # in `holding`, after those that are loading or skipped
        num_skipped = 0  # of `waiting`
        empty = NOBODY  # of `holding`, skipped though nothing of them is computed
        running, holding, waiting, interval = self._running, self._queues.holding, self._queues.waiting, self._interval
        if self._adapters is not None:
            self._adapters.begin(running.sequences, without=running.tokenless(batch))
        while budget > 0 and len(running.sequences) < self._max_running:
            is_holding = place < len(holding)
            if is_holding:
                sequence = holding[place]
                if sequence.state == LOADING:
                    place += 1
                    continue
                if sequence.state == LOADED:
                    assert self._loads is not None, "only loads hold blocks"
                    self._loads.promote(sequence)
            elif num_skipped < len(waiting) and takes_new:
                sequence = waiting[num_skipped]
            else:
                break
            is_ready = self._adapters is None or self._adapters.has_seat_for(sequence)
            if running.drains and running.is_draining(sequence):
                is_ready = False
            outcome, num_tokens = self._try(batch, sequence, budget) if is_ready else ("skip", 0)
            if interval.is_on and (outcome == "skip" or sequence.state == LOADING):
                interval.pass_over(sequence)
            if outcome == "start":
                budget -= num_tokens
            elif outcome == "stop":
                break
            elif is_holding:
                place += 1
                if not sequence.num_computed:
                    empty = [*empty, sequence]
            elif self._offload.is_fetching(sequence):
                self._queues.fetch(num_skipped)
            else:
                num_skipped += 1
        if empty:
            for sequence in reversed(empty):
                self._queues.give_up_load(sequence)

    def _try(self, batch: Batch, sequence: Sequence, budget: int) -> tuple[Outcome, int]:
        """Start the sequence whose turn it is, or its load, if possible; return the outcome and what it takes of the budget."""
        known, computed, cached, loaded = sequence.num_known, sequence.num_computed, 0, 0
        if not computed:
            computed = cached = self._blocks.num_cached(sequence)
        if sequence.is_remote_prefill:
            return self._start_load(sequence, cached, known)
        if not sequence.num_blocks and sequence.reads_cache:
            more = self._offload.ask(sequence, computed)
            if more is None:
                return "skip", 0
            if more and not (self._loads_within_step and self._offload.reserve(more, known - computed)):
                return self._start_load(sequence, cached, computed + more)
            loaded = more
            computed += loaded
        if self._interval.is_holding and computed < known - 1:
            return "stop", 0
        count = known - computed
        if self._has_threshold:
            count = self._running.cut_to_threshold(count)
        if count > budget:
            if not self._config.enable_chunked_prefill:
                return "stop", 0
            count = budget
        num_padding = 0
        if self._speculates:
            num_padding = self._running.num_padding(batch, computed) if known - computed == 1 else 0
            if num_padding >= budget:
                return "stop", 0  # vLLM prefers not to start it
        count += num_padding
        if self._has_groups and (cut := self._blocks.cut(sequence, computed, count)) < count:
            count, num_padding = cut, 0
        encoder = self._encoder if sequence.media else None
        if encoder is not None and count:
            count = encoder.cut(sequence, computed, count)
            if not count:
                return ("skip" if self._skips_unencoded else "stop"), 0
        is_alone = not self._running.sequences
        if not count or not self._blocks.fits(sequence, cached, computed, count, is_alone=is_alone):
            if encoder is not None and count:
                encoder.release(sequence)
            return "stop", 0
        if encoder is not None:
            encoder.take(sequence)
        self._start(batch, sequence, cached, computed - loaded, loaded)
        self._give_first(batch, sequence, count, num_padding)
        return "start", count + self._num_slots

    def _start_load(self, sequence: Sequence, num_local: int, num_computed: int) -> tuple[Outcome, int]:
        assert self._loads is not None, "KV of several groups comes from nowhere else"
        return "start" if self._loads.start(sequence, num_local, num_computed) else "stop", 0

    def _start(self, batch: Batch, sequence: Sequence, cached: int, num_local: int, num_loaded: int) -> None:
        """Start a waiting sequence with what is cached; `num_loaded` tokens more are loaded before this step computes."""
        self._queues.leave(sequence)
        if not sequence.num_blocks:
            self._blocks.start(sequence, cached)
        if not sequence.num_computed:  # also if its only token was loaded: vLLM looks it up again
            self._stats.count(sequence, num_local)
        if num_loaded:
            self._offload.load(sequence, num_local, num_loaded, is_within_step=True)
            self._stats.count_load(sequence, 0)
        sequence.num_computed = num_local + num_loaded
        if sequence.num_preemptions:
            batch.resumed = [*batch.resumed, sequence]
        else:
            batch.admitted = [*batch.admitted, sequence]
            if sequence.is_token_shipped:
                self._outbox.shipped.append(sequence)
        sequence.state = RUNNING
        if self._adapters is not None:
            self._adapters.add(sequence)

    def _give_first(self, batch: Batch, sequence: Sequence, count: int, num_padding: int) -> None:
        """Give a sequence that starts its first chunk, of which the last tokens may only pad it, and its blocks."""
        if self._interval.is_on:
            self._interval.forget(sequence)
        needed = self._blocks.num_needed(sequence, sequence.num_computed, count)
        computed = sequence.num_computed + count
        self._running.grant(sequence, computed, needed, num_cacheable=computed - num_padding)
        batch.chunks.append((sequence, count))
        self._running.start(batch, sequence, count, num_padding)
