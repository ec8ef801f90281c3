"""How the layers of an engine's model keep KV: in one table, or in groups, each with its own."""

from collections.abc import Collection
from math import fsum, lcm

from mocker.contract import EngineSettings
from mocker.models.kv_cache import kv_cache, layers_of
from mocker.models.kv_groups import KvLayout
from mocker.sglang.config import SglangConfig
from mocker.timing.config import TimingConfig
from mocker.timing.drafter import drafter_shape
from mocker.trtllm.config import TrtllmConfig
from mocker.vllm.config import EngineConfig


def groups_of(engine: EngineSettings, timing: TimingConfig) -> KvLayout | None:
    """Return the groups of the model's layers, if it is known and they do not all keep all tokens."""
    if timing.timing_name != "roofline" or not isinstance(engine, EngineConfig):
        return None
    layout = layout_of(engine, timing)
    return None if layout.is_plain else layout


def is_one_table(engine: EngineSettings, timing: TimingConfig) -> bool:
    """Return whether layers are counted as if all kept all tokens, because KV is transferred."""
    if timing.timing_name != "roofline" or not (isinstance(engine, EngineConfig) and _transfers(engine)):
        return False
    return any(not layer.is_full for layer in layers_of(timing.shape, timing.tensor_parallel_size, timing.kv_dtype))


def check_layers(name: str, engine: SglangConfig | TrtllmConfig, timing: TimingConfig) -> None:
    """Refuse stages, and prefixes of a model whose layers do not all keep all tokens, which only vLLM's scheduler has here.

    Without prefixes, these schedulers do the same for all models, and only the memory differs: windows are counted as if
    they kept all tokens, and states have room for as many requests as may run.
    """
    if timing.pipeline_parallel_size > 1:
        raise ValueError(
            f"pipeline_parallel_size is {timing.pipeline_parallel_size}; expected 1: {name}'s scheduler has no stages here"
        )
    flag, is_cached = _prefixes(engine)
    if timing.timing_name == "roofline" and is_cached and len(layout_of(engine, timing).groups) > 1:
        raise ValueError(
            f"model {timing.model} has layers that do not keep all tokens, whose prefixes {name}'s scheduler does not keep here "
            f"yet; use {flag}"
        )


def size_of_states(timing: TimingConfig, num_requests: int) -> float:
    """Return the bytes on one GPU that so many requests' states need."""
    layers = layers_of(timing.shape, timing.tensor_parallel_size, timing.kv_dtype)
    return num_requests * fsum([layer.state for layer in layers])


def _prefixes(engine: SglangConfig | TrtllmConfig) -> tuple[str, bool]:
    """Return the flag with which prefixes are not cached, and whether they are."""
    if isinstance(engine, SglangConfig):
        return "--disable-radix-cache", engine.has_tree
    return "--no-enable-block-reuse", engine.enable_block_reuse


def layout_of(engine: EngineSettings, timing: TimingConfig) -> KvLayout:
    """Return how the model's layers keep KV.

    All of it is in one table, as in vLLM without its hybrid manager, if it goes to another engine or host memory, and with
    EAGLE or MTP beside chunked attention (0.32 and 0.33, `config/vllm.py`).
    """
    state_block_size, has_one_table, drafter = None, False, None
    if isinstance(engine, EngineConfig):
        drafter = drafter_shape(engine, timing)
        state_block_size = None if engine.enable_prefix_caching else engine.max_model_len or context_length(timing)
        has_one_table = _transfers(engine) or (engine.drafts_from_states and _has_chunks(timing))
    elif isinstance(engine, SglangConfig | TrtllmConfig):
        has_one_table = not _prefixes(engine)[1]
    return kv_cache(
        timing.shape,
        block_size=engine.block_size,
        num_gpus=timing.tensor_parallel_size,
        kv_dtype=timing.kv_dtype,
        state_block_size=state_block_size,
        drafter=drafter,
        is_one_table=has_one_table,
    ).layout


def check_retention(engine: EngineConfig, timing: TimingConfig) -> None:
    """Refuse places at which hits may end that are not ends of blocks in every group, as vLLM does when it starts.

    Raises:
        ValueError: prefix_cache_retention_interval is no multiple of the groups' blocks (`kv_cache_coordinator.py`).
    """
    interval, layout = engine.prefix_cache_retention_interval, groups_of(engine, timing)
    if not interval or layout is None:
        return
    sizes = {group.block_size for group in layout.groups}
    if interval % lcm(*sizes):
        raise ValueError(
            f"prefix_cache_retention_interval is {interval}; expected 0, none or a multiple of {lcm(*sizes)}, because the "
            f"groups of {timing.model}'s layers have blocks of {' and '.join(map(str, sorted(sizes)))} tokens"
        )


def refuse_idle_retention(engines: Collection[tuple[EngineConfig, TimingConfig]]) -> None:
    """Refuse to set which prefixes windows and states keep if no engine of an experiment has either.

    Raises:
        ValueError: it is set.
    """
    given = [engine for engine, _ in engines if engine.prefix_cache_retention_interval != 0]
    if given and not any(_keeps_windows_or_states(groups_of(engine, timing)) for engine, timing in engines):
        interval = given[0].prefix_cache_retention_interval
        raise ValueError(
            f"prefix_cache_retention_interval is {'none' if interval is None else interval}, but no engine has layers that "
            "keep windows or states; expected 0, or a gpu and a model that has such layers"
        )


def context_length(timing: TimingConfig) -> int | None:
    """Return the context length of the model; None if there is no model, or measured or generic times only name one."""
    if timing.model is None:
        return None
    try:
        return timing.shape.context_length
    except ValueError:
        if timing.timing_name == "roofline":
            raise
        return None


def _keeps_windows_or_states(layout: KvLayout | None) -> bool:
    """Return whether any layers do; vLLM keeps all blocks of chunks."""
    return layout is not None and any(not (g.layer.is_full or g.layer.is_chunked) for g in layout.groups)


def _transfers(engine: EngineConfig) -> bool:
    return engine.kv_role is not None or engine.has_host_memory


def _has_chunks(timing: TimingConfig) -> bool:
    return any(layer.is_chunked for layer in layers_of(timing.shape, timing.tensor_parallel_size, timing.kv_dtype))
