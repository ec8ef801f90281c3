"""Step times of a simulated engine, in the form that a planner needs."""

from mocker.timing.model import TimingModel, chunk


class SimulatedStepTimes:
    """A `serving.planner` StepTimes of a mocker's timing model."""

    def __init__(self, model: TimingModel) -> None:
        self._model = model

    def step_s(
        self, prefill_tokens: int, num_decodes: int = 0, num_kv_tokens: int = 0, *, context_tokens: int = 0
    ) -> float:
        """Return the model's time for a step, whose prompt tokens count as one chunk (s)."""
        if prefill_tokens:
            return self._model.mixed(chunk(prefill_tokens, context_tokens), num_decodes, num_kv_tokens)
        return self._model.decode(num_decodes, num_kv_tokens).first if num_decodes else 0.0
