"""Read what keeps a state of fixed size instead of KV: Mamba, linear attention of several kinds, short convolutions."""

from mocker.models.attention import head_size
from mocker.models.keys import Keys
from mocker.models.layers import Matrix, Mixer, Side, column, row

STATE_TYPES = ("mamba_ssm_cache_dtype", "mamba_ssm_dtype")


def gated_delta(k: Keys, kind: str) -> Mixer:
    """Gated delta net (Qwen3-Next, Qwen3.5, OLMo Hybrid)."""
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
        num_bytes=_bytes(k),
    )


def kimi_delta(k: Keys, kind: str) -> Mixer:
    """Kimi delta attention: a decay for each element, whose matrices and the gate's may be of low rank."""
    hidden, heads, size = k.number("hidden_size"), k.number("linear_num_heads"), k.number("linear_head_dim")
    is_full = k.flag("linear_attn_config.use_full_rank_gate")
    k.ignore("num_kv_heads", "linear_attn_config.kda_layers", "linear_attn_config.full_attn_layers")
    all_heads = Side(heads * size, heads)
    through = (column(("self_attn.f_a_proj",), hidden, Side(size)), column(("self_attn.f_b_proj",), size, all_heads))
    gate = (column(("self_attn.g_a_proj",), hidden, Side(size)), column(("self_attn.g_b_proj",), size, all_heads))
    return _kimi(k, kind, (*through, *((column(("self_attn.g_proj",), hidden, all_heads),) if is_full else gate)))


def bailing(k: Keys, kind: str) -> Mixer:
    """Ling: 2.5 has lightning attention; 3 has convolutions, and Kimi delta attention with whole matrices."""
    if not k.has("linear_conv_kernel_dim"):
        return lightning(k, kind)
    hidden, all_heads = k.number("hidden_size"), _of_attention(k)
    names = ("self_attn.f_proj", "self_attn.g_proj")
    return _kimi(k, kind, (column(names, hidden, all_heads, all_heads),))


def _of_attention(k: Keys) -> Side:
    heads = k.number("linear_num_heads", k.number("num_attention_heads"))
    size = k.number("linear_head_dim", 0) or k.number("head_dim")
    return Side(heads * size, heads)


def _kimi(k: Keys, kind: str, decay_and_gate: tuple[Matrix, ...]) -> Mixer:
    hidden, side = k.number("hidden_size"), _of_attention(k)
    heads, size = side.num_pieces, side.size // side.num_pieces
    return _state(
        kind,
        matrices=(
            column(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), hidden, side, side, side),
            column(("self_attn.b_proj",), hidden, Side(heads, heads)),
            *decay_and_gate,
            row("self_attn.o_proj", side, hidden),
        ),
        num_convolved=3 * side.size,
        kernel=k.number("linear_conv_kernel_dim"),
        num_heads=heads,
        num_groups=heads,
        num_values=side.size * size,
        num_bytes=4,
    )


def mamba_2(k: Keys, kind: str) -> Mixer:
    """Mamba 2 (Nemotron-H, Granite 4, Bamba, Falcon-H1, Zamba 2)."""
    hidden, heads = k.number("hidden_size"), k.number("mamba_num_heads")
    wide, width = k.number("mamba_expand", 2) * hidden, k.number("mamba_d_ssm", 0)
    width = width or wide
    size = k.number_or("mamba_head_dim", "auto", max(width // heads, 1))
    groups, state = k.number("mamba_n_groups", 1), k.number("ssm_state_size")
    width = heads * size
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
        num_convolved=width + 2 * groups * state,
        kernel=k.number("conv_kernel"),
        num_heads=heads,
        num_groups=groups,
        num_values=width * state,
        num_bytes=_bytes(k),
    )


def mamba_1(k: Keys, kind: str) -> Mixer:
    """Mamba 1 (Jamba, Zamba)."""
    return _mamba_1(k, kind, k.number("mamba_expand", 2) * k.number("hidden_size"))


def mamba_alone(k: Keys, kind: str) -> Mixer:
    """Mamba 1 in models without feed-forward networks (Falcon-Mamba), which may say its width."""
    return _mamba_1(k, kind, k.number("intermediate_size", k.number("mamba_expand", 2) * k.number("hidden_size")))


def _mamba_1(k: Keys, kind: str, width: int) -> Mixer:
    hidden, state = k.number("hidden_size"), k.number("ssm_state_size")
    heads = k.number("n_mamba_heads", 1)
    rank = k.number_or("mamba_dt_rank", "auto", -(-hidden // 16))
    return _state(
        kind,
        matrices=(
            column(("mamba.in_proj", "mixer.in_proj"), hidden, Side(2 * width, width)),
            row("mamba.x_proj", Side(width, width), rank + 2 * state),
            column(("mamba.dt_proj",), rank, Side(width, width)),
            row("mamba.out_proj", Side(width, width), hidden),
        ),
        num_convolved=width,
        kernel=k.number("conv_kernel"),
        num_heads=width,
        num_groups=heads,
        num_values=width * state,
        num_bytes=_bytes(k),
        num_other=width * state,
    )


def lightning(k: Keys, kind: str) -> Mixer:
    """Lightning attention (MiniMax-Text-01): linear attention with a gate, a matrix of state for each head."""
    hidden, heads = k.number("hidden_size"), k.number("num_attention_heads")
    size = head_size(k, heads)
    return _state(
        kind,
        matrices=(
            column(("self_attn.qkv_proj",), hidden, Side(3 * heads * size, heads)),
            column(("self_attn.output_gate",), hidden, Side(heads * size, heads)),
            row("self_attn.out_proj", Side(heads * size, heads), hidden),
        ),
        num_heads=heads,
        num_groups=heads,
        num_values=heads * size * size,
        num_bytes=4,
    )


def short_convolution(k: Keys, kind: str) -> Mixer:
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
    )


def gated_recurrence(k: Keys, kind: str) -> Mixer:
    """The recurrent unit of RecurrentGemma: one number for each channel, with gates for blocks of channels."""
    hidden, heads = k.number("hidden_size"), k.number("num_attention_heads")
    width = k.number("lru_width", hidden)
    return _state(
        kind,
        matrices=(
            column(("temporal_block.linear_x", "temporal_block.linear_y"), hidden, Side(2 * width, heads)),
            row("temporal_block.linear_out", Side(width, heads), hidden),
        ),
        num_convolved=width,
        kernel=k.number("conv1d_width", 4),
        num_heads=heads,
        num_groups=heads,
        num_values=width,
        num_bytes=4,
        num_other=2 * width * width // heads,
    )


def _state(
    kind: str,
    *,
    matrices: tuple[Matrix, ...],
    num_heads: int,
    num_groups: int,
    num_convolved: int = 0,
    kernel: int = 0,
    num_values: int = 0,
    num_bytes: int = 0,
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


def _bytes(k: Keys) -> int:
    """Return the bytes of a number of the state, as vLLM keeps it: in 16 bits unless the file says otherwise."""
    return 4 if any("32" in k.text(name) for name in STATE_TYPES) else 2
