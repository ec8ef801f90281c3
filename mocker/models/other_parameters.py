"""Count parameters outside the layers, embeddings and head: positions, embeddings of layers, mixing matrices."""

from mocker.models.keys import Keys
from mocker.models.kinds import HYBRID, zamba


def none(k: Keys) -> int:
    """Nothing else."""
    return 0


def positions(k: Keys) -> int:
    """Embeddings of positions."""
    return k.number("max_position_embeddings", 0) * k.number("hidden_size")


def opt(k: Keys) -> int:
    """Embeddings of positions, and matrices between embeddings of another size and the layers."""
    hidden, size = k.number("hidden_size"), k.number("word_embed_proj_dim", 0)
    if size in (0, hidden):
        return positions(k)
    return positions(k) + 2 * size * hidden + (size - hidden) * k.number("vocab_size")


def per_layer_inputs(k: Keys) -> int:
    """Gemma's embeddings for each layer, and the matrices that mix them in."""
    size, hidden, layers = (
        k.number("hidden_size_per_layer_input", 0),
        k.number("hidden_size"),
        k.number("num_hidden_layers"),
    )
    return size * layers * (k.number("vocab_size_per_layer_input", 0) + 3 * hidden)


def gemma_3n(k: Keys) -> int:
    """The same, low-rank residuals in each layer, and matrices that make copies of the residual and merge them."""
    copies, rank, hidden = k.number("altup_num_inputs", 4), k.number("laurel_rank", 64), k.number("hidden_size")
    layers = k.number("num_hidden_layers")
    k.ignore("altup_active_idx")
    return per_layer_inputs(k) + 2 * (copies - 1) * hidden * hidden + layers * hidden * (2 * rank + copies)


def hyper_connections(k: Keys) -> int:
    """Matrices that mix copies of the residual, two in each layer (DeepSeek V4, GLM 5.3 Flash)."""
    copies, hidden = k.number("hc_mult", 0), k.number("hidden_size")
    return 2 * k.number("num_hidden_layers") * (2 + copies) * copies * copies * hidden


def shared_blocks(k: Keys) -> int:
    """Zamba: a matrix in each layer with attention, less the attention and network that these layers share."""
    hidden, heads, size = k.number("hidden_size"), k.number("num_attention_heads"), k.number("intermediate_size")
    width = heads * k.number("head_dim", 2 * hidden // heads)
    block = 2 * hidden * 3 * width + width * hidden + 3 * hidden * size
    num_hybrid = zamba(k).count(HYBRID)
    num_blocks, rank = k.number("num_mem_blocks", 1), k.number("adapter_rank", 0)
    k.ignore("attention_hidden_size", "hybrid_layer_ids", "num_query_groups", "num_key_value_heads")
    return num_hybrid * (hidden * hidden + rank * (hidden + 2 * size)) - (num_hybrid - num_blocks) * block


def light_connections(k: Keys) -> int:
    """The same without mixing the copies among each other (Hunyuan 4)."""
    copies, hidden = k.number("hc_mult", 0), k.number("hidden_size")
    return (2 * k.number("num_hidden_layers") * 2 + 1) * copies * copies * hidden
