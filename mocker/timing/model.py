"""How long a step takes."""

from typing import NamedTuple, Protocol

from mocker.config import EngineConfig


class Ramp(NamedTuple):
    """Durations of the coming steps of an unchanged batch: step j takes `first + slope*j + curve*j*j` seconds.

    It holds for `num_steps` steps.
    """

    first: float
    slope: float = 0.0
    curve: float = 0.0
    num_steps: int = 1 << 62

    def duration(self, step: int) -> float:
        """Return the duration of one step (s)."""
        return self.first + step * (self.slope + step * self.curve)

    def elapsed(self, num_steps: int) -> float:
        """Return the duration of the first `num_steps` steps together (s)."""
        j = num_steps - 1
        return num_steps * (self.first + j * (self.slope / 2 + self.curve * (2 * num_steps - 1) / 6))


class Prefill(NamedTuple):
    """The prefill chunks of a step together: chunk i computes c_i tokens of a sequence that already holds k_i."""

    num_tokens: int
    """Sum of c_i."""
    num_context_tokens: int
    """Sum of k_i."""
    num_pairs: float
    """Sum of c_i (k_i + c_i / 2): queries times the keys each attends to."""
    num_sequences: int


def chunk(num_tokens: int, num_context_tokens: int = 0) -> Prefill:
    """Describe a single prefill chunk."""
    return Prefill(num_tokens, num_context_tokens, num_tokens * (num_context_tokens + num_tokens / 2), 1)


class TimingModel(Protocol):
    """Duration of steps from what is in the batch."""

    def mixed(self, prefill: Prefill, num_decodes: int, num_kv_tokens: int) -> float:
        """Return the time (s) of a step with prefill, in which `num_decodes` sequences read `num_kv_tokens` of context."""
        ...

    def decode(self, num_sequences: int, num_kv_tokens: int) -> Ramp:
        """Return the times to decode a token for each sequence, step after step, from `num_kv_tokens` of context on."""
        ...


class Polynomial:
    """NVIDIA Dynamo's default since February 2026 (lib/mocker perf_model.rs), so results compare."""

    def __init__(self, config: EngineConfig) -> None:
        self._capacity = config.kv_capacity_tokens
        self._speedup = config.speedup * 1000
        self._decode_speedup = config.decode_speedup * 1000

    def mixed(self, prefill: Prefill, num_decodes: int, num_kv_tokens: int) -> float:
        """Quadratic in the new prompt tokens of the step, plus the time of its decodes."""
        num_tokens = prefill.num_tokens
        duration = (4.209989e-7 * num_tokens * num_tokens + 1.518344e-2 * num_tokens + 16.50142) / self._speedup
        return duration + self.decode(num_decodes, num_kv_tokens).first if num_decodes else duration

    def decode(self, num_sequences: int, num_kv_tokens: int) -> Ramp:
        """Quadratic in the share p of the KV capacity that the decoding sequences read, p <= 1."""
        p = num_kv_tokens / self._capacity
        if p >= 1:
            return Ramp((-25.74 + 54.01 + 5.74) / self._decode_speedup)
        growth = num_sequences / self._capacity
        return Ramp(
            (-25.74 * p * p + 54.01 * p + 5.74) / self._decode_speedup,
            (54.01 - 51.48 * p) * growth / self._decode_speedup,
            -25.74 * growth * growth / self._decode_speedup,
            (self._capacity - num_kv_tokens - 1) // num_sequences + 1,
        )


class Constant:
    """A fixed time for prefill and one for decode, each only in steps that have such work."""

    def __init__(self, config: EngineConfig) -> None:
        self._prefill_s = config.constant_prefill_ms / 1000 / config.speedup
        self._decode_s = config.constant_decode_ms / 1000 / config.decode_speedup

    def mixed(self, prefill: Prefill, num_decodes: int, num_kv_tokens: int) -> float:
        """The same for any prompt."""
        return self._prefill_s + self._decode_s if num_decodes else self._prefill_s

    def decode(self, num_sequences: int, num_kv_tokens: int) -> Ramp:
        """The same for any batch."""
        return Ramp(self._decode_s)


class Faster:
    """Another model's times, divided: all of them by `speedup`, those of steps that only decode by `decode_speedup`."""

    def __init__(self, model: TimingModel, config: EngineConfig) -> None:
        self._model = model
        self._speedup = config.speedup
        self._decode_speedup = config.decode_speedup

    def mixed(self, prefill: Prefill, num_decodes: int, num_kv_tokens: int) -> float:
        """As the other, divided."""
        return self._model.mixed(prefill, num_decodes, num_kv_tokens) / self._speedup

    def decode(self, num_sequences: int, num_kv_tokens: int) -> Ramp:
        """As the other, divided."""
        first, slope, curve, num_steps = self._model.decode(num_sequences, num_kv_tokens)
        ratio = self._decode_speedup
        return Ramp(first / ratio, slope / ratio, curve / ratio, num_steps)
