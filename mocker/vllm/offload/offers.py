"""What host memory has to do with each batch: prompts are fetched into it before, and new KV is offered to it after."""

from mocker.batch import Batch
from mocker.sequence import WAITING, Sequence
from mocker.vllm.memory import Memory
from mocker.vllm.running_queue import RunningQueue


class Offers:
    """Fetches prompts from tiers before it is their turn, and offers the KV that batches compute."""

    def __init__(self, memory: Memory, running: RunningQueue) -> None:
        self.to_prefetch: list[Sequence] = []  # new; tiers behind host memory may have parts of their prompts
        self._offload = memory.offload
        self._blocks = memory.blocks
        self._running = running

    def queue_prefetch(self, sequence: Sequence) -> None:
        """Start to fetch the prompt of a new sequence with the next batch, if that is done before it is its turn."""
        if self._offload.prefetches and sequence.reads_cache and not sequence.is_remote_prefill:
            self.to_prefetch.append(sequence)

    def prefetch(self) -> None:
        """Start fetching the parts of new prompts that are neither here nor in host memory."""
        for sequence in self.to_prefetch:
            if sequence.state == WAITING:
                self._offload.prefetch(sequence, self._blocks.num_cached(sequence))
        self.to_prefetch.clear()

    def offer(self, batch: Batch) -> bool:
        """Offer the chunks that a batch completes, and those of sequences ended since; return whether copies result."""
        offload, running = self._offload, self._running
        is_prompt_only, refused = offload.is_prompt_only, offload.refused
        if is_prompt_only and not refused:
            if not batch.chunks:
                return not offload.is_quiet and offload.end_schedule(())
            return offload.end_schedule([(sequence, sequence.num_computed) for sequence, _ in batch.chunks])
        chunks = {sequence for sequence, _ in batch.chunks}
        offers = []
        for sequence in running.sequences:
            if sequence in chunks:
                offers.append((sequence, min(sequence.num_computed, sequence.num_known)))
            elif (not is_prompt_only or sequence in refused) and (count := running.num_offered(batch, sequence)):
                offers.append((sequence, count))
        return offload.end_schedule(offers)
