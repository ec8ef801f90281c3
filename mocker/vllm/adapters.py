"""How many LoRA adapters may run in one iteration."""

from collections.abc import Iterable

from mocker.sequence import Sequence


class AdapterSeats:
    """vLLM's rule: a waiting sequence is skipped if its adapter would be one too many beside those of the iteration."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._seated: set[str] = set()

    def seat(self, sequences: Iterable[Sequence], *, is_more: bool = False) -> None:
        """Take the adapters of these sequences, which have tokens in the iteration, beside those there or instead of them."""
        found = {sequence.adapter for sequence in sequences if sequence.adapter}
        self._seated = self._seated | found if is_more else found

    def has_seat_for(self, sequence: Sequence) -> bool:
        """Return whether a sequence can join."""
        return not sequence.adapter or sequence.adapter in self._seated or len(self._seated) < self._most
