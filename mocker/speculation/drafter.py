"""What a scheduler asks about drafts: how many there are, and how many of them the model accepts.

    synchronous     `update` of step i --> `proposed`: drafts for step i + 1 --> ... --> `update` of step i + 1 --> `accepted`
    asynchronous    every decode has all the drafts that the engine is set to; the scheduler does not ask for `proposed`

A step that verifies d drafts of a sequence, of which a are accepted, brings it a + 1 tokens: the accepted ones, and the
model's own token after them.
"""

from abc import ABC, abstractmethod

from mypy_extensions import mypyc_attr

from mocker.sequence import Sequence


@mypyc_attr(allow_interpreted_subclasses=True)
class Drafter(ABC):
    """Answers for all sequences of an engine. Answers may depend on `sequence.num_known`, but not on who else runs."""

    @abstractmethod
    def proposed(self, sequence: Sequence) -> int:
        """Count the drafts for a sequence's next step; `sequence.num_known` tokens are known.

        It is asked once after each step that brought a sequence a token, and only in synchronous scheduling.
        """

    @abstractmethod
    def accepted(self, sequence: Sequence, num_drafts: int) -> int:
        """Count the accepted drafts among the first `num_drafts`, at least one, that followed `sequence.num_known` tokens.

        It is asked once for each step that had drafts of a sequence, when the step ends, in the order of its steps. It is
        not asked for sequences that are over, or whose output is dropped.
        """
