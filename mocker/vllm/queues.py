"""The sequences that do not run yet: whose turn is next, and whom the others may pass.

    `waiting`      for blocks; first come, first served, or by priority
    `fetching`     until tiers behind host memory have done something for it; it is skipped
    `holding`      it holds blocks, and its KV is on its way or has arrived; scanned before `waiting`. This is vLLM's
                   `kv_holding_waiting`. Who has nothing from it, and is skipped, goes to the front of `waiting` (`given_up`)

A preempted sequence comes back to the front of `waiting`, or to its place by priority.
"""

from bisect import insort
from collections import deque

from mocker.sequence import Sequence


class Queues:
    """Every sequence that waits is in one of three queues."""

    def __init__(self, *, by_priority: bool) -> None:
        self.waiting: deque[Sequence] = deque()
        self.fetching: dict[Sequence, None] = {}
        self.holding: list[Sequence] = []
        self.given_up: dict[Sequence, None] = {}
        """Those in `waiting` whose load brought nothing; vLLM still counts them among the loads."""
        self._by_priority = by_priority
        self._num_added = self._num_put_back = 0

    @property
    def num_sequences(self) -> int:
        """Count all of them."""
        return len(self.waiting) + len(self.fetching) + len(self.holding)

    def without_blocks(self) -> list[Sequence]:
        """Return the sequences that hold no blocks, the next one first."""
        return sorted((*self.waiting, *self.fetching), key=self._place) if self.fetching else list(self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Let a new sequence wait."""
        sequence.order = self._num_added
        self._num_added += 1
        self._enqueue(self.waiting, sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Let a preempted sequence wait again."""
        if self._by_priority:
            self._enqueue(self.waiting, sequence)
        else:
            self._num_put_back += 1
            sequence.order = -self._num_put_back
            self.waiting.appendleft(sequence)

    def await_kv(self, sequence: Sequence) -> None:
        """Let a sequence that was given blocks wait for its KV."""
        self.leave(sequence)
        self._enqueue(self.holding, sequence)

    def give_up_load(self, sequence: Sequence) -> None:
        """Let a sequence that was skipped after its load brought nothing wait with the others."""
        self.holding.remove(sequence)
        self.put_back(sequence)
        self.given_up[sequence] = None

    def fetch(self, place: int) -> None:
        """Let the sequence at a place in `waiting` wait for tiers."""
        self.fetching[self.waiting[place]] = None
        del self.waiting[place]

    def end_fetch(self, sequence: Sequence) -> None:
        """Try a sequence again, if it waited for tiers."""
        if sequence in self.fetching:
            del self.fetching[sequence]
            insort(self.waiting, sequence, key=self._place)

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence from its queue."""
        if self.given_up:
            self.given_up.pop(sequence, None)
        if self.holding and sequence in self.holding:
            self.holding.remove(sequence)
        elif sequence in self.fetching:
            del self.fetching[sequence]
        elif self.waiting[0] is sequence:
            self.waiting.popleft()
        else:
            self.waiting.remove(sequence)

    def _enqueue(self, queue: list[Sequence] | deque[Sequence], sequence: Sequence) -> None:
        if self._by_priority:
            insort(queue, sequence, key=priority)
        else:
            queue.append(sequence)

    def _place(self, sequence: Sequence) -> tuple[int, float, int]:
        return priority(sequence) if self._by_priority else (0, 0.0, sequence.order)


def priority(sequence: Sequence) -> tuple[int, float, int]:
    """Return what decides who goes first, the smallest."""
    return sequence.priority, sequence.arrival, sequence.order
