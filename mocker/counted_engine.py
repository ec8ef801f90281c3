"""An engine whose steps may bring a sequence several tokens, or none: it speculates, or several batches are in flight.

One that has an encoder is here, too: each of its steps may wait for that.

No step spans more than one iteration, and the tokens of each are counted when it ends.
"""

from mocker.contract import AdapterMemory, EngineSettings
from mocker.core import Core
from mocker.engine import Engine
from mocker.gap_log import CountedGapLog, GapLog
from mocker.media import EncoderCounts
from mocker.sequence import Sequence
from mocker.speculation.counts import DraftCounts
from mocker.speculation.random_drafter import RandomDrafter
from mocker.step import CountedOutput
from mocker.step_times import CountedStepTimes, StepTimes
from mocker.tiers.config import HostMemory
from mocker.timing.model import TimingModel


class CountedEngine(Engine):
    """See the module."""

    def __init__(
        self,
        config: EngineSettings,
        core: Core,
        timing: TimingModel,
        *,
        host: HostMemory | None = None,
        adapters: AdapterMemory | None = None,
        kv_events: bool = True,
        ordered_events: bool = True,
        drafter: RandomDrafter | None = None,
        encoder_counts: EncoderCounts | None = None,
        encoding_s: float = 0.0,
    ) -> None:
        """Lay out the iterations of an idle core, which asks this drafter if it speculates; see `new_engine`.

        If it has an encoder, `encoder_counts` say what that does, and `encoding_s` how long a token of it takes (s).
        """
        self._encoding_s = encoding_s
        super().__init__(
            config, core, timing, host=host, adapters=adapters, kv_events=kv_events, ordered_events=ordered_events
        )
        self._drafter = drafter
        self._encoder_counts = encoder_counts

    @property
    def draft_counts(self) -> DraftCounts | None:
        """What came of its drafts; None if it does not speculate."""
        return None if self._drafter is None else self._drafter.counts

    @property
    def encoder_counts(self) -> EncoderCounts | None:
        """What its encoder did; None if it has none."""
        return self._encoder_counts

    def _new_log(self, core: Core) -> GapLog:
        return CountedGapLog(core)

    def _new_times(self, model: TimingModel, core: Core, *, may_load: bool) -> StepTimes:
        return CountedStepTimes(model, core, may_load=may_load, encoding_s=self._encoding_s)

    def num_known_tokens(self, sequence: Sequence) -> int:
        """Count the tokens of a sequence, prompt and output, up to the last step that ended."""
        return self._core.num_tokens(sequence)

    def complete(self) -> CountedOutput:
        """End the step in flight; its output says how many tokens each decode has."""
        step, log = self.step, self.log
        assert step is not None, "no step in flight"
        counts = self.draft_counts
        num_before = 0 if counts is None else counts.steps
        output, batch = super().complete(), step.batch
        assert isinstance(log, CountedGapLog)
        log.add_emitted(step.end, batch.emitted)
        if counts is not None and counts.steps > num_before:
            counts.batches += 1
        return CountedOutput(output, batch.emitted)
