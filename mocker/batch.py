"""The work of an iteration."""

from typing import Final

from mocker.sequence import Sequence

NOBODY: Final[list[Sequence]] = []  # shared, never changed


class Batch:
    """The work of one iteration, or of several consecutive ones if it is the same."""

    __slots__ = (
        "admitted",
        "chunks",
        "decodes",
        "delayed",
        "drafts",
        "emitted",
        "is_undisturbed",
        "iteration",
        "num_encoder_tokens",
        "num_kv_tokens",
        "preempted",
        "resumed",
        "sampled",
        "starved",
    )

    # Set only where decodes may get several tokens, or none (`CountedRunning`):
    drafts: dict[Sequence, int]
    """Those to verify; of a chunk, those tokens of it that only pad it."""
    emitted: list[tuple[Sequence, int]]
    """Once it is known: the decodes with tokens, and how many."""
    num_encoder_tokens: int
    """What is encoded before it."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration
        self.is_undisturbed = False  # True if only a token for each decoding sequence happens
        self.decodes = NOBODY  # one token each, and their drafts; never changed in place
        self.num_kv_tokens = 0  # context that the decodes read in that iteration, drafts included, summed
        self.chunks: list[tuple[Sequence, int]] = []  # prefill: sequence, tokens
        self.sampled: list[Sequence] = NOBODY  # those whose prefill this completes
        self.admitted: list[Sequence] = NOBODY
        self.resumed: list[Sequence] = NOBODY
        self.preempted: list[Sequence] = NOBODY
        self.starved: list[Sequence] = NOBODY  # decoding, but the budget was spent
        self.delayed: list[Sequence] = NOBODY  # decoding again after having been starved

    @property
    def is_empty(self) -> bool:
        """True if nothing is computed: the running sequences were preempted, or have their last token in flight."""
        return not (self.decodes or self.chunks)

    def computes(self, sequence: Sequence) -> bool:
        """Return whether it computes tokens of a sequence."""
        return sequence in self.decodes or sequence in [one for one, _ in self.chunks]


class BatchOfRanks(Batch):
    """The work of ranks that step together, as a whole, and what each computes: the slowest decides how long it takes."""

    __slots__ = ("parts",)

    def __init__(self, iteration: int) -> None:
        super().__init__(iteration)
        self.parts: list[Batch] = []
