"""The link between a GPU and its host memory: when each copy starts and ends.

In each direction, copies run one after the other, in the order of their start, at full bandwidth; the two directions do
not slow each other down. So the end of a copy is known as soon as it starts.

    step i is closed with work      its loads start with it; copies that it flushes, and loads within it, must end before
                                    it computes
    step i + 1 starts               the stores of step i start: the KV that they copy is computed by then

Semantics: the worker's side of vLLM 0.32's and 0.33's OffloadingConnector. With SGLang's HiCache, the KV of a store is computed when
it is asked for (`Work.ready`), and a step waits for its loads layer by layer (`overlapped`).
"""

from collections import deque
from math import inf

from mocker.tiers.config import HostMemory
from mocker.tiers.copies import NO_WORK, Copy, Work


class Direction:
    """One direction of the link."""

    def __init__(self) -> None:
        self.copies: deque[tuple[float, Copy]] = deque()  # in progress, and when each ends
        self.free_s = 0.0
        """When all started copies have ended."""
        self.num_copies = 0
        self.num_bytes = 0.0
        self.busy_s = 0.0

    @property
    def next_end_s(self) -> float:
        """When the next copy ends (s); infinity if none is in progress."""
        return self.copies[0][0] if self.copies else inf


class HostLink:
    """Copies in progress."""

    def __init__(self, memory: HostMemory | None) -> None:
        """Start with none; without host memory, there never are any."""
        self._memory = memory or HostMemory(num_chunks=1)
        self._bytes_per_chunk = self._memory.chunk_bytes
        self._num_layers = self._memory.num_layers
        self.loads, self.stores = Direction(), Direction()
        self.awaited_s = 0.0
        """When the loads end for which the next step waits, layer by layer (s); 0 if it waits for none."""
        self.next_end_s = inf
        """When the next copy ends (s); infinity if none is in progress."""
        self._put_off: list[Copy] = []  # stores that start with the next step
        self.num_flushes = 0
        """Copies that a step waited for."""
        self.stall_s = 0.0
        """How long steps waited for them."""

    def begin(self, work: Work, now: float) -> float:
        """Start the copies of a step that starts now; return how long the step waits for some of them (s)."""
        if work is NO_WORK and not self._put_off:
            return 0.0
        for copy in (*self._put_off, *work.ready, *[store for store in work.stores if store in work.flushed]):
            self._send(self.stores, copy, now)
        self._put_off = [store for store in work.stores if store not in work.flushed]
        stall_s = 0.0
        if work.flushed:
            ends = [end for way in (self.loads, self.stores) for end, copy in way.copies if copy in work.flushed]
            stall_s = max([end - now for end in ends if end > now], default=0.0)
            self.num_flushes += len(ends)
            self.stall_s += stall_s
        for copy in work.loads:
            self._send(self.loads, copy, now + stall_s)
        if work.loads and self._num_layers:
            self.awaited_s = self.loads.free_s
        within = [copy for copy in work.loads if copy.is_within_step]
        if within:
            end_s = max([end for end, copy in self.loads.copies if copy in within])
            self.num_flushes += len(within)
            self.stall_s += end_s - now - stall_s
            stall_s = end_s - now
        return stall_s

    def overlapped(self, now: float, duration: float) -> float:
        """Return how long a step takes that starts now and whose layers each wait for their KV to be loaded (s).

        All layers take the same time, to load as to compute, so the slower of both sets the pace, and one layer of the
        other comes before it or after it.
        """
        load_s, self.awaited_s = self.awaited_s - now, 0.0
        return max(load_s, duration) + min(load_s, duration) / self._num_layers if load_s > 0 else duration

    def ended(self, now: float, *, has_loads: bool = True) -> list[Copy]:
        """Return the copies that have ended, stores first and then loads, if these are wanted; forget them."""
        over: list[Copy] = []
        for way in (self.stores, self.loads) if has_loads else (self.stores,):
            while way.copies and way.copies[0][0] <= now:
                over.append(way.copies.popleft()[1])
        self.next_end_s = min(self.loads.next_end_s, self.stores.next_end_s)
        return over

    def _send(self, way: Direction, copy: Copy, now: float) -> None:
        num_bytes = copy.num_chunks * self._bytes_per_chunk
        duration_s = self._memory.latency_s + num_bytes / self._memory.bandwidth
        way.free_s = max(way.free_s, now) + duration_s
        way.num_copies += 1
        way.num_bytes += num_bytes
        way.busy_s += duration_s
        way.copies.append((way.free_s, copy))
        self.next_end_s = min(self.next_end_s, way.next_end_s)
