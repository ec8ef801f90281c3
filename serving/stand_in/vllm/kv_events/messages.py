"""The messages of vLLM 0.32: field names and their order are the format."""

from typing import Any

import msgspec

from serving.stand_in.vllm.kv_events.hashes import ExternalHash


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks that are cached now, one after the other."""

    block_hashes: list[ExternalHash]
    parent_block_hash: ExternalHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks that are cached no longer."""

    block_hashes: list[ExternalHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """The prefix cache was reset."""


Message = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The events of a step, sent at a time (s) by a data-parallel rank."""

    ts: float
    events: list[Message]
    data_parallel_rank: int | None = None
