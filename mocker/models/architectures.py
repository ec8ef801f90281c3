"""The table of architectures: for each `model_type` of a config.json, what its layers are made of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mocker.models import kinds as by
from mocker.models import mixers as mix
from mocker.models.feed_forward import (
    after_dense,
    dense,
    every_few,
    experts_beside,
    gated,
    mixture,
    plain,
    shared_by_count,
    shared_by_size,
)
from mocker.models.keys import Keys
from mocker.models.layers import FeedForward, Mixer

MixerOf = Callable[[Keys, str, int], Mixer]
FeedForwardOf = Callable[[Keys, int], FeedForward | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How the layers of an architecture are read."""

    mixer: MixerOf = mix.attention
    feed_forward: FeedForwardOf = gated
    kinds: Callable[[Keys], list[str]] = by.all_full
    """The kind of each layer. `moe` and `mlp` are layers without a mixer; the others have both."""
    is_separate: bool = False
    """Whether mixers and feed-forward networks are layers of their own."""
    is_tied: bool = False
    """Whether embeddings are the head where the file does not say."""
    also: Callable[[Keys], int] | None = None
    """Other parameters of the whole model, in 16 bits."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Of keys that files leave out."""


def _llama_4(k: Keys, layer: int) -> FeedForward:
    """Every few layers are a mixture with one shared expert; the dense ones are larger."""
    step, listed = k.number("interleave_moe_layer_step", default=1), k.sequence("moe_layers")
    k.get("intermediate_size_mlp")
    if layer in listed if listed is not None else (layer + 1) % step == 0:
        size = k.number("intermediate_size")
        return experts_beside(k, size, size, name="feed_forward", shared_name="shared_expert")
    return dense(k, k.number("intermediate_size_mlp"), name="feed_forward")


def _gemma_4(k: Keys, layer: int) -> FeedForward:
    """A dense network in every layer, twice as wide where KV is shared, and a mixture beside it."""
    size = k.number("intermediate_size")
    shares_kv = layer >= k.number("num_hidden_layers") - k.number("num_kv_shared_layers", default=0)
    if k.get("use_double_wide_mlp") and shares_kv:
        size *= 2
    if k.get("enable_moe_block"):
        return experts_beside(k, k.number("moe_intermediate_size"), size)
    k.get("num_experts"), k.get("top_k_experts"), k.get("moe_intermediate_size")
    return dense(k, size)


def _per_layer_inputs(k: Keys) -> int:
    """Count Gemma's embeddings for each layer, and the matrices that mix them in."""
    size, hidden, layers = (
        k.number("hidden_size_per_layer_input", default=0),
        k.number("hidden_size"),
        k.number("num_hidden_layers"),
    )
    return size * layers * (k.number("vocab_size_per_layer_input", default=0) + 3 * hidden) if size else 0


def _nemotron_h(k: Keys, kind: str, layer: int) -> Mixer:
    return mix.mamba_2(k, kind, layer) if kind == "linear_attention" else mix.attention(k, kind, layer)


def _nemotron_h_ffn(k: Keys, layer: int) -> FeedForward:
    k.get("intermediate_size"), k.get("chunk_size")
    if by.nemotron_h(k)[layer] == "moe":
        latent = k.number("moe_latent_size", default=0)
        shared = k.number("moe_shared_expert_intermediate_size", default=0) * k.number("n_shared_experts", default=1)
        return experts_beside(k, k.number("moe_intermediate_size"), shared, is_gated=False, name="mixer", latent=latent)
    return dense(k, k.number("intermediate_size"), is_gated=False, name="mixer")


def _deepseek_v4(k: Keys, layer: int) -> FeedForward:
    size = k.number("moe_intermediate_size")
    return experts_beside(k, size, size * k.number("n_shared_experts", default=1), name="ffn")


def _hyper_connections(k: Keys) -> int:
    """Count DeepSeek V4's matrices that mix the copies of the residual, two in each layer, and its look-up of experts."""
    copies, hidden = k.number("hc_mult"), k.number("hidden_size")
    return 2 * k.number("num_hidden_layers") * (2 + copies) * copies * copies * hidden


def _positions(k: Keys) -> int:
    """Count embeddings of positions."""
    return k.number("n_positions", "max_position_embeddings", default=0) * k.number(*mix.HIDDEN)


DEEPSEEK = mixture(is_sparse=after_dense, shared=shared_by_count("n_shared_experts"))
QWEN = mixture(is_sparse=every_few, shared=shared_by_size, has_shared_gate=True, shared_name="shared_expert")
MIXTRAL = mixture(name="block_sparse_moe")

PLAIN_LLAMA = Architecture()
ARCHITECTURES: dict[str, Architecture] = {
    # Dense
    "llama": PLAIN_LLAMA,
    "mistral": Architecture(kinds=by.one_window),
    "mistral3": Architecture(kinds=by.one_window),
    "ministral": Architecture(kinds=by.layer_types),
    "ministral3": Architecture(kinds=by.one_window),
    "qwen2": Architecture(kinds=by.late_windows),
    "qwen2_vl": Architecture(kinds=by.late_windows),
    "qwen2_5_vl": Architecture(kinds=by.late_windows),
    "qwen3": Architecture(kinds=by.late_windows),
    "qwen3_vl": PLAIN_LLAMA,
    "seed_oss": PLAIN_LLAMA,
    "phi3": Architecture(kinds=by.one_window),
    "internlm2": PLAIN_LLAMA,
    "internlm3": PLAIN_LLAMA,
    "baichuan": PLAIN_LLAMA,
    "yi": PLAIN_LLAMA,
    "aquila": PLAIN_LLAMA,
    "orion": PLAIN_LLAMA,
    "mimo": PLAIN_LLAMA,
    "helium": PLAIN_LLAMA,
    "glm": PLAIN_LLAMA,
    "glm4": PLAIN_LLAMA,
    "granite": PLAIN_LLAMA,
    "smollm3": Architecture(is_tied=True, kinds=by.layer_types),
    "olmo": PLAIN_LLAMA,
    "olmo2": PLAIN_LLAMA,
    "olmo3": Architecture(kinds=by.layer_types),
    "stablelm": PLAIN_LLAMA,
    "exaone4": Architecture(kinds=by.exaone),
    "ernie4_5": PLAIN_LLAMA,
    "hunyuan_v1_dense": PLAIN_LLAMA,
    "apertus": Architecture(feed_forward=plain),
    "arcee": Architecture(feed_forward=plain),
    "nemotron": Architecture(feed_forward=plain),
    "cohere": Architecture(is_tied=True),
    "cohere2": Architecture(is_tied=True, kinds=by.every(4)),
    "gemma": Architecture(is_tied=True),
    "gemma2": Architecture(is_tied=True, kinds=by.every(2)),
    "gemma3": Architecture(is_tied=True, kinds=by.every(6)),
    "gemma3_text": Architecture(is_tied=True, kinds=by.every(6)),
    "starcoder2": Architecture(feed_forward=plain, kinds=by.one_window, is_tied=True),
    "phi": Architecture(feed_forward=plain),
    "gpt2": Architecture(feed_forward=plain, is_tied=True, also=_positions),
    "gpt_bigcode": Architecture(feed_forward=plain, is_tied=True, also=_positions, defaults={"multi_query": True}),
    "gpt_neox": Architecture(feed_forward=plain),
    "gptj": Architecture(feed_forward=plain),
    "opt": Architecture(feed_forward=plain, is_tied=True, also=_positions),
    "bloom": Architecture(feed_forward=plain, is_tied=True),
    "falcon": Architecture(feed_forward=plain, is_tied=True, defaults={"multi_query": True}),
    "mpt": Architecture(feed_forward=plain, is_tied=True),
    # Mixtures of experts
    "mixtral": Architecture(feed_forward=MIXTRAL, kinds=by.one_window),
    "phimoe": Architecture(feed_forward=MIXTRAL, kinds=by.one_window),
    "minimax_m2": Architecture(feed_forward=MIXTRAL),
    "gpt_oss": Architecture(feed_forward=mixture(), kinds=by.every(2)),
    "qwen2_moe": Architecture(feed_forward=QWEN, kinds=by.late_windows),
    "qwen3_moe": Architecture(feed_forward=QWEN, kinds=by.late_windows),
    "qwen3_vl_moe": Architecture(feed_forward=QWEN),
    "olmoe": Architecture(feed_forward=mixture()),
    "granitemoe": Architecture(feed_forward=MIXTRAL),
    "glm4_moe": Architecture(feed_forward=DEEPSEEK),
    "dots1": Architecture(feed_forward=DEEPSEEK, kinds=by.layer_types),
    "llama4": Architecture(feed_forward=_llama_4, kinds=by.llama_4, defaults={"attention_chunk_size": 8192}),
    "mimo_v2_flash": Architecture(mixer=mix.window_of_its_own, feed_forward=DEEPSEEK, kinds=by.mimo),
    "gemma4": Architecture(
        mixer=mix.gemma_4, feed_forward=_gemma_4, kinds=by.every(6), is_tied=True, also=_per_layer_inputs
    ),
    # Latent attention
    "deepseek_v2": Architecture(mixer=mix.latent_attention, feed_forward=DEEPSEEK),
    "deepseek_v3": Architecture(mixer=mix.latent_attention, feed_forward=DEEPSEEK),
    "kimi_k2": Architecture(mixer=mix.latent_attention, feed_forward=DEEPSEEK),
    "deepseek_v32": Architecture(mixer=mix.indexed_attention, feed_forward=DEEPSEEK, kinds=by.all_indexed),
    "glm_moe_dsa": Architecture(mixer=mix.indexed_attention, feed_forward=DEEPSEEK, kinds=by.all_indexed),
    "deepseek_v4": Architecture(
        mixer=mix.compressed_attention, feed_forward=_deepseek_v4, kinds=by.deepseek_v4, also=_hyper_connections
    ),
    # States
    "qwen3_next": Architecture(mixer=mix.gated_attention, feed_forward=QWEN, kinds=by.qwen_linear),
    "qwen3_5": Architecture(mixer=mix.gated_attention, kinds=by.qwen_linear),
    "qwen3_5_moe": Architecture(mixer=mix.gated_attention, feed_forward=QWEN, kinds=by.qwen_linear),
    "nemotron_h": Architecture(mixer=_nemotron_h, feed_forward=_nemotron_h_ffn, kinds=by.nemotron_h, is_separate=True),
}
