"""A drafter that draws how many drafts are accepted."""

from zlib import crc32

from mocker.sequence import Sequence
from mocker.speculation.counts import DraftCounts
from mocker.speculation.drafter import Drafter

WORD = (1 << 64) - 1


class RandomDrafter(Drafter):
    """Always proposes all drafts, and draws how many are accepted.

    What is drawn depends on the request and on how many of its tokens are known, so no schedule changes it.
    """

    def __init__(self, rates: tuple[float, ...], seed: int = 0) -> None:
        self.counts = DraftCounts([0] * len(rates))
        self._rates = rates
        self._seed = seed

    def proposed(self, sequence: Sequence) -> int:
        """See `Drafter`."""
        return len(self._rates)

    def accepted(self, sequence: Sequence, num_drafts: int) -> int:
        """See `Drafter`."""
        name = sequence.id if isinstance(sequence.id, int) else crc32(sequence.id.encode())
        drawn, count = uniform(self._seed, name, sequence.num_known), 0
        while count < num_drafts and drawn < self._rates[count]:
            self.counts.accepted[count] += 1
            count += 1
        self.counts.steps += 1
        self.counts.drafts += num_drafts
        return count


def uniform(seed: int, name: int, place: int) -> float:
    """Draw from 0 to 1, always the same for the same arguments: the finaliser of SplitMix64 (Steele et al. 2014), twice."""
    return _mixed((_mixed((seed << 40) ^ name) + place) & WORD) / (1 << 64)


def _mixed(word: int) -> int:
    word = (word + 0x9E3779B97F4A7C15) & WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD
    return word ^ (word >> 31)
