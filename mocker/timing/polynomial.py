"""The default step times of NVIDIA Dynamo's mocker."""

from mocker.timing.model import Knots, Load, Prefill, Ramp, slowest, verified


class Polynomial:
    """NVIDIA Dynamo's default since February 2026 (lib/mocker perf_model.rs), so results compare."""

    lead_s = 0.0
    knots = Knots()

    def __init__(self, capacity: int, speedup: float, decode_speedup: float) -> None:
        """Model an engine whose cache holds `capacity` tokens, including the null block's."""
        self._capacity = capacity
        self._speedup = speedup * 1000
        self._decode_speedup = decode_speedup * 1000

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

    def among(self, loads: list[Load]) -> float:
        """The slowest rank decides."""
        return slowest(self, loads)

    def verify(self, load: Load, num_drafts: int) -> float:
        """Each draft is like one more decode."""
        return verified(self, load, num_drafts)
