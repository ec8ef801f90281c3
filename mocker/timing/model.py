"""How long a step takes."""

from typing import NamedTuple, Protocol

FOREVER = 1 << 62
"""More steps than any engine takes."""


class Ramp(NamedTuple):
    """Durations of the next steps of an unchanged batch: step j takes `first + slope*j + curve*j*j` seconds.

    It holds for `num_steps` steps.
    """

    first: float
    slope: float = 0.0
    curve: float = 0.0
    num_steps: int = FOREVER

    def duration(self, step: int) -> float:
        """Return the duration of one step (s)."""
        return self.first + step * (self.slope + step * self.curve)

    def elapsed(self, num_steps: int) -> float:
        """Return the total duration of the first `num_steps` steps (s)."""
        j = num_steps - 1
        return num_steps * (self.first + j * (self.slope / 2 + self.curve * (2 * num_steps - 1) / 6))


class Prefill(NamedTuple):
    """The prefill chunks of a step, summed: chunk i computes c_i tokens of a sequence that already has k_i."""

    num_tokens: int
    """Sum of c_i."""
    num_context_tokens: int
    """Sum of k_i."""
    num_pairs: float
    """Sum of c_i (k_i + c_i / 2): queries times the keys each attends to."""
    num_sequences: int


class Load(NamedTuple):
    """What one of several ranks computes in a step."""

    prefill: Prefill | None
    num_decodes: int
    num_kv_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens that it computes."""
        return self.num_decodes + (0 if self.prefill is None else self.prefill.num_tokens)


def slowest(model: "TimingModel", loads: list[Load]) -> float:
    """Return the time (s) of the rank that takes longest, each by itself."""
    times = [
        model.decode(count, kv).first if prefill is None else model.mixed(prefill, count, kv)
        for prefill, count, kv in loads
    ]
    return max(times)


def verified(model: "TimingModel", load: Load, num_drafts: int) -> float:
    """Return the time (s) of a step with drafts, if each is like one more decode that shares the context of another."""
    prefill, num_decodes, num_kv_tokens = load
    if prefill is not None:
        return model.mixed(prefill, num_decodes + num_drafts, num_kv_tokens)
    return model.decode(num_decodes + num_drafts, num_kv_tokens).first


def chunk(num_tokens: int, num_context_tokens: int = 0) -> Prefill:
    """Describe a single prefill chunk."""
    return Prefill(num_tokens, num_context_tokens, num_tokens * (num_context_tokens + num_tokens / 2), 1)


class Knots(NamedTuple):
    """Sizes at which step times jump or change their slope; between them, times are as smooth as those of a formula."""

    tokens: tuple[float, ...] = ()
    """Prompt tokens, or all tokens of a step."""
    decodes: tuple[int, ...] = ()
    kv: tuple[float, ...] = ()


class TimingModel(Protocol):
    """Duration of steps from the content of the batch: the time from the end of one to the end of the next."""

    lead_s: float
    """From scheduling a step to its start on the GPU, if no earlier step hides that: in an engine that was idle."""
    knots: Knots

    def mixed(self, prefill: Prefill, num_decodes: int, num_kv_tokens: int) -> float:
        """Return the time (s) of a step with prefill, in which `num_decodes` sequences read `num_kv_tokens` of context."""
        ...

    def decode(self, num_sequences: int, num_kv_tokens: int) -> Ramp:
        """Return the times to decode a token for each sequence, step after step, from `num_kv_tokens` of context on."""
        ...

    def among(self, loads: list[Load]) -> float:
        """Return the time (s) of a step of ranks with attention of their own, which wait for each other; none has nothing to do."""
        ...

    def verify(self, load: Load, num_drafts: int) -> float:
        """Return the time (s) of a step in which the decodes of a load also verify drafts, so many in all."""
        ...


class Faster:
    """Another model's times, divided: all of them by `speedup`, those of decode-only steps by `decode_speedup`."""

    def __init__(self, model: TimingModel, speedup: float, decode_speedup: float) -> None:
        self._model = model
        self._speedup = speedup
        self._decode_speedup = decode_speedup
        self.lead_s = model.lead_s / speedup
        self.knots = model.knots

    def mixed(self, prefill: Prefill, num_decodes: int, num_kv_tokens: int) -> float:
        """The other's time, divided."""
        return self._model.mixed(prefill, num_decodes, num_kv_tokens) / self._speedup

    def decode(self, num_sequences: int, num_kv_tokens: int) -> Ramp:
        """The other's time, divided."""
        first, slope, curve, num_steps = self._model.decode(num_sequences, num_kv_tokens)
        ratio = self._decode_speedup
        return Ramp(first / ratio, slope / ratio, curve / ratio, num_steps)

    def among(self, loads: list[Load]) -> float:
        """The other's time, divided."""
        has_prompts = any(load.prefill is not None for load in loads)
        return self._model.among(loads) / (self._speedup if has_prompts else self._decode_speedup)

    def verify(self, load: Load, num_drafts: int) -> float:
        """The other's time, divided."""
        ratio = self._decode_speedup if load.prefill is None else self._speedup
        return self._model.verify(load, num_drafts) / ratio
