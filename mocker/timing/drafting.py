"""What drafting adds to the steps of an engine that speculates.

    step     verify the drafts of the step before          the model, over all tokens of the step
             draft K tokens for each sequence, one by one  the drafter: once over the same tokens, then K - 1 times over one
                                                           token of each sequence

A drafter is a model of its own, or a layer beside the last one of the model (EAGLE, MTP). What the host does for it is
assumed to be hidden behind the GPU.
"""

from typing import Protocol

from mocker.timing.model import Load, Prefill, Ramp, TimingModel


class Drafting(Protocol):
    """How long drafting takes."""

    def seconds(self, load: Load, num_drafts: int) -> float:
        """Return the time (s) to draft for the sequences of a step that had this load and verified so many drafts."""
        ...


class FixedDrafting:
    """The same time in each step."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def seconds(self, load: Load, num_drafts: int) -> float:
        """As given."""
        return self._seconds


class ModelDrafting:
    """Forward passes of a drafter, one after another."""

    def __init__(self, model: TimingModel, num_speculative_tokens: int) -> None:
        self._model = model
        self._num_more = num_speculative_tokens - 1

    def seconds(self, load: Load, num_drafts: int) -> float:
        """The first pass sees what the step computed; each further one adds a token to each sequence."""
        first_s = self._model.verify(load, num_drafts)
        if not self._num_more:
            return first_s
        prefill, num_sequences, num_kv_tokens = load
        if prefill is not None:
            num_sequences += prefill.num_sequences
            num_kv_tokens += prefill.num_context_tokens + prefill.num_tokens
        return first_s + self._model.decode(num_sequences, num_kv_tokens).elapsed(self._num_more)


class Speculating:
    """The times of a model whose steps also draft."""

    def __init__(self, model: TimingModel, drafting: Drafting) -> None:
        self._model = model
        self._drafting = drafting
        self.lead_s = model.lead_s
        self.knots = model.knots

    def mixed(self, prefill: Prefill, num_decodes: int, num_kv_tokens: int) -> float:
        """A step without drafts to verify."""
        return self.verify(Load(prefill, num_decodes, num_kv_tokens), 0)

    def decode(self, num_sequences: int, num_kv_tokens: int) -> Ramp:
        """A step without drafts to verify."""
        return Ramp(self.verify(Load(None, num_sequences, num_kv_tokens), 0), num_steps=1)

    def among(self, loads: list[Load]) -> float:
        """Ranks with attention of their own do not speculate here.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("speculation of ranks with attention of their own")

    def verify(self, load: Load, num_drafts: int) -> float:
        """Verify, then draft."""
        return self._model.verify(load, num_drafts) + self._drafting.seconds(load, num_drafts)

    def gain(self, num_sequences: int, num_kv_tokens: int, length: float, num_drafts: int) -> float:
        """Return how many times the tokens a step brings in the same time with speculation, `length` a sequence."""
        plain_s = self._model.decode(num_sequences, num_kv_tokens).first
        return length * plain_s / self.verify(Load(None, num_sequences, num_kv_tokens), num_drafts * num_sequences)

    def at_best(self, num_drafts: int) -> TimingModel:
        """Return the least time for each token of an answer, for lower bounds."""
        return AllAccepted(self._model, num_drafts)


class AllAccepted:
    """Steps that bring each sequence one token, if all drafts were accepted, and drafting and verifying took no time."""

    def __init__(self, model: TimingModel, num_drafts: int) -> None:
        self._model = model
        self._num_tokens = num_drafts + 1
        self.lead_s = model.lead_s
        self.knots = model.knots

    def mixed(self, prefill: Prefill, num_decodes: int, num_kv_tokens: int) -> float:
        """The prompts alone, or the share of a step in which one of so many tokens was decoded."""
        shared_s = self._model.mixed(prefill, num_decodes, num_kv_tokens) / self._num_tokens
        return max(self._model.mixed(prefill, 0, 0), shared_s)

    def decode(self, num_sequences: int, num_kv_tokens: int) -> Ramp:
        """A token's share of a step."""
        first, slope, curve, num_steps = self._model.decode(num_sequences, num_kv_tokens)
        return Ramp(first / self._num_tokens, slope / self._num_tokens, curve / self._num_tokens, num_steps)

    def among(self, loads: list[Load]) -> float:
        """Ranks with attention of their own do not speculate here.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("speculation of ranks with attention of their own")

    def verify(self, load: Load, num_drafts: int) -> float:
        """As without drafts."""
        prefill, num_decodes, num_kv_tokens = load
        if prefill is None:
            return self.decode(num_decodes, num_kv_tokens).first
        return self.mixed(prefill, num_decodes, num_kv_tokens)
