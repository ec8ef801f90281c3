"""What came of drafts, counted."""


class DraftCounts:
    """What came of drafts so far."""

    def __init__(self, accepted: list[int]) -> None:
        self.steps = 0
        """How often drafts of a sequence were verified."""
        self.drafts = 0
        """How many tokens that were."""
        self.batches = 0
        """In how many steps of the engine."""
        self.accepted = accepted
        """How often each of them was accepted, by position."""
