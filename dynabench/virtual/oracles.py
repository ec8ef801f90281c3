"""What only a simulation can know: the true work at each rank, and the consequences of each choice."""

from mocker import Engine


def true_work(engine: Engine, now: float) -> list[tuple[int, int, int]]:
    """Return each request at an engine: prompt tokens to compute, output tokens to come, context tokens."""
    engine.advance(now)
    scheduler = engine.scheduler
    found = []
    for sequence in (*scheduler.running, *scheduler.holding, *scheduler.queued()):
        known = scheduler.num_tokens(sequence)
        is_prefilled = sequence.decoding or scheduler.is_ending(sequence) or sequence.is_remote_prefill
        to_compute = 0 if is_prefilled else max(sequence.num_known - sequence.num_computed, 0)
        found.append((to_compute, max(sequence.num_total - known, 0), known))
    return found
