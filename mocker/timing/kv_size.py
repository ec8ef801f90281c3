"""How many bytes of KV blocks a worker transfers: by the model's shape, the type of its KV, and its reader."""

from dataclasses import dataclass

from mocker.timing.catalog import find_model
from mocker.timing.config import TimingConfig
from mocker.timing.memory import size_of_token
from mocker.timing.model_shape import BYTES, ModelShape

LLAMA_8B_BYTES, LLAMA_8B_LAYERS = 131_072.0, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSize:
    """Bytes of KV blocks, on all GPUs of a worker together."""

    num_layers: int
    block: float
    """A block's bytes in the layers that keep the whole context."""
    window_block: float = 0.0
    """A block's bytes in the layers that attend to a window."""
    num_window_blocks: int = 0
    """The last blocks of a prompt that hold its window."""
    num_parts: int = 1
    """GPUs that each have a part of them."""

    def of(self, num_blocks: int) -> float:
        """Return the bytes of the last blocks of a prompt, which a reader lacks."""
        return num_blocks * self.block + min(num_blocks, self.num_window_blocks) * self.window_block


def kv_size(shape: ModelShape, *, block_size: int, tensor_parallel_size: int = 1, kv_dtype: str = "bfloat16") -> KvSize:
    """Return the size of a model's KV blocks as the GPUs of a reader receive them.

    A token is `2 * layers * max(kv_heads, tensor_parallel_size) * head_dim` KV elements, because several GPUs read each
    head if there are fewer heads than GPUs. With MLA it is `layers * (kv_lora_rank + rope_head_dim)`, read once. These
    are vLLM's layouts; the sizes that Mooncake publishes (49 MB for 128 tokens of Qwen3-235B on 8 GPUs) confirm the
    first. A window of W tokens needs `ceil(W / block_size) + 1` blocks. States of linear attention are not counted.
    """
    readers = 1 if shape.is_mla else tensor_parallel_size
    layer = shape.kv_values(tensor_parallel_size) * BYTES[kv_dtype] * readers * block_size
    num_windowed = shape.num_layers - shape.num_full_attention_layers if shape.sliding_window else 0
    return KvSize(
        num_layers=shape.num_layers,
        block=size_of_token(shape, tensor_parallel_size, kv_dtype) * readers * block_size,
        window_block=layer * num_windowed,
        num_parts=readers,
        num_window_blocks=-(-shape.sliding_window // block_size) + 1 if num_windowed else 0,
    )


def kv_size_of(timing: TimingConfig, *, block_size: int, kv_bytes_per_token: float | None = None) -> KvSize:
    """Return the size of the KV blocks that an engine reads; its tensor_parallel_size counts, not the sender's.

    Args:
        timing: settings of the engine that reads.
        block_size: tokens in a block.
        kv_bytes_per_token: on all GPUs (default: the model's, or that of Llama-3.1-8B without a model).

    Raises:
        ValueError: the model is unknown, and kv_bytes_per_token is not given.
    """
    given = kv_bytes_per_token
    if timing.model is None:
        return KvSize(
            num_layers=LLAMA_8B_LAYERS,
            block=(given or LLAMA_8B_BYTES) * block_size,
            num_parts=timing.tensor_parallel_size,
        )
    try:
        shape = find_model(timing.model)
    except ValueError as error:
        if given is None:
            raise ValueError(f"{error}; or set kv_bytes_per_token, the size of the KV to transfer") from None
        return KvSize(num_layers=LLAMA_8B_LAYERS, block=given * block_size)
    if given is not None:
        return KvSize(num_layers=shape.num_layers, block=given * block_size)
    return kv_size(
        shape,
        block_size=block_size,
        tensor_parallel_size=timing.tensor_parallel_size,
        kv_dtype=timing.kv_cache_dtype,
    )
