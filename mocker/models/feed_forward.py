"""Read the feed-forward network of a layer: dense, a mixture of experts, or both."""

from collections.abc import Callable

from mocker.models.attention import has_own_kv
from mocker.models.keys import MOST, Keys, shown, whole
from mocker.models.kinds import EXPERTS, HYBRID, NETWORK, NOTHING
from mocker.models.layers import FeedForward, Matrix, Side, column, row

FeedForwardOf = Callable[[Keys, str], FeedForward | None]
IsSparse = Callable[[Keys], bool]


def gated(k: Keys, kind: str) -> FeedForward:
    """Two matrices in, one of them through an activation, and one out."""
    return dense(k, k.number("intermediate_size"))


def gated_halves(k: Keys, kind: str) -> FeedForward:
    """The same where the size counts both matrices."""
    return dense(k, k.number("intermediate_size") // 2)


def plain(k: Keys, kind: str) -> FeedForward:
    """One matrix in and one out, four times as wide as the layer unless the file says otherwise."""
    size = int(k.real("expansion_ratio", 4) * k.number("hidden_size"))
    return dense(k, k.number("intermediate_size", size), is_gated=False)


def none(k: Keys, kind: str) -> None:
    """Layers without a network of their own (Mamba)."""
    k.ignore("intermediate_size")


def dense(k: Keys, size: int, *, is_gated: bool = True) -> FeedForward:
    """Build a dense network of a size."""
    return FeedForward(size=size, matrices=_matrices(k.number("hidden_size"), size, "mlp", is_gated=is_gated))


def _matrices(hidden: int, size: int, name: str, *, is_gated: bool = True) -> tuple[Matrix, ...]:
    inner = (f"{name}.gate_proj", f"{name}.up_proj", f"{name}.gate_up_proj") if is_gated else (f"{name}.up_proj",)
    side = Side(size, size)
    return (
        column(inner, hidden, *([side] * (2 if is_gated else 1))),
        row(f"{name}.down_proj", side, hidden),
    )


def everywhere(k: Keys) -> bool:
    """Every layer is a mixture."""
    return True


def after_dense(k: Keys) -> bool:
    """DeepSeek's rule: the first layers are dense, then every layer (or every few) is a mixture; or it is said of each."""
    layer, first = k.layer, k.number("first_k_dense_replace", 0)
    types = k.of_each_layer("mlp_layer_types")
    if types is not None:
        k.ignore("moe_layer_freq")
        return _is_sparse_type(types[layer])
    if k.is_list("moe_layer_freq"):
        return bool((k.of_each_layer("moe_layer_freq") or [])[layer])
    return layer >= first and layer % k.number("moe_layer_freq", 1) == 0


def _is_sparse_type(word: object) -> bool:
    if word not in ("sparse", "dense"):
        raise ValueError(f"mlp_layer_types has {shown(word)}; expected sparse or dense")
    return word == "sparse"


def after(count: int) -> IsSparse:
    """Return the same rule with another number of dense layers where the file does not say."""

    def is_sparse(k: Keys) -> bool:
        if k.has("first_k_dense_replace") or k.has("mlp_layer_types") or k.has("moe_layer_freq"):
            return after_dense(k)
        return k.layer >= count

    return is_sparse


def every_few(k: Keys) -> bool:
    """Qwen's rule: every `decoder_sparse_step`th layer is a mixture, but those that are listed."""
    only, step = k.places("mlp_only_layers") or [], k.number("decoder_sparse_step", 1)
    types, layer = k.of_each_layer("mlp_layer_types"), k.layer
    if types is not None:
        return _is_sparse_type(types[layer])
    return layer not in only and (layer + 1) % step == 0


def from_to(k: Keys) -> bool:
    """ERNIE's rule: every few layers from one to another; -1 is the last."""
    layer, first, step = k.layer, k.number("moe_layer_start_index", 0), k.number("moe_layer_interval", 1)
    last, count = k.number("moe_layer_end_index", -1, least=-1), k.number("num_hidden_layers")
    last = count if last == -1 else last
    return (layer + 1) % step == 0 and first <= layer <= last


def with_period(k: Keys) -> bool:
    """Jamba's rule: one layer of every few."""
    return k.layer % k.number("expert_layer_period", 2) == k.number("expert_layer_offset", 1, least=0)


def enumerated(k: Keys) -> bool:
    """Step's rule: the layers are listed, as numbers or in a text with commas."""
    layer = k.layer
    if k.has("mlp_layer_types") or k.has("first_k_dense_replace"):
        k.ignore("moe_layers_enum")
        return after_dense(k)
    if k.is_list("moe_layers_enum"):
        return layer in (k.places("moe_layers_enum") or [])
    words = k.text("moe_layers_enum")
    if not words:
        return layer >= 3
    if not all(word.strip().isdigit() for word in words.split(",")):
        raise ValueError(f"moe_layers_enum is {shown(words)}; expected numbers of layers with commas")
    return layer in [int(word) for word in words.split(",")]


def mixture(is_sparse: IsSparse = everywhere, *, has_shared_gate: bool = False) -> FeedForwardOf:
    """Return a reader of mixtures of experts in some layers, and dense networks in the others."""

    def read(k: Keys, kind: str) -> FeedForward:
        if not is_sparse(k):
            k.ignore(*MIXTURE)
            return dense(k, _dense_size(k))
        same = k.number("intermediate_size", 0)  # of architectures that have no dense layers
        size = k.number("moe_intermediate_size", None if k.is_null("moe_intermediate_size") else same or None)
        return experts(k, size, shared_size(k, size), has_gate=has_shared_gate)

    return read


MIXTURE = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "num_shared_experts",
    "shared_expert_intermediate_size",
    "moe_latent_size",
)
"""Keys that say nothing about a dense layer."""


def _dense_size(k: Keys) -> int:
    """Return the size of the dense layers among mixtures, which may have a key of their own."""
    return k.number("dense_intermediate_size", 0) or k.number("intermediate_size")


def shared_size(k: Keys, expert_size: int) -> int:
    """Return the size of what all tokens share: as given, or so many experts."""
    count, size = k.number("num_shared_experts", 0), k.number("shared_expert_intermediate_size", 0)
    return size * max(count, 1) if size else count * expert_size


def experts(k: Keys, size: int, shared: int, *, is_gated: bool = True, has_gate: bool = False) -> FeedForward:
    """Build a mixture from its sizes: experts, which may work on a compressed vector, and what all tokens share.

    Raises:
        ValueError: it is not said how many experts a token uses.
    """
    hidden, count, latent = k.number("hidden_size"), k.number("num_experts"), k.number("moe_latent_size", 0)
    chosen = k.number("num_experts_per_tok")
    if chosen > count:
        raise ValueError(f"num_experts_per_tok is {chosen}; expected at most the {count} experts")
    k.ignore("dense_intermediate_size", "intermediate_size", "swiglu_limits_shared")
    always = _matrices(hidden, shared, "mlp.shared_experts", is_gated=is_gated) if shared else ()
    if latent:
        always += (
            column(("mlp.fc1_latent_proj",), hidden, Side(latent)),
            column(("mlp.fc2_latent_proj",), latent, Side(hidden)),
        )
    return FeedForward(
        size=shared,
        matrices=always,
        num_experts=count,
        experts_per_token=chosen,
        expert_size=size,
        expert_matrices=_matrices(latent or hidden, size, "mlp.experts.0", is_gated=is_gated),
        num_other_parameters=hidden * (count + k.number("zero_expert_num", 0) + (1 if has_gate and shared else 0)),
    )


def llama_4(k: Keys, kind: str) -> FeedForward:
    """Every few layers are a mixture with one shared expert; the dense ones are larger."""
    step, listed, layer = k.number("interleave_moe_layer_step", 1), k.places("moe_layers"), k.layer
    wide = k.number("intermediate_size_mlp")
    if layer in listed if listed is not None else (layer + 1) % step == 0:
        size = k.number("intermediate_size")
        return experts(k, size, size)
    k.ignore(*MIXTURE)
    return dense(k, wide)


def gemma_4(k: Keys, kind: str) -> FeedForward:
    """A dense network in every layer, twice as wide where KV is shared, and in some models a mixture in parallel."""
    size, has_kv = k.number("intermediate_size"), has_own_kv(k)
    if k.flag("use_double_wide_mlp") and not has_kv:
        size *= 2
    if k.flag("enable_moe_block"):
        return experts(k, k.number("moe_intermediate_size"), size)
    k.ignore(*MIXTURE)
    return dense(k, size)


def nemotron_h(k: Keys, kind: str) -> FeedForward | None:
    """Layers of their own, with one matrix in: experts, or a dense network."""
    k.ignore(*MIXTURE, "intermediate_size", "mtp_layers_block_type")
    if kind == EXPERTS:
        size = k.number("moe_intermediate_size")
        return experts(k, size, shared_size(k, size), is_gated=False)
    return dense(k, k.number("intermediate_size"), is_gated=False) if kind == NETWORK else None


def granite_hybrid(k: Keys, kind: str) -> FeedForward:
    """Granite 4: experts and a shared network, or only that."""
    shared = k.number("shared_expert_intermediate_size")
    if k.number("num_experts", 0):
        return experts(k, k.number("intermediate_size"), shared)
    k.ignore(*MIXTURE, "intermediate_size")
    return dense(k, shared)


def lfm2(k: Keys, kind: str) -> FeedForward:
    """LFM2: two thirds of the size, scaled, and rounded up to whole blocks; or the size as it is."""
    size, multiple = k.number("intermediate_size"), k.number("block_multiple_of", 256)
    k.ignore("block_dim", "conv_dim", "conv_dim_out", "num_heads", "block_use_swiglu")
    if k.flag("block_auto_adjust_ff_dim", True):
        size = int(k.real("block_ffn_dim_multiplier", 1.0) * (2 * size // 3))
        size = -(-size // multiple) * multiple
    return dense(k, size)


def arctic(k: Keys, kind: str) -> FeedForward:
    """Arctic: a dense network as wide as the layer, in parallel to the experts of every few layers."""
    step, size = k.number("moe_layer_frequency", 1), k.number("intermediate_size")
    if (k.layer + 1) % step:
        return dense(k, size)
    k.ignore("use_residual")
    return experts(k, size, k.number("hidden_size") if k.flag("parallel_attn_mlp_res") else 0)


def grok(k: Keys, kind: str) -> FeedForward:
    """Grok: experts, in Grok 2 in parallel to a dense network."""
    size = k.number("intermediate_size")
    if k.flag("residual_moe"):
        return experts(k, k.number("moe_intermediate_size"), size)
    return experts(k, k.number("moe_intermediate_size", size), 0)


def in_block(k: Keys, kind: str) -> FeedForward | None:
    """Layers that a search took parts from: a multiple of the layer's width, rounded up (`block_configs`), or nothing."""
    hidden, block = k.number("hidden_size"), (k.listed("block_configs") or [])[k.layer]["ffn"]
    k.ignore("intermediate_size")
    if kind == NOTHING or block.get("no_op"):
        return None
    size = block.get("intermediate_size")
    factor = block.get("ffn_mult")
    if size is None:
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < 100:
            raise ValueError(f"block_configs has ffn_mult {shown(factor)}; expected a number above 0")
        size = -(-int(2 * factor * hidden / 3) // 256) * 256
    if not (count := whole(size)) or not 0 < count <= MOST:
        raise ValueError(f"block_configs has intermediate_size {shown(size)}; expected a whole number above 0")
    return dense(k, count)


def only_hybrid(k: Keys, kind: str) -> FeedForward | None:
    """Zamba: only the layers with attention have a network, all the same one."""
    return gated(k, kind) if kind == HYBRID else None


def longcat(k: Keys, kind: str) -> FeedForward:
    """LongCat: two dense networks, one after the other, and experts in parallel."""
    return experts(k, k.number("moe_intermediate_size"), 2 * k.number("intermediate_size"))


def if_any(experts_or_dense: FeedForwardOf) -> FeedForwardOf:
    """Return a reader for models that may have no experts, or one."""

    def read(k: Keys, kind: str) -> FeedForward | None:
        if k.is_list("num_experts") or k.number("num_experts", 0) > 1:
            return experts_or_dense(k, kind)
        k.ignore(*MIXTURE)
        return gated(k, kind)

    return read


def dbrx(k: Keys, kind: str) -> FeedForward | None:
    """DBRX: a part of the file describes the experts, and repeats the layer's width."""
    k.ignore("ffn_config.hidden_size")
    return mixture()(k, kind)
