"""What the layers of a model keep of each token or sequence, and how vLLM groups them: see `mocker/models/kv_groups.py`."""

from dataclasses import dataclass, replace

from mocker.models.kinds import CHUNKED
from mocker.models.kv_groups import KvLayout, LayerKv, block_size_beside_states, layout_of
from mocker.models.layers import Mixer
from mocker.models.shape import ModelShape

KV_BYTES = {"bfloat16": 2.0, "fp8": 1.0}
SPARSE_FP8_BYTES = 512.0 + 4 * 4 + 64 * 2
"""Of a latent of sparse attention with an FP8 cache: 512 values, 4 scales of 32 bits, and positions in 16 bits."""
INDEX_BYTES = 1 + 4 / 128
"""Of a value of an index's keys: 8 bits, and 32 bits of scale for every 128."""


@dataclass(frozen=True, slots=True)
class KvCache:
    """The KV cache of a model on each GPU of an engine."""

    layout: KvLayout
    """The groups of its layers."""
    is_exact: bool
    """Whether blocks are counted as vLLM counts them."""

    @property
    def token(self) -> float:
        """The bytes by which the KV of a sequence grows with each token, in the layers that keep all, or else a window."""
        kept = [group for group in self.layout.groups if group.layer.token]
        full = [group for group in kept if group.layer.is_full]
        return sum([self.layout.block / group.block_size for group in full or kept])


def kv_cache(
    shape: ModelShape,
    *,
    block_size: int,
    num_gpus: int = 1,
    kv_dtype: str = "bfloat16",
    state_block_size: int | None = None,
    drafter: ModelShape | None = None,
    is_one_table: bool = False,
) -> KvCache:
    """Return how a model's KV is kept.

    Args:
        shape: the model.
        block_size: tokens in a block; blocks are larger where a state needs that, and may be in some groups.
        num_gpus: GPUs that share each layer.
        kv_dtype: the type of keys and values.
        state_block_size: tokens between states that are kept (default: a block's).
        drafter: a model that drafts, and keeps KV beside it.
        is_one_table: count layers as if all kept all tokens, and leave states out: vLLM without its hybrid manager.

    Raises:
        ValueError: no layer keeps KV.
    """
    layers = layers_of(shape, num_gpus, kv_dtype)
    if drafter is not None:
        layers += layers_of(drafter, num_gpus, kv_dtype)
    if not any(layer.token for layer in layers):
        raise ValueError(
            f"no layer of this {shape.architecture} model keeps the KV of all tokens; such models are not simulated"
        )
    if is_one_table:
        layers = [layer._replace(window=0, is_chunked=False) for layer in layers if layer.token]
    layout = layout_of(layers, block_size_beside_states(layers, block_size), state_block_size=state_block_size)
    found = KvCache(layout, is_exact=not any(mixer.compression > 1 for mixer, _ in shape.mixers))
    # vLLM packs compressed KV into blocks of a kind that nobody recorded: one table, as large as those groups are together.
    return found if found.is_exact else replace(found, layout=layout_of([LayerKv(found.token)], block_size))


def bytes_per_token(shape: ModelShape, kv_dtype: str) -> int:
    """Return the bytes by which the KV of a sequence grows, as room for it is counted; 0: no layer keeps all tokens."""
    try:
        return round(kv_cache(shape, block_size=1, kv_dtype=kv_dtype).token)
    except ValueError:
        return 0


def layers_of(shape: ModelShape, num_gpus: int, kv_dtype: str) -> list[LayerKv]:
    """Return what each layer keeps, those of a kind one after the other."""
    return [kept for mixer, count in shape.mixers for kept in _kept(mixer, num_gpus, kv_dtype) for _ in range(count)]


def _kept(mixer: Mixer, num_gpus: int, kv_dtype: str) -> list[LayerKv]:
    if mixer.state_bytes:
        return [LayerKv(0.0, state=mixer.state_bytes / num_gpus)]
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
