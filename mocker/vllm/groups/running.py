"""The sequences that run, where groups of layers have tables of their own; positions still have a closed form."""

from mocker.batch import Batch
from mocker.sequence import Sequence
from mocker.vllm.config import EngineConfig
from mocker.vllm.decoding import Decoding
from mocker.vllm.groups.blocks import GroupedBlocks
from mocker.vllm.groups.decoding import GroupedDecoding
from mocker.vllm.memory import Memory
from mocker.vllm.running import Running


class GroupedRunning(Running):
    """`Running`, and what its rule asks of several tables."""

    def _decoding(self, config: EngineConfig, memory: Memory) -> Decoding:
        assert isinstance(memory.blocks, GroupedBlocks)
        self._chunks: dict[Sequence, int] = {}  # of the batch closed last, if it may be in flight
        cache, size = memory.blocks.cache, config.block_size
        return GroupedDecoding(self.sequences, cache, self._chunks, block_size=size, lag=self.lag)

    def chunk_size(self, sequence: Sequence, budget: int) -> int:
        """See `Running`; states are complete only where a step ends."""
        return self._blocks.cut(sequence, sequence.num_computed, super().chunk_size(sequence, budget))

    def leave_behind(self, sequence: Sequence) -> None:
        """See `Running`; it stays free if the sequence then does not get the blocks that it needs."""
        self._blocks.skip(sequence, sequence.computed(self.iteration) - self._num_in_flight(sequence))

    def num_needed(self, sequence: Sequence, computed: int, count: int) -> int:
        """See `Running`."""
        return self._blocks.num_needed(sequence, computed, count)

    def grant(self, sequence: Sequence, computed: int, needed: int, *, num_cacheable: int) -> None:
        """See `RunningQueue`."""
        self.leave_behind(sequence)
        self._blocks.grow(sequence, computed, needed)
        if sequence.decoding:
            sequence.next_touch = 0
        else:
            sequence.num_computed = computed
        self._blocks.store(sequence, num_cacheable)

    def _num_in_flight(self, sequence: Sequence) -> int:
        """Count the computed tokens of a sequence whose step has not ended."""
        if self.num_ended == self.iteration:
            return 0
        if sequence in self._chunks:
            return self._chunks[sequence]
        return int(sequence.decoding and sequence not in self.starved)

    def close(self, batch: Batch, *, is_disturbed: bool) -> Batch:
        """See `RunningQueue`."""
        self._chunks.clear()
        if self.lag:
            self._chunks.update(batch.chunks)
        return super().close(batch, is_disturbed=is_disturbed)
