"""What a report says of an engine's memory: room for KV, by groups of layers or stages, and for LoRA adapters."""

from collections.abc import Callable, Iterable, Sequence

from dynabench.deployment.description import Pool
from mocker import EngineConfig
from mocker.timing.choose import SimulatedEngine, resolve
from mocker.timing.groups import groups_of, layout_of
from mocker.timing.stages import layers_of_stages

GIB = 1 << 30
Span = Callable[[Iterable[float]], str]
"""Lists numbers, or the lowest and the highest of many."""


def rooms(pools: Sequence[Pool], span: Span) -> str:
    """Say how much KV an engine holds, by scheduler if several are compared; nothing if that is said by groups of layers."""
    simulated = [pool for pool in pools if pool.engine == "mocker"]
    kinds = dict.fromkeys(pool.engine_type for pool in simulated)
    if len(kinds) < 2:
        return _room([pool for pool in simulated if pool.timing.timing_name == "roofline"], span)
    found = [(pool.engine_type, resolve(pool.engine_config, pool.timing).num_usable_tokens) for pool in simulated]
    return ", ".join(f"{kind} {span(room for its, room in found if its == kind)} tokens" for kind in kinds)


def groups(pool: Pool, span: Span) -> str | None:
    """Say how the layers of a model share blocks if they do not keep the same, and, if it fits, for how much KV is room."""
    layout = groups_of(pool.engine_config, pool.timing)
    if layout is None:
        return None
    width, sizes = max(len(group.layers) for group in layout.groups), span(each.block_size for each in layout.groups)
    said = f"{layout.summary}, of up to {width} layers"
    engine = _resolved(pool)
    if engine is None:
        return f"{said}; blocks of {sizes} tokens"
    context, longest = engine.config.max_model_len, engine.longest_sequence
    room = f"{engine.num_usable_tokens:,} tokens in sequences of {context:,}"
    if context is not None and longest < context:
        room = f"one sequence of up to {longest:,} tokens, fewer than the context of {context:,}"
    return f"{said}; {engine.num_usable_blocks:,} blocks of {sizes} tokens: room for {room}"


def adapters(pool: Pool) -> str | None:
    """Say how many LoRA adapters a simulated engine holds, and how long it takes to load one."""
    engine, found = pool.engine_config, _resolved(pool)
    if found is None or found.adapters is None or not isinstance(engine, EngineConfig):
        return None
    memory = found.adapters
    return (
        f"{memory.max_loras} adapter{'s' * (memory.max_loras > 1)} on the GPU and {memory.max_cpu_loras} in host memory, of rank "
        f"{engine.max_lora_rank}; a load takes {memory.load_s * 1e3:.3g} ms, and {memory.read_s * 1e3:.3g} ms more from disk"
    )


def _room(pools: Sequence[Pool], span: Span) -> str:
    engines = [
        engine for pool in pools if groups_of(pool.engine_config, pool.timing) is None and (engine := _resolved(pool))
    ]
    if not engines:
        return ""
    blocks, tokens = span(each.num_usable_blocks for each in engines), span(each.num_usable_tokens for each in engines)
    stages = dict.fromkeys(filter(None, map(_stages, pools)))
    return f"{tokens} tokens in {blocks} blocks" + "".join(f", {said}" for said in stages)


def _stages(pool: Pool) -> str:
    """Say how many layers each stage of a pipeline has, and how large their KV is there."""
    count, engine = pool.timing.pipeline_parallel_size, _resolved(pool)
    if count == 1 or engine is None:
        return ""
    layers = layers_of_stages(pool.timing.shape.num_layers, count)
    each = layout_of(pool.engine_config, pool.timing).block * engine.num_blocks / sum(layers) / GIB
    sizes = [f"{each * of_stage:.1f}" for of_stage in layers]
    return f"which take {' + '.join(sizes)} GiB on a GPU of the stages with {' + '.join(map(str, layers))} layers"


def _resolved(pool: Pool) -> SimulatedEngine | None:
    """Return a pool's engine, None if it cannot be: that is said where it matters."""
    try:
        return resolve(pool.engine_config, pool.timing)
    except ValueError:
        return None
