"""How many LoRA adapters may run in one iteration."""

from collections.abc import Collection, Iterable

from mocker.sequence import Sequence
from mocker.vllm.versions import Rules


class AdapterSeats:
    """vLLM's rule: a waiting sequence is skipped if its adapter would be one too many beside those of the iteration."""

    def __init__(self, most: int, rules: Rules) -> None:
        self._most = most
        self._seats_all = rules.seats_all_adapters
        self._seated: set[str] = set()

    def begin(self, running: Iterable[Sequence], *, without: Collection[Sequence]) -> None:
        """Begin an iteration in which these sequences run, some of them without a token."""
        self._seated = {s.adapter for s in running if s.adapter and (self._seats_all or s not in without)}

    def add(self, sequence: Sequence) -> None:
        """Add a sequence to the iteration."""
        if sequence.adapter:
            self._seated.add(sequence.adapter)

    def has_seat_for(self, sequence: Sequence) -> bool:
        """Return whether a sequence can join."""
        return not sequence.adapter or sequence.adapter in self._seated or len(self._seated) < self._most
