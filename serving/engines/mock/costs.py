"""What a simulated engine's steps cost, straightened: as routers reckon that predict times."""

from mocker.timing.choose import SimulatedEngine
from mocker.timing.model import chunk
from serving.router import StepCosts


def step_costs_of(engine: SimulatedEngine) -> StepCosts:
    """Return the costs: of prompt tokens in a full step, of contexts from none to half of the KV cache."""
    timing, budget, half = engine.timing, engine.config.max_num_batched_tokens, engine.kv_capacity_tokens // 2
    decode, base = timing.decode(1, 1).first, timing.mixed(chunk(1), 0, 0)
    return StepCosts(
        base_s=base + decode,
        prefill_token_s=max((timing.mixed(chunk(budget), 0, 0) - base) / max(budget - 1, 1), 0.0),
        decode_sequence_s=max(timing.decode(2, 2).first - decode, 0.0),
        context_token_s=max((timing.decode(1, half).first - decode) / max(half, 1), 0.0),
        budget_tokens=budget,
    )
