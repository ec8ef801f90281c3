"""Read what mixes the tokens of a layer: attention of all kinds, and states."""

from mocker.models.keys import Keys
from mocker.models.layers import Index, Matrix, Mixer, Side, column, row

HEADS = ("num_attention_heads", "n_head", "n_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
HIDDEN = ("hidden_size", "n_embd", "d_model")


def attention(k: Keys, kind: str, layer: int) -> Mixer:
    """Attention over all tokens, a window or a chunk, with any number of KV heads."""
    heads = k.number(*HEADS)
    kv_heads = (
        1 if k.get("multi_query") and not k.get("new_decoder_architecture") else k.number(*KV_HEADS, default=heads)
    )
    size = k.number("head_dim", "attention_head_dim", "kv_channels", default=k.number(*HIDDEN) // heads)
    return grouped_query(k, kind, heads=heads, kv_heads=kv_heads, head_dim=size)


def grouped_query(
    k: Keys,
    kind: str,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int = 0,
    has_gate: bool = False,
    has_values: bool = True,
    has_kv: bool = True,
    inputs: int = 0,
    name: str = "self_attn",
) -> Mixer:
    """Build attention from its sizes."""
    hidden, value_dim = k.number(*HIDDEN), value_dim or head_dim
    inputs = inputs or hidden
    queries = [Side(heads * head_dim * (2 if has_gate else 1), heads)]
    values = [Side(kv_heads * value_dim, kv_heads)] if has_values else []
    both = [Side(kv_heads * head_dim, kv_heads), *values] if has_kv else []
    letters = "q" + ("k" if has_kv else "") + ("v" if has_kv and has_values else "")
    return Mixer(
        kind=kind,
        matrices=(
            column(tuple([f"{name}.{letter}_proj" for letter in letters]), inputs, *queries, *both),
            row(f"{name}.o_proj", Side(heads * value_dim, heads), hidden),
        ),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        kv_width=head_dim + value_dim,
        has_kv=has_kv,
        window=_window(k, kind),
    )


def _window(k: Keys, kind: str) -> int:
    match kind:
        case "sliding_attention":
            return k.number("sliding_window", "sliding_window_size")
        case "chunked_attention":
            return k.number("attention_chunk_size")
    return 0


def gated_attention(k: Keys, kind: str, layer: int) -> Mixer:
    """Attention whose queries bring a gate for its output."""
    if kind == "linear_attention":
        return gated_delta(k, kind, layer)
    heads = k.number(*HEADS)
    return grouped_query(
        k,
        kind,
        heads=heads,
        kv_heads=k.number(*KV_HEADS, default=heads),
        head_dim=k.number("head_dim", default=k.number(*HIDDEN) // heads),
        has_gate=k.get("attn_output_gate") is not False,
    )


def window_of_its_own(k: Keys, kind: str, layer: int) -> Mixer:
    """MiMo V2: windowed layers have heads of another number and size."""
    prefix = "swa_" if kind == "sliding_attention" else ""
    heads = k.number(f"{prefix}num_attention_heads")
    return grouped_query(
        k,
        kind,
        heads=heads,
        kv_heads=k.number(f"{prefix}num_key_value_heads"),
        head_dim=k.number(f"{prefix}head_dim"),
        value_dim=k.number(f"{prefix}v_head_dim"),
    )


def gemma_4(k: Keys, kind: str, layer: int) -> Mixer:
    """Larger and fewer heads where all tokens are seen, whose keys may also be the values; late layers share KV."""
    is_full = kind == "full_attention"
    k_is_v = bool(is_full and k.get("attention_k_eq_v"))
    kv_heads = (
        k.number("num_global_key_value_heads", "num_key_value_heads") if k_is_v else k.number("num_key_value_heads")
    )
    return grouped_query(
        k,
        kind,
        heads=k.number("num_attention_heads"),
        kv_heads=kv_heads,
        head_dim=k.number("global_head_dim", "head_dim") if is_full else k.number("head_dim"),
        has_values=not k_is_v,
        has_kv=layer < k.number("num_hidden_layers") - k.number("num_kv_shared_layers", default=0),
    )


def latent_attention(k: Keys, kind: str, layer: int) -> Mixer:
    """Multi-head latent attention: one compressed vector a token, from which each head's keys and values are made."""
    hidden, heads, rank = k.number("hidden_size"), k.number("num_attention_heads"), k.number("kv_lora_rank")
    rope, nope, value = k.number("qk_rope_head_dim"), k.number("qk_nope_head_dim"), k.number("v_head_dim")
    q_rank = k.number("q_lora_rank", default=0)
    queries = Side(heads * (nope + rope), heads)
    k.number("num_key_value_heads", "head_dim", "qk_head_dim", default=0)  # say nothing here
    for name in ("num_key_value_heads", "head_dim", "qk_head_dim"):
        k.get(name)
    compress = (
        (column(("self_attn.q_a_proj",), hidden, Side(q_rank)), column(("self_attn.q_b_proj",), q_rank, queries))
        if q_rank
        else (column(("self_attn.q_proj",), hidden, queries),)
    )
    return Mixer(
        kind=kind,
        matrices=(
            *compress,
            column(("self_attn.kv_a_proj_with_mqa",), hidden, Side(rank + rope)),
            column(("self_attn.kv_b_proj",), rank, Side(heads * (nope + value), heads)),
            row("self_attn.o_proj", Side(heads * value, heads), hidden),
        ),
        num_heads=heads,
        num_kv_heads=1,
        head_dim=nope + rope,
        kv_width=rank + rope,
        latent_flops=2 * (2 * rank + rope),
    )


def indexed_attention(k: Keys, kind: str, layer: int) -> Mixer:
    """Latent attention to the tokens that an index picks (DeepSeek V3.2, GLM 5); layers may share an index."""
    plain = latent_attention(k, kind, layer)
    picked = k.number("index_topk")
    types = k.sequence("indexer_types")
    heads, size = k.number("index_n_heads"), k.number("index_head_dim")
    if types is not None and types[layer] == "shared":
        return _with_index(plain, (), Index(0, 0, picked))
    matrices = (
        column(("self_attn.indexer.wq_b",), k.number("q_lora_rank"), Side(heads * size)),
        column(("self_attn.indexer.wk", "self_attn.indexer.weights_proj"), k.number("hidden_size"), Side(size + heads)),
    )
    return _with_index(plain, matrices, Index(heads, size, picked))


def _with_index(plain: Mixer, matrices: tuple[Matrix, ...], index: Index) -> Mixer:
    from dataclasses import replace

    return replace(plain, matrices=plain.matrices + matrices, index=index)


def compressed_attention(k: Keys, kind: str, layer: int) -> Mixer:
    """DeepSeek V4: a window of single KV vectors and, beyond it, one entry for every few tokens, all of them or picked."""
    hidden, heads, size = k.number("hidden_size"), k.number("num_attention_heads"), k.number("head_dim")
    rank, groups, out_rank = k.number("q_lora_rank"), k.number("o_groups"), k.number("o_lora_rank")
    k.get("num_key_value_heads"), k.get("qk_rope_head_dim")
    compression = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}.get(kind, 1)
    has_index = compression == 4
    more: list[Matrix] = []
    index = None
    if compression > 1:
        width = size * (2 if has_index else 1)
        more.append(column(("attn.compressor.kv_proj", "attn.compressor.gate_proj"), hidden, Side(2 * width)))
    if has_index:
        index = Index(k.number("index_n_heads"), k.number("index_head_dim"), k.number("index_topk"))
        more += [
            column(("attn.indexer.q_b_proj",), rank, Side(index.num_heads * index.head_dim)),
            column(
                ("attn.indexer.kv_proj", "attn.indexer.gate_proj", "attn.indexer.weights_proj"),
                hidden,
                Side(4 * index.head_dim + index.num_heads),
            ),
        ]
    return Mixer(
        kind=kind,
        matrices=(
            column(("attn.q_a_proj", "attn.kv_proj"), hidden, Side(rank + size)),
            column(("attn.q_b_proj",), rank, Side(heads * size, heads)),
            Matrix(("attn.o_a_proj",), Side(heads * size // groups), (Side(groups * out_rank, groups),)),
            row("attn.o_b_proj", Side(groups * out_rank, groups), hidden),
            *more,
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


def gated_delta(k: Keys, kind: str, layer: int) -> Mixer:
    """Gated delta net (Qwen3-Next, Qwen3.5)."""
    hidden = k.number("hidden_size")
    key_heads, value_heads = k.number("linear_num_key_heads"), k.number("linear_num_value_heads")
    key, value = k.number("linear_key_head_dim"), k.number("linear_value_head_dim")
    keys, values = key_heads * key, value_heads * value
    return _state(
        kind,
        matrices=(
            column(
                ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_qkvz"),
                hidden,
                Side(2 * keys, key_heads),
                Side(2 * values, value_heads),
            ),
            column(
                ("linear_attn.in_proj_b", "linear_attn.in_proj_a", "linear_attn.in_proj_ba"),
                hidden,
                Side(2 * value_heads, value_heads),
            ),
            row("linear_attn.out_proj", Side(values, value_heads), hidden),
        ),
        num_convolved=2 * keys + values,
        kernel=k.number("linear_conv_kernel_dim"),
        num_heads=value_heads,
        num_groups=key_heads,
        num_values=value_heads * key * value,
        num_bytes=_state_bytes(k),
    )


def mamba_2(k: Keys, kind: str, layer: int) -> Mixer:
    """Mamba 2 (Nemotron-H, Granite 4, Bamba, Falcon-H1, Zamba 2)."""
    hidden = k.number("hidden_size")
    heads = k.number("mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads")
    size = k.number("mamba_head_dim", "mamba_d_head", "mamba_headdim", "head_dim")
    groups = k.number("n_groups", "mamba_n_groups", "mamba_ngroups", default=1)
    state = k.number("ssm_state_size", "mamba_d_state", "state_size")
    for name in ("expand", "mamba_expand", "mamba_d_ssm"):
        k.get(name)
    width, convolved = heads * size, heads * size + 2 * groups * state
    return _state(
        kind,
        matrices=(
            column(
                ("mixer.in_proj", "mamba.in_proj"),
                hidden,
                Side(2 * width + heads, heads),
                Side(2 * groups * state, groups),
            ),
            row("mixer.out_proj", Side(width, heads), hidden),
        ),
        num_convolved=convolved,
        kernel=k.number("conv_kernel", "mamba_d_conv"),
        num_heads=heads,
        num_groups=groups,
        num_values=width * state,
        num_bytes=_state_bytes(k),
    )


def mamba_1(k: Keys, kind: str, layer: int) -> Mixer:
    """Mamba 1 (Jamba, Falcon-Mamba)."""
    hidden = k.number("hidden_size")
    width = k.number("mamba_expand", "expand") * hidden
    state = k.number("mamba_d_state", "state_size")
    rank = k.get("mamba_dt_rank") or k.get("time_step_rank") or "auto"
    rank = -(-hidden // 16) if rank == "auto" else int(rank)
    return _state(
        kind,
        matrices=(
            column(("mamba.in_proj", "mixer.in_proj"), hidden, Side(2 * width, width)),
            row("mamba.x_proj", Side(width, width), rank + 2 * state),
            column(("mamba.dt_proj",), rank, Side(width, width)),
            row("mamba.out_proj", Side(width, width), hidden),
        ),
        num_convolved=width,
        kernel=k.number("mamba_d_conv", "conv_kernel"),
        num_heads=width,
        num_groups=1,
        num_values=width * state,
        num_bytes=_state_bytes(k),
        num_other=width * state,
    )


def lightning(k: Keys, kind: str, layer: int) -> Mixer:
    """Lightning attention (MiniMax-Text-01): linear attention with a gate, a matrix of state for each head."""
    hidden, heads = k.number("hidden_size"), k.number("num_attention_heads")
    size = k.number("head_dim", default=hidden // heads)
    return _state(
        kind,
        matrices=(
            column(("self_attn.qkv_proj",), hidden, Side(3 * heads * size, heads)),
            column(("self_attn.output_gate",), hidden, Side(heads * size, heads)),
            row("self_attn.out_proj", Side(heads * size, heads), hidden),
        ),
        num_convolved=0,
        kernel=0,
        num_heads=heads,
        num_groups=heads,
        num_values=heads * size * size,
        num_bytes=4,
    )


def short_convolution(k: Keys, kind: str, layer: int) -> Mixer:
    """A gated convolution over the last few tokens (LFM2)."""
    hidden = k.number("hidden_size")
    return _state(
        kind,
        matrices=(
            column(("conv.in_proj",), hidden, Side(3 * hidden, hidden)),
            row("conv.out_proj", Side(hidden, hidden), hidden),
        ),
        num_convolved=hidden,
        kernel=k.number("conv_L_cache"),
        num_heads=hidden,
        num_groups=hidden,
        num_values=0,
        num_bytes=0,
    )


def _state(
    kind: str,
    *,
    matrices: tuple[Matrix, ...],
    num_convolved: int,
    kernel: int,
    num_heads: int,
    num_groups: int,
    num_values: int,
    num_bytes: int,
    num_other: int = 0,
) -> Mixer:
    """Build a mixer that keeps `num_values` numbers of `num_bytes`, and the last inputs of a convolution in 16 bits."""
    return Mixer(
        kind=kind,
        matrices=matrices,
        num_other_parameters=num_convolved * kernel + num_other,
        num_state_heads=num_heads,
        num_state_groups=num_groups,
        state_bytes=num_values * num_bytes + num_convolved * max(kernel - 1, 0) * 2,
        state_flops=6 * num_values,
    )


def _state_bytes(k: Keys) -> int:
    """Return the bytes of a number of the state, as vLLM keeps it: in 16 bits unless the file says otherwise."""
    return 4 if "32" in str(k.get("mamba_ssm_cache_dtype") or k.get("mamba_ssm_dtype") or "") else 2
