"""Constant facts about a pool of simulated engines, which a planner gets before it plans."""

from dynabench.deployment.engines import SimulatedPool
from dynabench.deployment.step_times import SimulatedStepTimes
from serving.planner import PoolFacts


def pool_facts(pool: SimulatedPool) -> PoolFacts:
    """Return the facts about a pool that do not change."""
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
