"""A preparer without a process of its own, for virtual time: a template that never ends holds up everything."""

from serving.frontend.api.kinds import KindName
from serving.frontend.preparing.messages import (
    LENGTH,
    Body,
    JobResult,
    Outcome,
    PreparerModel,
    PreparingJob,
    decode_answer,
    framed,
)
from serving.frontend.preparing.work import load, outcome_of
from serving.frontend.text_model import TextModel


class InlinePreparer:
    """Prepares in the event loop; what it returns has been a message, as a process's answers are."""

    def __init__(self) -> None:
        self.has_ended = False
        self._model: TextModel

    async def load(self, model: PreparerModel, timeout_s: float) -> None:
        """Load the model, which takes no time.

        Raises:
            ModelError: it cannot be loaded.
        """
        self._model = load(model)

    async def do(self, kind: KindName, body: Body, name: str | None, *, is_only: bool) -> Outcome:
        """Do a job."""
        outcome = outcome_of(PreparingJob(0, kind, len(body), name, is_only), body, self._model)
        return decode_answer(framed(JobResult(0, outcome))[LENGTH.size :]).outcome

    def kill(self) -> None:
        """Take no more jobs."""
        self.has_ended = True

    async def close(self) -> None:
        """Take no more jobs."""
        self.kill()
