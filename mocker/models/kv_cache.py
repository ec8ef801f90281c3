"""How vLLM 0.32 keeps the KV of a model whose layers do not all keep the same: groups of layers that share one pool.

Each kind of layer forms groups of equal size. A group has blocks of its own, all of the one pool:

    gemma-3-27b: 10 full and 52 windowed layers -> 1 + 6 groups of up to 10 layers
    a prompt of 900 tokens in blocks of 16         57 blocks in each of 7 groups: 399 of the pool

The engine simulates the blocks of the groups that keep all tokens. What the others hold is counted for each sequence, at
its largest, from admission to end (`MoreBlocks`).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, floor
from typing import NamedTuple

from mocker.models.kinds import CHUNKED
from mocker.models.layers import Mixer
from mocker.models.shape import ModelShape

KV_BYTES = {"bfloat16": 2.0, "fp8": 1.0}
SPARSE_FP8_BYTES = 512.0 + 4 * 4 + 64 * 2
"""Of a latent of sparse attention with an FP8 cache: 512 values, 4 scales of 32 bits, and positions in 16 bits."""
INDEX_BYTES = 1 + 4 / 128
"""Of a value of an index's keys: 8 bits, and 32 bits of scale for every 128."""
BLOCK_UNIT = 16
"""Blocks grow in these steps where a state needs larger ones."""


class LayerKv(NamedTuple):
    """What one layer keeps on one GPU."""

    token: float
    """Bytes of a token; 0: it keeps a state."""
    window: int = 0
    """Most tokens kept; 0: all."""
    is_chunked: bool = False
    state: float = 0.0
    """Bytes of a sequence's state."""


class KvGroup(NamedTuple):
    """Layers that share a table of blocks."""

    layer: LayerKv
    num_layers: int
    block_size: int
    """Tokens in a block; 0: a block holds a state."""

    def num_blocks(self, num_tokens: int) -> int:
        """Return the blocks that a sequence of this many tokens holds."""
        if not self.block_size:
            return 1
        if not self.layer.window:
            return ceil(num_tokens / self.block_size)
        kept = self.layer.window if self.layer.is_chunked else self.layer.window - 1 + self.block_size
        return ceil(min(num_tokens, kept) / self.block_size)


@dataclass(frozen=True, slots=True)
class KvPool:
    """The groups of a model, and the size of the blocks that they share."""

    groups: tuple[KvGroup, ...]
    block: float
    """Bytes of a block in the widest group."""

    def num_blocks(self, num_tokens: int) -> int:
        """Return the blocks of the pool that a sequence of this many tokens holds."""
        return sum([group.num_blocks(num_tokens) for group in self.groups])


def pool_of(layers: Iterable[tuple[LayerKv, int]], block_size: int) -> KvPool:
    """Group layers as vLLM does, each given with how many there are.

    Layers that all keep all tokens, or all the same window, share one table. Else their blocks are made equally large, by
    more tokens where that comes out even and by padding where not, and layers that are alike form groups of `size` layers:
    as many as the rarest kind has, or as the most frequent has if that is less than half more.
    """
    counts = Counter[LayerKv]()
    for layer, count in layers:
        counts[layer] += count
    if len({(layer.window, layer.is_chunked, layer.state) for layer in counts}) == 1:
        widest = sum([(layer.token * block_size or layer.state) * count for layer, count in counts.items()])
        layer = max(counts, key=counts.__getitem__)
        return KvPool((KvGroup(layer, counts.total(), block_size if layer.token else 0),), widest)
    state = max([layer.state for layer in counts])
    attention = max([layer.token for layer in counts])
    if state > attention * block_size:
        block_size = BLOCK_UNIT * ceil(state / (attention * BLOCK_UNIT))
    page, size = attention * block_size, min(counts.values())
    if max(counts.values()) < 1.5 * size:
        size = max(counts.values())
    groups = []
    for layer, count in counts.items():
        times = page / (layer.token * block_size) if layer.token else 0.0
        tokens = block_size * (int(times) if times == floor(times) else 1) if layer.token else 0
        number = ceil(count / size)
        groups += [KvGroup(layer, ceil((count - place) / number), tokens) for place in range(number)]
    return KvPool(tuple(groups), page * max([group.num_layers for group in groups]))


@dataclass(frozen=True, slots=True)
class MoreBlocks:
    """What a sequence holds besides the blocks of its tokens, in such blocks."""

    pool: KvPool
    block_size: int
    unit: float
    """Blocks of the pool for a block of tokens, in the groups that keep all."""

    def of(self, num_tokens: int) -> int:
        """Return the blocks of a sequence that will have this many tokens."""
        return max(ceil(self.pool.num_blocks(num_tokens) / self.unit) - ceil(num_tokens / self.block_size), 0)


@dataclass(frozen=True, slots=True)
class KvCache:
    """The KV cache of a model on each GPU of an engine."""

    block: float
    """Bytes of a block of tokens, in the layers that keep all."""
    more: MoreBlocks | None = None
    """What other layers hold, if there are any."""
    is_exact: bool = True
    """Whether all layers keep all tokens, so that blocks are counted as vLLM counts them."""


def kv_cache(shape: ModelShape, *, block_size: int, num_gpus: int = 1, kv_dtype: str = "bfloat16") -> KvCache:
    """Return how a model's KV is kept; where all layers have a window, they are counted as if they kept all tokens.

    Raises:
        ValueError: no layer keeps KV.
    """
    layers = layers_of(shape, num_gpus, kv_dtype)
    nothing = f"no layer of this {shape.architecture} model keeps the KV of all tokens; such models are not simulated"
    if not layers:
        raise ValueError(nothing)
    pool = pool_of(layers, block_size)
    is_exact = not any(mixer.compression > 1 for mixer, _ in shape.mixers)
    full = [group for group in pool.groups if group.layer.token and not group.layer.window]
    if len(pool.groups) == 1 and pool.groups[0].layer.token:
        return KvCache(pool.block, is_exact=is_exact and bool(full))
    if not full:
        raise ValueError(nothing)
    unit = sum([block_size / group.block_size for group in full])
    return KvCache(pool.block * unit, MoreBlocks(pool, block_size, unit), is_exact=False)


def bytes_per_token(shape: ModelShape, kv_dtype: str) -> int:
    """Return the bytes by which the KV of a sequence grows, as room for it is counted; 0: such models are not simulated."""
    try:
        return round(kv_cache(shape, block_size=1, kv_dtype=kv_dtype).block)
    except ValueError:
        return 0


def layers_of(shape: ModelShape, num_gpus: int, kv_dtype: str) -> list[tuple[LayerKv, int]]:
    """Return what each kind of layer keeps."""
    return [
        (kept, count)
        for mixer, count in shape.mixers
        for kept in ([_state(mixer, num_gpus)] if mixer.state_bytes else _attention(mixer, num_gpus, kv_dtype))
    ]


def _state(mixer: Mixer, num_gpus: int) -> LayerKv:
    return LayerKv(0.0, state=mixer.state_bytes / num_gpus)


def _attention(mixer: Mixer, num_gpus: int, kv_dtype: str) -> list[LayerKv]:
    if not mixer.has_kv:
        return []
    token = size_of_token(mixer, num_gpus, kv_dtype)
    if mixer.compression > 1:
        return [LayerKv(token)]
    return [LayerKv(token, mixer.window, mixer.kind == CHUNKED)]


def size_of_token(mixer: Mixer, num_gpus: int, kv_dtype: str) -> float:
    """Return the bytes of a token that a layer keeps on one GPU, an index included."""
    index = mixer.index.head_dim * INDEX_BYTES if mixer.index is not None else 0.0
    values = mixer.kv_heads(num_gpus) * mixer.kv_width * KV_BYTES[kv_dtype]
    if mixer.index is not None and mixer.latent_flops and kv_dtype == "fp8" and mixer.kv_width == 512 + 64:
        values = SPARSE_FP8_BYTES
    return (values + index) / mixer.compression
