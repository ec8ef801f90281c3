"""Constant step times."""

from mocker.timing.model import Knots, Load, Prefill, Ramp, slowest, verified


class Constant:
    """A fixed time for prefill and one for decode, each only in steps that have such work."""

    lead_s = 0.0
    knots = Knots()

    def __init__(self, prefill_s: float, decode_s: float) -> None:
        self._prefill_s = prefill_s
        self._decode_s = decode_s

    def mixed(self, prefill: Prefill, num_decodes: int, num_kv_tokens: int) -> float:
        """The same for any prompt."""
        return self._prefill_s + self._decode_s if num_decodes else self._prefill_s

    def decode(self, num_sequences: int, num_kv_tokens: int) -> Ramp:
        """The same for any batch."""
        return Ramp(self._decode_s)

    def among(self, loads: list[Load]) -> float:
        """The slowest rank decides."""
        return slowest(self, loads)

    def verify(self, load: Load, num_drafts: int) -> float:
        """Each draft is like one more decode."""
        return verified(self, load, num_drafts)
