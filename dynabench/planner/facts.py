"""What a planner is told once about a pool of simulated engines, before it plans."""

from dynabench.deployment.engines import SimulatedPool
from dynabench.deployment.step_times import SimulatedStepTimes
from serving.planner import PoolFacts


def facts_of(pool: SimulatedPool) -> PoolFacts:
    """Return what does not change about a pool."""
    config = pool.engine.config
    return PoolFacts(
        name=pool.name,
        role=pool.role,
        gpus_per_worker=pool.gpus_per_worker,
        num_ranks=config.dp_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_kv_tokens=pool.engine.num_usable_tokens,
        max_model_len=config.max_model_len,
        startup_s=pool.startup_s,
        times=SimulatedStepTimes(pool.engine.timing),
    )
