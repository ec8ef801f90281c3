"""How many bytes of KV blocks a worker transfers: by the model's shape, the type of its KV, and its reader."""

from dataclasses import dataclass

from mocker.models.kv_cache import size_of_token
from mocker.models.shape import ModelShape
from mocker.timing.config import TimingConfig

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
    state: float = 0.0
    """Bytes of a sequence's states."""
    num_parts: int = 1
    """GPUs that each have a part of them."""

    def of(self, num_blocks: int) -> float:
        """Return the bytes of the last blocks of a prompt, which a reader lacks."""
        if not num_blocks:
            return 0.0
        return num_blocks * self.block + min(num_blocks, self.num_window_blocks) * self.window_block + self.state


def kv_size(shape: ModelShape, *, block_size: int, tensor_parallel_size: int = 1, kv_dtype: str = "bfloat16") -> KvSize:
    """Return the size of a model's KV blocks as the GPUs of a reader receive them.

    A token is `2 * layers * max(kv_heads, tensor_parallel_size) * head_dim` KV elements, because several GPUs read each
    head if there are fewer heads than GPUs. With MLA it is `layers * (kv_lora_rank + rope_head_dim)`, read once. These
    are vLLM's layouts; the sizes that Mooncake publishes (49 MB for 128 tokens of Qwen3-235B on 8 GPUs) confirm the
    first. A window of W tokens needs `ceil(W / block_size) + 1` blocks. A state is transferred whole.
    """
    readers = 1 if any(mixer.latent_flops for mixer, _ in shape.mixers) else tensor_parallel_size
    block = window_block = state = 0.0
    window = 0
    for mixer, count in shape.mixers:
        size = (
            count * size_of_token(mixer, tensor_parallel_size, kv_dtype) * readers * block_size if mixer.has_kv else 0.0
        )
        if mixer.window and mixer.compression == 1:
            window_block += size
            window = max(window, mixer.window)
        else:
            block += size
        state += count * mixer.state_bytes
    return KvSize(
        num_layers=shape.num_layers,
        block=block,
        window_block=window_block,
        num_window_blocks=-(-window // block_size) + 1 if window else 0,
        state=state,
        num_parts=readers,
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
        shape = timing.shape
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
        kv_dtype=timing.kv_dtype,
    )
