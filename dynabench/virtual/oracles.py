"""What only a simulation can know: the true work at each rank, and the consequences of each choice."""

from mocker import Engine


def true_work(engine: Engine, now: float) -> list[tuple[int, int, int]]:
    """Return each request at an engine: prompt tokens to compute, output tokens to come, context tokens."""
    engine.advance(now)
    return [*engine.remaining()]
