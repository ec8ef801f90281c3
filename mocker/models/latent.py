"""Read attention that keeps one compressed vector a token: all of them, those that an index picks, or one for every few."""

from dataclasses import replace

from mocker.models.attention import Gate, MixerOf, attention, gate_width
from mocker.models.attention import window as seen
from mocker.models.keys import Keys, shown
from mocker.models.kinds import COMPRESSED, INDEXED
from mocker.models.layers import Index, Matrix, Mixer, Side, column, row


def latent_attention(*, gate: Gate = "none") -> MixerOf:
    """Return a reader of multi-head latent attention: each head's keys and values are made from one vector."""

    def read(k: Keys, kind: str) -> Mixer:
        rank, rope, nope = k.number("kv_lora_rank"), k.number("qk_rope_head_dim", 0), k.number("qk_nope_head_dim")
        hidden, heads, value = k.number("hidden_size"), k.number("num_attention_heads"), k.number("v_head_dim", nope)
        k.ignore("num_key_value_heads", "head_dim", "qk_head_dim", "mla_scale_q_lora", "mla_scale_kv_lora")
        gates = gate_width("element" if k.flag("mla_use_output_gate") else gate, heads, value)
        return Mixer(
            kind=kind,
            matrices=(
                *_queries(k, Side(heads * (nope + rope), heads)),
                column(("self_attn.kv_a_proj_with_mqa",), hidden, Side(rank + rope)),
                column(("self_attn.kv_b_proj",), rank, Side(heads * (nope + value), heads)),
                *([column(("self_attn.g_proj",), hidden, Side(gates, heads))] if gates else []),
                row("self_attn.o_proj", Side(heads * value, heads), hidden),
            ),
            num_heads=heads,
            num_kv_heads=1,
            head_dim=nope + rope,
            kv_width=rank + rope,
            latent_flops=2 * (2 * rank + rope),
            window=seen(k, kind),
        )

    return read


def bailing(k: Keys, kind: str) -> Mixer:
    """Ling: from 3 on, whose other layers have convolutions, with a gate for each head."""
    return latent_attention(gate="head" if k.has("linear_conv_kernel_dim") else "none")(k, kind)


def latent_if_used(k: Keys, kind: str) -> Mixer:
    """Latent attention, unless the file says that keys and values are kept as they are (DeepSeek-VL2)."""
    names = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    if k.flag("use_mla", True):
        return latent_attention()(k, kind)
    k.ignore(*names)
    return attention()(k, kind)


def _queries(k: Keys, queries: Side) -> list[Matrix]:
    """Return the matrices of queries, which may be compressed too."""
    hidden, rank = k.number("hidden_size"), k.number("q_lora_rank", 0)
    if not rank:
        return [column(("self_attn.q_proj",), hidden, queries)]
    return [column(("self_attn.q_a_proj",), hidden, Side(rank)), column(("self_attn.q_b_proj",), rank, queries)]


def indexed_attention(*, gate: Gate = "none") -> MixerOf:
    """Return a reader of latent attention to the tokens that an index picks; layers may share one (DeepSeek V3.2, GLM 5)."""
    plainly = latent_attention(gate=gate)

    def read(k: Keys, kind: str) -> Mixer:
        plain, hidden = plainly(k, kind), k.number("hidden_size")
        if kind != INDEXED:
            return plain
        heads, size, picked = k.number("index_n_heads"), k.number("index_head_dim"), k.number("index_topk")
        together = k.number("index_kpool", 1)
        k.ignore("index_kpool_always_select_tail", "index_kpool_compress", "index_share_for_mtp_iteration")
        if not _has_index(k):
            return replace(plain, index=Index(0, 0, picked))
        matrices = (
            column(("self_attn.indexer.wq_b",), k.number("q_lora_rank", hidden), Side(heads * size)),
            column(("self_attn.indexer.wk", "self_attn.indexer.weights_proj"), hidden, Side(size + heads)),
        )
        pooled = hidden * size if together > 1 else 0
        return replace(
            plain,
            matrices=plain.matrices + matrices,
            index=Index(heads, size, picked),
            num_other_parameters=plain.num_other_parameters + pooled,
        )

    return read


def _has_index(k: Keys) -> bool:
    """Return whether a layer has an index of its own, or uses that of an earlier one."""
    types, letters, layer = k.of_each_layer("indexer_types"), k.text("index_topk_pattern"), k.layer
    step, offset = k.number("index_topk_freq", 1), k.number("index_skip_topk_offset", 0) or 2
    if types is not None:
        if types[layer] not in ("full", "shared"):
            raise ValueError(f"indexer_types has {shown(types[layer])}; expected full or shared")
        return bool(types[layer] == "full")
    if letters:
        return letters[layer : layer + 1] != "S"
    return max(layer - offset + 1, 0) % step == 0


def compressed_attention(k: Keys, kind: str) -> Mixer:
    """DeepSeek V4: a window of single KV vectors and, beyond it, one entry for every few tokens, all of them or picked."""
    hidden, heads, size = k.number("hidden_size"), k.number("num_attention_heads"), k.number("head_dim")
    rank, groups, out_rank = k.number("q_lora_rank"), k.number("o_groups"), k.number("o_lora_rank")
    k.ignore("num_key_value_heads", "qk_rope_head_dim")
    compression = {name: ratio or 1 for ratio, name in COMPRESSED.items()}.get(kind, 1)
    index = (
        Index(k.number("index_n_heads"), k.number("index_head_dim"), k.number("index_topk"))
        if compression == 4
        else None
    )
    return Mixer(
        kind=kind,
        matrices=(
            column(("attn.q_a_proj", "attn.kv_proj"), hidden, Side(rank + size)),
            column(("attn.q_b_proj",), rank, Side(heads * size, heads)),
            Matrix(("attn.o_a_proj",), Side(heads * size // groups), (Side(groups * out_rank, groups),)),
            row("attn.o_b_proj", Side(groups * out_rank, groups), hidden),
            *_compressors(hidden, rank, size, compression, index),
        ),
        num_heads=heads,
        num_kv_heads=1,
        head_dim=size,
        kv_width=size,
        latent_flops=4 * size,
        window=k.number("sliding_window"),
        compression=compression,
        index=index,
    )


def _compressors(hidden: int, rank: int, size: int, compression: int, index: Index | None) -> list[Matrix]:
    """Return the matrices that make one entry of several tokens, and those of the index that picks among entries."""
    if compression == 1:
        return []
    width = size * (2 if index is not None else 1)
    found = [column(("attn.compressor.kv_proj", "attn.compressor.gate_proj"), hidden, Side(2 * width))]
    if index is not None:
        names = ("attn.indexer.kv_proj", "attn.indexer.gate_proj", "attn.indexer.weights_proj")
        found += [
            column(("attn.indexer.q_b_proj",), rank, Side(index.num_heads * index.head_dim)),
            column(names, hidden, Side(4 * index.head_dim + index.num_heads)),
        ]
    return found
