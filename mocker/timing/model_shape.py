"""The properties of a model that determine its times and memory: the numbers in its config.json."""

from dataclasses import dataclass
from typing import Any

BYTES = {"bfloat16": 2.0, "fp8": 1.0, "int4": 0.5625, "fp4": 0.5625}
"""Bytes of a weight or a KV element; the 4-bit formats keep a scale of 8 bits for every 16 weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer in numbers; zero for parts that it does not have."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    num_full_attention_layers: int
    """Layers whose KV cache grows with the context; the rest attend to a window or keep a state of fixed size."""
    sliding_window: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    shared_expert_size: int = 0
    num_dense_layers: int = 0
    """Layers of a mixture of experts that have a dense FFN."""
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    rope_head_dim: int = 0
    nope_head_dim: int = 0
    value_head_dim: int = 0
    is_tied: bool = False
    context_length: int = 0
    """Most tokens of a sequence, prompt and output together."""
    weights: str = "bfloat16"

    @property
    def is_mla(self) -> bool:
        """Whether attention keeps one compressed KV vector a token (multi-head latent attention)."""
        return self.kv_lora_rank > 0

    def projections(self, tensor_parallel_size: int) -> list[tuple[int, int]]:
        """Return (inputs, outputs) of the matrices around attention in one layer, on one GPU."""
        h, n = self.hidden_size, tensor_parallel_size
        heads = self.num_heads / n
        if self.is_mla:
            head = self.nope_head_dim + self.rope_head_dim
            queries = (
                [(h, self.q_lora_rank), (self.q_lora_rank, int(heads * head))]
                if self.q_lora_rank
                else [(h, int(heads * head))]
            )
            return [
                *queries,
                (h, self.kv_lora_rank + self.rope_head_dim),
                (self.kv_lora_rank, int(heads * (self.nope_head_dim + self.value_head_dim))),
                (int(heads * self.value_head_dim), h),
            ]
        width = int(heads * self.head_dim)
        return [(h, width + 2 * self.kv_heads(n) * self.head_dim), (width, h)]

    def kv_heads(self, tensor_parallel_size: int) -> int:
        """Return the KV heads one GPU holds; fewer heads than GPUs are replicated."""
        return max(self.num_kv_heads // tensor_parallel_size, 1)

    def kv_values(self, tensor_parallel_size: int) -> int:
        """Return the KV elements of one token in one layer that keeps all tokens, on one GPU."""
        if self.is_mla:
            return self.kv_lora_rank + self.rope_head_dim
        return 2 * self.kv_heads(tensor_parallel_size) * self.head_dim

    def num_parameters(self, tensor_parallel_size: int, expert_parallel_size: int = 1) -> tuple[float, float]:
        """Return the parameters on one GPU: those of layers, which are quantised, and embeddings, which are not."""
        n = tensor_parallel_size
        attention = sum(a * b for a, b in self.projections(n)) * self.num_layers
        dense = 3 * self.hidden_size * self.ffn_size / n
        moe_layers = self.num_layers - self.num_dense_layers if self.num_experts else 0
        expert = 3 * self.hidden_size * self.expert_size / n / expert_parallel_size
        shared = 3 * self.hidden_size * self.shared_expert_size / n
        layers = attention + dense * (self.num_layers - moe_layers) + moe_layers * (self.num_experts * expert + shared)
        return layers, self.hidden_size * self.vocab_size / n * (1 if self.is_tied else 2)


def shape_of(config: dict[str, Any]) -> ModelShape:
    """Read a Hugging Face config.json.

    Raises:
        ValueError: a number is missing.
    """
    config = config.get("text_config") or config

    def number(*names: str, default: int | None = None) -> int:
        for name in names:
            if config.get(name) is not None:
                return int(config[name])
        if default is None:
            raise ValueError(f"config.json lacks {names[0]}")
        return default

    layers, hidden = number("num_hidden_layers"), number("hidden_size")
    heads = number("num_attention_heads")
    experts = number("num_experts", "num_local_experts", "n_routed_experts", default=0)
    kinds = config.get("layer_types")
    full = layers
    if isinstance(kinds, dict):
        full = kinds.get("full_attention", layers)
    elif kinds:
        full = list(kinds).count("full_attention")
    expert_size = number("moe_intermediate_size", "intermediate_size", default=0) if experts else 0
    shared = number("shared_expert_intermediate_size", default=number("n_shared_experts", default=0) * expert_size)
    return ModelShape(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=number("num_key_value_heads", default=heads),
        head_dim=number("head_dim", default=hidden // heads),
        ffn_size=number("intermediate_size", default=0 if experts else None),
        vocab_size=number("vocab_size"),
        num_full_attention_layers=full,
        sliding_window=number("sliding_window", default=0) if full < layers else 0,
        num_experts=experts,
        experts_per_token=number("num_experts_per_tok", default=0),
        expert_size=expert_size,
        shared_expert_size=shared,
        num_dense_layers=number("first_k_dense_replace", default=0) if experts else layers,
        kv_lora_rank=number("kv_lora_rank", default=0),
        q_lora_rank=number("q_lora_rank", default=0),
        rope_head_dim=number("qk_rope_head_dim", default=0),
        nope_head_dim=number("qk_nope_head_dim", default=0),
        value_head_dim=number("v_head_dim", default=0),
        is_tied=bool(config.get("tie_word_embeddings")),
        context_length=number("max_position_embeddings", default=0),
        weights=_weights(config),
    )


def _weights(config: dict[str, Any]) -> str:
    if "weights" in config:
        return str(config["weights"])
    method = str(config.get("quantization_config") or "").lower()
    for sign, dtype in (("nvfp4", "fp4"), ("mxfp4", "fp4"), ("fp8", "fp8"), ("float8", "fp8"), ("4", "int4")):
        if sign in method:
            return dtype
    return "bfloat16"
