"""Read attention that keeps the keys and values of heads: over everything, a window, a chunk, or blocks that an index picks."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from mocker.models import kinds
from mocker.models.keys import Keys, shown, whole
from mocker.models.kinds import FULL, SLIDING, SPARSE_BLOCKS
from mocker.models.layers import Index, Mixer, Side, column, row

MixerOf = Callable[[Keys, str], Mixer]
Gate = Literal["none", "head", "element"]
"""What each head's output is multiplied by: nothing, one number, or one for each element."""


def attention(*, gate: Gate = "none", wide: int = 1) -> MixerOf:
    """Return a reader of attention with any number of KV heads, whose inputs may be several times as wide as a layer."""

    def read(k: Keys, kind: str) -> Mixer:
        return grouped_query(k, kind, gate=gate, wide=wide)

    return read


def rounded_down(k: Keys, kind: str) -> Mixer:
    """Attention whose heads are no wider than an equal part of the layer's width, where the file does not say."""
    part = max(k.number("hidden_size") // k.number("num_attention_heads"), 1)
    return grouped_query(k, kind, head_dim=k.number("head_dim", part))


def head_size(k: Keys, heads: int) -> int:
    """Return the size of a head, or an equal part of the layer's width.

    Raises:
        ValueError: it is not said, and the width cannot be divided.
    """
    hidden = k.number("hidden_size")
    if not k.has("head_dim") and hidden % heads:
        raise ValueError(f"it lacks head_dim, and {heads} heads cannot divide hidden_size {hidden} equally")
    return k.number("head_dim", hidden // heads)


def gate_width(gate: Gate, heads: int, value_dim: int) -> int:
    """Return how many numbers gate the outputs of heads."""
    return {"none": 0, "head": heads, "element": heads * value_dim}[gate]


def has_own_kv(k: Keys) -> bool:
    """Return whether a layer keeps KV; the last ones may use that of earlier ones (Gemma)."""
    return k.layer < k.number("num_hidden_layers") - k.number("num_kv_shared_layers", 0)


def grouped_query(
    k: Keys,
    kind: str,
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
    gate: Gate = "none",
    has_values: bool = True,
    has_kv: bool = True,
    wide: int = 1,
) -> Mixer:
    """Build attention from its sizes, and read those that are not given."""
    heads = heads or k.number("num_attention_heads")
    kv_heads = kv_heads or k.number("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"it has {heads} heads and {kv_heads} KV heads; expected a multiple")
    hidden, head_dim = k.number("hidden_size"), head_dim or head_size(k, heads)
    value_dim = value_dim or head_dim
    queries = [Side(heads * head_dim + gate_width(gate, heads, value_dim), heads)]
    values = [Side(kv_heads * value_dim, kv_heads)] if has_values else []
    both = [Side(kv_heads * head_dim, kv_heads), *values] if has_kv else []
    letters = "q" + ("k" if has_kv else "") + ("v" if has_kv and has_values else "")
    return Mixer(
        kind=kind,
        matrices=(
            column(tuple([f"self_attn.{letter}_proj" for letter in letters]), wide * hidden, *queries, *both),
            row("self_attn.o_proj", Side(heads * value_dim, heads), hidden),
        ),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        kv_width=head_dim + value_dim,
        has_kv=has_kv,
        window=window(k, kind),
    )


def window(k: Keys, kind: str) -> int:
    """Return how many tokens a layer of a kind sees; 0: all."""
    match kind:
        case kinds.SLIDING:
            return k.number("sliding_window")
        case kinds.CHUNKED:
            return k.number("attention_chunk_size")
    return 0


def normed_across(k: Keys, kind: str) -> Mixer:
    """MiniMax M2: queries are normed over all heads together, and so are keys (`MiniMaxText01RMSNormTP` in vLLM)."""
    return replace(grouped_query(k, kind), is_normed_across=True)


def multi_query(k: Keys, kind: str) -> Mixer:
    """Attention with one KV head unless the file says otherwise (StarCoder, Falcon)."""
    has_one, is_new = k.flag("multi_query", True), k.flag("new_decoder_architecture")
    number = k.number("num_key_value_heads", k.number("num_attention_heads"))
    return grouped_query(k, kind, kv_heads=1 if has_one and not is_new else number)


def gated_if_said(k: Keys, kind: str) -> Mixer:
    """Attention whose queries bring a gate for its output, unless the file says otherwise (Qwen3-Next)."""
    return grouped_query(k, kind, gate="element" if k.flag("attn_output_gate", True) else "none")


def shared_across_layers(k: Keys, kind: str) -> Mixer:
    """Hunyuan's cross-layer attention: several consecutive layers use the first one's KV."""
    is_first = k.layer % k.number("cla_share_factor", 1) == 0
    return grouped_query(k, kind, has_kv=is_first or not k.flag("use_cla"))


def window_of_its_own(k: Keys, kind: str) -> Mixer:
    """MiMo V2: windowed layers have heads of another number and size."""
    prefix = "swa_" if kind == SLIDING else ""
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim"):
        k.ignore(f"swa_{name}")
    size = k.number(f"{prefix}head_dim", k.number("head_dim"))
    return grouped_query(
        k,
        kind,
        heads=k.number(f"{prefix}num_attention_heads", k.number("num_attention_heads")),
        kv_heads=k.number(f"{prefix}num_key_value_heads", k.number("num_key_value_heads")),
        head_dim=size,
        value_dim=k.number(f"{prefix}v_head_dim", k.number("v_head_dim", size)),
    )


def step(k: Keys, kind: str) -> Mixer:
    """Step 3.5: a gate for each head, and windowed layers that may have more heads."""
    heads, number = k.number("num_attention_heads"), k.number("num_key_value_heads")
    other = "attention_other_setting."
    own = k.number("num_sliding_attention_heads", k.number(f"{other}num_attention_heads", heads))
    own_kv = k.number(f"{other}num_attention_groups", number)
    k.ignore(f"{other}true_head_dim", f"{other}head_dim", f"{other}attention_type")
    if kind == SLIDING:
        heads, number = own, own_kv
    return grouped_query(k, kind, heads=heads, kv_heads=number, head_dim=k.number("head_dim"), gate="head")


def step_3(k: Keys, kind: str) -> Mixer:
    """Step 3: one KV head, and queries from a compressed vector."""
    heads, size, rank = k.number("num_attention_heads"), k.number("head_dim"), k.number("share_q_dim")
    plain = grouped_query(k, kind, heads=heads, kv_heads=1, head_dim=size)
    k.ignore("num_key_value_heads")
    return replace(
        plain,
        matrices=(
            column(
                ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                k.number("hidden_size"),
                Side(rank + 2 * size),
            ),
            column(("self_attn.wq",), rank, Side(heads * size, heads)),
            plain.matrices[1],
        ),
    )


def gemma_3n(k: Keys, kind: str) -> Mixer:
    """Late layers use the KV of the last layer of their kind before them."""
    return grouped_query(k, kind, has_kv=has_own_kv(k))


def gemma_4(k: Keys, kind: str) -> Mixer:
    """Larger and fewer heads where all tokens are seen, whose keys may also be the values; late layers share KV."""
    is_full = kind == FULL
    number, size = k.number("num_key_value_heads"), k.number("head_dim")
    full_number, full_size = k.number("num_global_key_value_heads", number), k.number("global_head_dim", size)
    k_is_v = is_full and k.flag("attention_k_eq_v")
    return grouped_query(
        k,
        kind,
        kv_heads=full_number if k_is_v else number,
        head_dim=full_size if is_full else size,
        has_values=not k_is_v,
        has_kv=has_own_kv(k),
    )


def picks_blocks(k: Keys, kind: str) -> Mixer:
    """MiniMax M3: in most layers, an index picks blocks of tokens."""
    plain = grouped_query(k, kind)
    number, size = k.number("index_n_heads"), k.number("index_head_dim")
    picked = k.number("index_topk_blocks") * k.number("index_block_size")
    k.ignore("index_local_blocks", "num_index_heads", *[f"sparse_attention_config.{name}" for name in SPARSE_ATTENTION])
    if kind != SPARSE_BLOCKS:
        return plain
    names = ("self_attn.indexer.q_proj", "self_attn.indexer.k_proj", "self_attn.index_q_proj", "self_attn.index_k_proj")
    return replace(
        plain,
        matrices=(*plain.matrices, column(names, k.number("hidden_size"), Side((number + 1) * size))),
        index=Index(number, size, picked),
    )


SPARSE_ATTENTION = ("sparse_disable_index_value", "sparse_init_block", "sparse_local_block", "use_sparse_attention")
"""Keys of MiniMax M3 that change nothing here."""


def in_block(k: Keys, kind: str) -> Mixer:
    """Layers that a search took parts from: each with its own number of heads that share KV (`block_configs`)."""
    heads, block = k.number("num_attention_heads"), (k.listed("block_configs") or [])[k.layer]["attention"]
    if block.get("window_length") is not None or block.get("sparsify") is not None:
        raise ValueError("block_configs has attention with a window, which is not known")
    together = whole(block.get("n_heads_in_group"))
    if not together or not 0 < together <= heads or heads % together:
        given = shown(block.get("n_heads_in_group"))
        raise ValueError(f"block_configs has n_heads_in_group {given}; expected a divisor of {heads}")
    return grouped_query(k, kind, kv_heads=heads // together)
