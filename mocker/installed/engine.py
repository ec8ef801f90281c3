"""An engine with an installed scheduler."""

from mocker.engine import Engine
from mocker.sequence import Sequence


class InstalledEngine(Engine):
    """Its core counts the tokens of each sequence."""

    def num_known_tokens(self, sequence: Sequence) -> int:
        """Count the tokens of a sequence, prompt and output, up to the last step that ended."""
        return self._core.num_tokens(sequence)
