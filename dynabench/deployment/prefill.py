"""How long a prompt takes on an otherwise idle engine."""

from mocker.timing.choose import SimulatedEngine
from mocker.timing.model import chunk


def prefill_s(engine: SimulatedEngine, length: int, cached: int) -> float:
    """Return the time (s) of a prompt that is alone on a worker; next to others, its chunks may have to be shorter."""
    budget, threshold = engine.config.max_num_batched_tokens, engine.config.long_prefill_token_threshold
    sizes = (budget, threshold) if 0 < threshold < budget else (budget,)
    return min([_chunks_s(engine, length, cached, size) for size in sizes])


def _chunks_s(engine: SimulatedEngine, length: int, cached: int, size: int) -> float:
    timing, total = engine.timing, 0.0
    for done in range(cached, length, size):
        total += timing.mixed(chunk(min(size, length - done), done), 0, 0)
    if engine.host is not None and done and done == length - 1:  # the GPU decodes that token
        total += min(timing.decode(1, done).first - timing.mixed(chunk(1, done), 0, 0), 0.0)
    return total
