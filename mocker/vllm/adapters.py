"""How many LoRA adapters may run in one iteration."""

from collections.abc import Iterable

from mocker.sequence import Sequence


class AdapterSeats:
    """vLLM's rule: a waiting sequence is skipped if its adapter would be one too many beside those of the iteration."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._seated: set[str] = set()

    def reset(self, sequences: Iterable[Sequence]) -> None:
        """Begin an iteration in which only these sequences have tokens yet."""
        self._seated = {sequence.adapter for sequence in sequences if sequence.adapter}

    def add(self, sequence: Sequence) -> None:
        """Add a sequence to the iteration."""
        if sequence.adapter:
            self._seated.add(sequence.adapter)

    def has_seat_for(self, sequence: Sequence) -> bool:
        """Return whether a sequence can join."""
        return not sequence.adapter or sequence.adapter in self._seated or len(self._seated) < self._most
