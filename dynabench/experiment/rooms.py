"""What a report says of an engine's memory: room for KV, by groups of layers or stages, and for LoRA adapters."""

from collections.abc import Iterable, Sequence

from dynabench.deployment.description import Pool
from mocker import EngineConfig
from mocker.timing.choose import SimulatedEngine, resolve
from mocker.timing.groups import groups_of, layout_of
from mocker.timing.memory import GIB
from mocker.timing.stages import layers_of_stages

FEW = 3
"""Numbers are listed individually up to this many."""


def rooms(pools: Sequence[Pool]) -> str:
    """Say how much KV an engine holds, by scheduler if several are compared; nothing if that is said by groups of layers."""
    simulated = [pool for pool in pools if pool.engine == "mocker"]
    kinds = dict.fromkeys(pool.engine_type for pool in simulated)
    if len(kinds) < 2:
        return _room([pool for pool in simulated if pool.timing.timing_name == "roofline"])
    found = [(pool.engine_type, resolve(pool.engine_config, pool.timing).num_usable_tokens) for pool in simulated]
    return ", ".join(f"{kind} {span(room for its, room in found if its == kind)} tokens" for kind in kinds)


def groups(pool: Pool) -> str | None:
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


def adapters(pools: Iterable[Pool]) -> str:
    """Say how many LoRA adapters simulated engines hold, and how long it takes to load one; nothing if none holds any."""
    counts: dict[str, list[tuple[int, int]]] = {}
    for pool in pools:
        engine, found = pool.engine_config, _resolved(pool)
        if found is None or found.adapters is None or not isinstance(engine, EngineConfig):
            continue
        memory = found.adapters
        each = (
            f"of rank {engine.max_lora_rank}; a load takes {memory.load_s * 1e3:.3g} ms, and {memory.read_s * 1e3:.3g} ms more "
            "from disk"
        )
        counts.setdefault(each, []).append((memory.max_loras, memory.max_cpu_loras))
    said = []
    for each, found_counts in counts.items():
        here, host = (span(counted) for counted in zip(*found_counts, strict=True))
        many = "s" * (max(found_counts) > (1, 1))
        said.append(f"{here} adapter{many} on the GPU and {host} in host memory, those on the GPU included, {each}")
    return " or ".join(said)


def _room(pools: Sequence[Pool]) -> str:
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


def span(values: Iterable[float]) -> str:
    """List values, or only the lowest and the highest if there are many."""
    found = sorted(set(values))
    shown = [f"{value:,.5g}" if value < 10_000 else f"{value:,.0f}" for value in found]
    if len(found) > FEW:
        return f"{shown[0]} to {shown[-1]}"
    return " or ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))


def _resolved(pool: Pool) -> SimulatedEngine | None:
    """Return a pool's engine, None if it cannot be: that is said where it matters."""
    try:
        return resolve(pool.engine_config, pool.timing)
    except ValueError:
        return None
