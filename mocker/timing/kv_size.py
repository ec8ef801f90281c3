"""How many bytes a worker hands over with KV blocks: by the model's shape, the type of its KV, and who reads it."""

from dataclasses import dataclass

from mocker.timing.memory import size_of_token
from mocker.timing.model_shape import BYTES, ModelShape


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

    def of(self, num_blocks: int) -> float:
        """Return the bytes of the last blocks of a prompt, which are what a reader lacks."""
        return num_blocks * self.block + min(num_blocks, self.num_window_blocks) * self.window_block


def kv_size(shape: ModelShape, *, block_size: int, tensor_parallel_size: int = 1, kv_dtype: str = "bfloat16") -> KvSize:
    """Return the size of a model's KV blocks as the GPUs of a reader take them in.

    A token is `2 * layers * max(kv_heads, tensor_parallel_size) * head_dim` KV elements, as heads that are fewer than GPUs
    are read by several; with MLA it is `layers * (kv_lora_rank + rope_head_dim)`, read once. These are vLLM's layouts; the
    sizes that Mooncake publishes (49 MB for 128 tokens of Qwen3-235B on 8 GPUs) confirm the first. A window of W tokens
    lies in `ceil(W / block_size) + 1` blocks. States of linear attention are left out.
    """
    readers = 1 if shape.is_mla else tensor_parallel_size
    layer = shape.kv_values(tensor_parallel_size) * BYTES[kv_dtype] * readers * block_size
    num_windowed = shape.num_layers - shape.num_full_attention_layers if shape.sliding_window else 0
    return KvSize(
        num_layers=shape.num_layers,
        block=size_of_token(shape, tensor_parallel_size, kv_dtype) * readers * block_size,
        window_block=layer * num_windowed,
        num_window_blocks=-(-shape.sliding_window // block_size) + 1 if num_windowed else 0,
    )
