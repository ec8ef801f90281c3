"""How long the steps of an engine take: what to ask its step-time model, and how often.

The times of a batch of decodes are a ramp, which the model is asked for once: steps that follow each other with the same
batch go on along it. Any other batch is asked for by itself.
"""

from mocker.batch import Batch, BatchOfRanks
from mocker.core import Core
from mocker.sequence import Sequence
from mocker.step import Step
from mocker.timing.model import Load, Prefill, Ramp, TimingModel, chunk


class StepTimes:
    """Gives the steps of a core their durations."""

    def __init__(self, model: TimingModel, core: Core, *, may_load: bool) -> None:
        """Begin with an idle engine, which may load the KV of prompts if `may_load`."""
        self.model = model
        self._core = core
        self._may_load = may_load
        self._ramp = Ramp(0.0)  # of `_batch`, since `_origin`
        self._batch: Batch | None = None
        self._origin = 0.0
        self.num_passed = 0
        """Iterations since the ramp began that are accounted for."""
        self.last_end_s = -1.0
        """When the last step ended."""

    def change(self, model: TimingModel) -> None:
        """Use another model from the next step on."""
        self.model = model
        self._batch = None

    def stretched(self, step: Step, end: float) -> Step:
        """Return a step of one iteration with a later end (s)."""
        assert step.num_iterations == 1, "only a single iteration can be stretched"
        self._batch = None
        start = step.start
        return Step(step.batch, start, Ramp(end - start), 0, 1, end)

    def decoding_step(self, batch: Batch, now: float, limit: int) -> Step:
        """Return a step of decodes, with all iterations, at most `limit`, before anything else can happen."""
        if batch is not self._batch or now != self.last_end_s or self.num_passed >= self._ramp.num_steps:
            self._ramp, self._batch = self._decode_ramp(batch), batch
            self._origin, self.num_passed = now, 0
        ramp, passed, count = self._ramp, self.num_passed, 1
        if limit > 1:
            count = self._core.num_leap_iterations(batch, min(limit, ramp.num_steps - passed))
        return Step(batch, self._origin, ramp, passed, count, self._origin + ramp.elapsed(passed + count))

    def _decode_ramp(self, batch: Batch) -> Ramp:
        """Return the times of a batch of decodes, starting with the iteration that starts now."""
        num_decodes = len(batch.decodes)
        num_kv_tokens = batch.num_kv_tokens + num_decodes * (self._core.num_ended - batch.iteration)
        return self.model.decode(num_decodes, num_kv_tokens)

    def mixed_s(self, batch: Batch) -> float:
        """Return how long any batch takes (s). To the GPU, the one token of a prompt whose KV was loaded is a decode."""
        if isinstance(batch, BatchOfRanks):
            return self.model.among([_load_of(part) for part in batch.parts if not part.is_empty])
        num_decodes, num_kv_tokens, chunks = len(batch.decodes), batch.num_kv_tokens, batch.chunks
        if self._may_load:
            chunks = [(sequence, count) for sequence, count in chunks if count > 1 or sequence.num_computed == 1]
            num_kv_tokens += sum([s.num_computed - 1 for s, count in batch.chunks if count == 1])
            num_decodes += len(batch.chunks) - len(chunks)
        if not chunks:
            return self.model.decode(num_decodes, num_kv_tokens).first
        if len(chunks) == 1:
            sequence, count = chunks[0]
            prefill = chunk(count, sequence.num_computed - count)
            return self.model.mixed(prefill, num_decodes, num_kv_tokens)
        return self.model.mixed(_sum_of(chunks), num_decodes, num_kv_tokens)


def _load_of(part: Batch) -> Load:
    """Return what a rank computes."""
    return Load(_sum_of(part.chunks) if part.chunks else None, len(part.decodes), part.num_kv_tokens)


def _sum_of(chunks: list[tuple[Sequence, int]]) -> Prefill:
    """Return the chunks of a batch, summed."""
    num_tokens = num_context_tokens = 0
    num_pairs = 0.0
    for sequence, count in chunks:
        context = sequence.num_computed - count
        num_tokens += count
        num_context_tokens += context
        num_pairs += count * (context + count / 2)
    return Prefill(num_tokens, num_context_tokens, num_pairs, len(chunks))


class CountedStepTimes(StepTimes):
    """The same for an engine whose decodes may verify drafts, and whose prompts may have media."""

    def __init__(self, model: TimingModel, core: Core, *, may_load: bool, encoding_s: float) -> None:
        """Begin with an idle engine; `encoding_s`: the encoder's time for a token (s)."""
        super().__init__(model, core, may_load=may_load)
        self._encoding_s = encoding_s

    def mixed_s(self, batch: Batch) -> float:
        """Return how long a batch takes (s). To the GPU, the one token of a prompt whose KV was loaded is a decode."""
        load = _load_of(batch)
        if self._may_load:
            loaded = [sequence for sequence, count in batch.chunks if count == 1 and sequence.num_computed > 1]
            chunks = [(sequence, count) for sequence, count in batch.chunks if sequence not in loaded]
            prefill = _sum_of(chunks) if chunks else None
            num_kv_tokens = load.num_kv_tokens + sum([sequence.num_computed - 1 for sequence in loaded])
            load = Load(prefill, load.num_decodes + len(loaded), num_kv_tokens)
        return self.model.verify(load, sum(batch.drafts.values())) + self._encoding_s * batch.num_encoder_tokens
