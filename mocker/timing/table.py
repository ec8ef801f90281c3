"""Step times interpolated between measured ones."""

from bisect import bisect_right
from dataclasses import dataclass

from mocker.timing.model import Knots, Load, Prefill, Ramp, slowest, verified


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """Measured step times, each curve in order of its first number."""

    prefill: tuple[tuple[float, float], ...]
    """(prompt tokens of a step, seconds)."""
    decode: tuple[tuple[int, tuple[tuple[float, float], ...]], ...]
    """(decoding sequences, their curve of (KV tokens they read, seconds))."""


class Table:
    """Linear between measured points, constant before the first, extrapolated after the last.

    A step with both kinds of work takes the prefill's time and what the decodes add to the shortest measured decode,
    as the weights are read once.
    """

    lead_s = 0.0

    def __init__(self, table: StepTable) -> None:
        self._table = table
        self.knots = Knots(
            tokens=tuple(tokens for tokens, _ in table.prefill),
            decodes=tuple(num_decodes for num_decodes, _ in table.decode),
            kv=tuple(sorted({kv for _, curve in table.decode for kv, _ in curve})),
        )
        self._base = min(curve[0][1] for _, curve in table.decode)

    def mixed(self, prefill: Prefill, num_decodes: int, num_kv_tokens: int) -> float:
        """The prefill's time and the decodes' share."""
        duration, _, _ = _line(self._table.prefill, prefill.num_tokens)
        if num_decodes:
            duration += max(0.0, self.decode(num_decodes, num_kv_tokens).first - self._base)
        return max(duration, 0.0)

    def decode(self, num_sequences: int, num_kv_tokens: int) -> Ramp:
        """Linear until the KV tokens exceed the next measured point."""
        curves = self._table.decode
        place = min(max(bisect_right(curves, num_sequences, key=lambda row: row[0]), 1), max(len(curves) - 1, 1))
        low, below = curves[place - 1]
        first, slope, until = _line(below, num_kv_tokens)
        if place < len(curves):
            high, above = curves[place]
            other, other_slope, other_until = _line(above, num_kv_tokens)
            weight = max(0.0, (num_sequences - low) / (high - low))
            first += weight * (other - first)
            slope += weight * (other_slope - slope)
            until = min(until, other_until)
        steps = 1 << 62 if until == float("inf") else int((until - num_kv_tokens) // num_sequences) + 1
        return Ramp(max(first, 0.0), slope * num_sequences if first > 0 else 0.0, 0.0, max(steps, 1))

    def among(self, loads: list[Load]) -> float:
        """The slowest rank decides."""
        return slowest(self, loads)

    def verify(self, load: Load, num_drafts: int) -> float:
        """Each draft is like one more decode."""
        return verified(self, load, num_drafts)


def _line(curve: tuple[tuple[float, float], ...], x: float) -> tuple[float, float, float]:
    """Return a curve's value, its slope, and the x up to which that slope is valid."""
    if len(curve) == 1:
        return curve[0][1], 0.0, float("inf")
    if x < curve[0][0]:
        return curve[0][1], 0.0, curve[0][0]
    place = min(bisect_right(curve, x, key=lambda row: row[0]), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[place - 1], curve[place]
    slope = (y1 - y0) / (x1 - x0)
    return y0 + slope * (x - x0), slope, x1 if place < len(curve) - 1 or x < x1 else float("inf")
