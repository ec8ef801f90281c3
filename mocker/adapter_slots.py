"""Where an engine's LoRA adapters are: in slots on the GPU, in host memory, or on disk; and what it takes to move them.

    disk -- read --> host memory, the least recently used go -- load --> a slot on the GPU, the least recently used go
                     `max_cpu_loras`                                     `max_loras`

A step begins with what its requests need: it waits for each adapter that has no slot. The adapters of a step always have
room, because the scheduler starts no request whose adapter would be one too many.

Semantics: vLLM's LRUCacheWorkerLoRAManager.
"""

from collections import OrderedDict

from mocker.batch import Batch
from mocker.contract import AdapterMemory
from mocker.sequence import Sequence


class AdapterCounts:
    """What was done for an adapter."""

    __slots__ = ("loads", "reads", "stall_s")

    def __init__(self) -> None:
        self.loads = 0
        """Copies to a slot."""
        self.reads = 0
        """Those of them before which it was read from disk."""
        self.stall_s = 0.0
        """How long steps waited for both."""


class AdapterSlots:
    """The adapters of one engine, the least recently used first."""

    def __init__(self, memory: AdapterMemory) -> None:
        """Begin with none."""
        self._memory = memory
        self._on_gpu: OrderedDict[str, None] = OrderedDict()
        self._on_host: OrderedDict[str, None] = OrderedDict()
        self.counts: dict[str, AdapterCounts] = {}
        """What was done for each adapter so far."""

    @property
    def loaded(self) -> list[str]:
        """The adapters that have slots."""
        return list(self._on_gpu)

    def begin(self, batch: Batch) -> float:
        """Move what a batch needs to the GPU; return how long its step waits for that (s)."""
        if not (batch.admitted or batch.resumed or batch.delayed):
            return 0.0
        wanted = dict.fromkeys([s.adapter for s in batch.decodes] + [s.adapter for s, _ in batch.chunks])
        wanted.pop("", None)
        missing = [adapter for adapter in wanted if adapter not in self._on_gpu]
        for adapter in wanted:
            self._touch(adapter)
        return sum([self._load(adapter) for adapter in missing])

    def leave(self, sequences: list[Sequence]) -> None:
        """Note that sequences have computed their last tokens: their adapters were used until now."""
        for sequence in sequences:
            self._touch(sequence.adapter)

    def _touch(self, adapter: str) -> None:
        for place in (self._on_gpu, self._on_host):
            if adapter in place:
                place.move_to_end(adapter)

    def _load(self, adapter: str) -> float:
        counts = self.counts.get(adapter)
        if counts is None:
            counts = self.counts[adapter] = AdapterCounts()
        seconds = self._memory.load_s
        if adapter not in self._on_host:
            if len(self._on_host) >= self._memory.max_cpu_loras:
                gone, _ = self._on_host.popitem(last=False)
                self._on_gpu.pop(gone, None)
            self._on_host[adapter] = None
            counts.reads += 1
            seconds += self._memory.read_s
        if len(self._on_gpu) >= self._memory.max_loras:
            self._on_gpu.popitem(last=False)
        self._on_gpu[adapter] = None
        counts.loads += 1
        counts.stall_s += seconds
        return seconds
