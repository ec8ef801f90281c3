"""Which parts a scheduler is made of, by its settings."""

from mocker.trtllm.adapters import AdapterPages
from mocker.trtllm.block_pool import BlockPool
from mocker.trtllm.capacity import Capacity, GuaranteedNoEvict, MaxUtilization, Unlimited
from mocker.trtllm.micro_batch import MicroBatchScheduler
from mocker.trtllm.needs import Needs
from mocker.trtllm.rank import Rank
from mocker.trtllm.reuse_names import ReuseNames
from mocker.trtllm.settings import Settings
from mocker.trtllm.waiting import Balance, BatchWaiting


def new_rank(settings: Settings) -> Rank:
    """Return an idle rank."""
    pool = BlockPool(settings.num_blocks, enable_block_reuse=settings.enable_block_reuse)
    needs = Needs(
        pool,
        tokens_per_block=settings.tokens_per_block,
        max_draft_len=settings.max_draft_len,
        num_steps=settings.num_steps_ahead,
    )
    micro_batch = MicroBatchScheduler(
        needs,
        max_batch_size=settings.max_batch_size,
        max_num_tokens=settings.max_num_tokens,
        tokens_per_block=settings.tokens_per_block,
        max_draft_len=settings.max_draft_len,
        chunk_unit=settings.chunk_unit,
        has_equal_progress=settings.has_equal_progress,
        is_prefix_aware=settings.is_prefix_aware,
        has_adapters=settings.has_adapters,
    )
    return Rank(settings, pool, _new_capacity(settings, needs), micro_batch)


def _new_capacity(settings: Settings, needs: Needs) -> Capacity:
    limit = settings.max_batch_size if settings.max_passed is None else settings.max_passed
    if not settings.has_kv_cache:
        return Unlimited(limit)
    is_static = settings.policy == "STATIC_BATCH"
    names = None
    if settings.enable_block_reuse and settings.is_prefix_aware and not is_static:
        names = ReuseNames(needs, tokens_per_block=settings.tokens_per_block)
    adapters = None if settings.adapter_pages is None else AdapterPages(*settings.adapter_pages)
    if settings.policy == "MAX_UTILIZATION":
        return MaxUtilization(needs, limit=limit, names=names, adapters=adapters)
    return GuaranteedNoEvict(
        needs, limit=limit, names=names, adapters=adapters, is_static=is_static, has_inits=settings.has_inits
    )


def new_waiting(settings: Settings) -> tuple[BatchWaiting | None, Balance | None]:
    """Return what withholds prompts: batch waiting, or the balance among ranks."""
    if settings.num_ranks is None:
        if settings.batch_wait_timeout_iters == 0:
            return None, None
        min_tokens = settings.batch_wait_max_tokens_ratio * settings.max_num_tokens
        num_decoded = 1 + settings.max_draft_len
        return BatchWaiting(
            timeout_iters=settings.batch_wait_timeout_iters, min_tokens=min_tokens, num_decoded=num_decoded
        ), None
    if settings.balance is None:
        return None, None
    return None, Balance(max_batch_size=settings.max_batch_size, settings=settings.balance)
