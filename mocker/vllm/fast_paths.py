"""The rule's result at once, where blocks suffice for all, so that nobody is preempted or starved.

The budget suffices for all decodes: it has a token for each sequence that may run (`EngineConfig`).

running    decode  decode  decode  ...  decode  [one partial prompt]
           the same list as before, if the last batch is steady
"""

from mocker.batch import Batch
from mocker.sequence import RUNNING, Sequence
from mocker.vllm.config import EngineConfig
from mocker.vllm.memory import Memory
from mocker.vllm.running import Running


class FastPaths:
    """Schedules decodes, and a prefill chunk after them, without asking one after another."""

    def __init__(self, config: EngineConfig, memory: Memory, running: Running) -> None:
        self._running = running
        self._pool = memory.pool
        self._budget = config.max_num_batched_tokens
        self._most_blocks = running.decoding.most_blocks

    def schedule(self, batch: Batch) -> int | None:
        """Return the rest of the budget, None if the rule has to decide; the batch is then as it was."""
        state, budget = self._running, self._budget
        running = state.sequences
        if state.decoding.next_finish < state.iteration:
            state.retire()
        if not running:
            return budget
        ending, steady, decoding = state.ending, state.steady, state.decoding
        num_partial = len(running) - decoding.context.num_sequences
        if ending:
            num_partial -= sum([s.state == RUNNING for s in ending])
        partial = running[-1] if num_partial else None
        if num_partial and state.interval.is_holding:
            return None
        if state.starved or num_partial > 1 or (partial is not None and (partial.decoding or partial in ending)):
            return None
        if steady is not None:
            decodes = steady.decodes
        elif ending:
            decodes = [s for s in running if s.decoding]
        else:
            decodes = running[:-1] if num_partial else running[:]
        num_decodes, count, needed = len(decodes), 0, 0
        if partial is not None and budget > num_decodes:
            count = state.chunk_size(partial, budget - num_decodes)
            needed = state.num_needed(partial, partial.num_computed, count) if count else 0
        if (num_partial or num_decodes * self._most_blocks > self._pool.num_free) and not self._suffice(
            decodes, needed
        ):
            return None
        if decodes:
            decoding.grow(decodes, state.iteration)
        batch.decodes = decodes
        if count and partial is not None:
            computed = partial.num_computed + count
            state.grant(partial, computed, needed, num_cacheable=computed)
            batch.chunks.append((partial, count))
        return budget - num_decodes - count

    def _suffice(self, decodes: list[Sequence], needed: int) -> bool:
        """Return whether the free blocks, beside those needed for a chunk, suffice for all decodes."""
        free, state = self._pool.num_free - needed, self._running
        return free >= len(decodes) * self._most_blocks or free >= state.decoding.num_new_blocks(
            decodes, state.iteration
        )
