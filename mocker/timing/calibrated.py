"""Step times fitted to those of a real engine, as `dynabench calibrate` finds them.

    step = fixed + sum over knots of slope * max(0, T - knot) + sequence * S
         + pair * pairs + context * prefill contexts + kv * decode contexts

with T tokens and S sequences in the step; a step with prefill has its own `fixed` and `kv`.
"""

from dataclasses import dataclass

from mocker.timing.model import Knots, Load, Prefill, Ramp, slowest, verified


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Coefficients, all in seconds per unit of what they name."""

    fixed: float
    mixed: float
    """For a step with prefill, instead of `fixed`."""
    tokens: tuple[tuple[float, float], ...]
    """(knot, slope): slope for every token beyond the knot, added to the slopes before."""
    sequence: float
    prompt: float
    """For each sequence with prefill."""
    pair: float
    context: float
    kv: float
    mixed_kv: float


class Calibrated:
    """Step times from `StepCosts`."""

    lead_s = 0.0

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self.knots = Knots(tokens=tuple(knot for knot, _ in costs.tokens))

    def mixed(self, prefill: Prefill, num_decodes: int, num_kv_tokens: int) -> float:
        """Affine in everything but the number of tokens, where the slope changes at knots."""
        costs = self._costs
        return (
            costs.mixed
            + self._tokens_s(prefill.num_tokens + num_decodes)
            + costs.sequence * (prefill.num_sequences + num_decodes)
            + costs.prompt * prefill.num_sequences
            + costs.pair * prefill.num_pairs
            + costs.context * prefill.num_context_tokens
            + costs.mixed_kv * num_kv_tokens
        )

    def decode(self, num_sequences: int, num_kv_tokens: int) -> Ramp:
        """Affine in the contexts."""
        costs = self._costs
        fixed = costs.fixed + self._tokens_s(num_sequences) + costs.sequence * num_sequences
        return Ramp(fixed + costs.kv * num_kv_tokens, costs.kv * num_sequences)

    def among(self, loads: list[Load]) -> float:
        """The slowest rank decides."""
        return slowest(self, loads)

    def verify(self, load: Load, num_drafts: int) -> float:
        """Each draft is like one more decode."""
        return verified(self, load, num_drafts)

    def _tokens_s(self, num_tokens: int) -> float:
        total = 0.0
        for knot, slope in self._costs.tokens:
            if num_tokens > knot:
                total += slope * (num_tokens - knot)
        return total
