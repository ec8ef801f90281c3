"""The names of keys in config.json: several for one size, and those that change no size."""

from typing import Any

from mocker.models import harmless

SPELLINGS: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "vocab_size": ("padded_vocab_size", "vocab_size"),
    "max_position_embeddings": (
        "max_position_embeddings",
        "n_positions",
        "n_ctx",
        "max_sequence_length",
        "max_seq_length",
        "max_seq_len",
        "seq_length",
        "seq_len",
        "seqlen",
        "model_max_length",
    ),
    "num_attention_heads": ("num_attention_heads_per_layer", "num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_key_value_heads": (
        "num_key_value_heads_per_layer",
        "num_key_value_heads",
        "num_kv_heads",
        "n_head_kv",
        "multi_query_group_num",
        "num_attention_groups",
        "num_query_groups",
        "attn_config.kv_n_heads",
    ),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels"),
    "sliding_window": ("sliding_window", "sliding_window_size", "attention_window_size", "window_size"),
    "sliding_window_pattern": ("sliding_window_pattern", "_sliding_window_pattern"),
    "layer_types": ("layer_types", "layers_block_type"),
    "intermediate_size": (
        "block_ff_dim",
        "intermediate_size",
        "ffn_dim",
        "n_inner",
        "ffn_hidden_size",
        "ff_intermediate_size",
        "ffn_config.ffn_hidden_size",
    ),
    "num_experts": (
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "num_routed_experts",
        "moe_num_experts",
        "ffn_config.moe_num_experts",
    ),
    "num_experts_per_tok": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "experts_per_token",
        "top_k_experts",
        "moe_topk",
        "moe_k",
        "moe_top_k",
        "ffn_config.moe_top_k",
    ),
    "moe_intermediate_size": ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size"),
    "num_shared_experts": ("num_shared_experts", "n_shared_experts", "moe_num_shared_experts", "num_shared_expert"),
    "shared_expert_intermediate_size": (
        "shared_expert_intermediate_size",
        "shared_experts_intermediate_size",
        "shared_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "share_expert_dim",
        "intermediate_size_shared",
    ),
    "first_k_dense_replace": ("first_k_dense_replace", "num_dense_layers", "moe_layer_num_skipped"),
    "moe_latent_size": ("moe_latent_size", "routed_expert_hidden_size"),
    "num_nextn_predict_layers": ("num_nextn_predict_layers", "num_mtp_modules"),
    "conv_kernel": ("conv_kernel", "mamba_d_conv", "conv_kernel_size"),
    "ssm_state_size": ("ssm_state_size", "mamba_d_state", "state_size"),
    "mamba_num_heads": ("mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads"),
    "mamba_head_dim": ("mamba_head_dim", "mamba_d_head", "mamba_headdim", "head_dim"),
    "mamba_n_groups": ("n_groups", "mamba_n_groups", "mamba_ngroups"),
    "mamba_expand": ("expand", "mamba_expand"),
    "mamba_dt_rank": ("mamba_dt_rank", "time_step_rank"),
    "linear_num_heads": ("linear_attn_config.num_heads", "linear_num_heads"),
    "linear_head_dim": ("linear_attn_config.head_dim", "linear_head_dim"),
    "linear_conv_kernel_dim": (
        "linear_attn_config.short_conv_kernel_size",
        "linear_conv_kernel_dim",
        "short_conv_kernel_size",
    ),
    "index_n_heads": ("index_n_heads", "sparse_attention_config.sparse_num_index_heads"),
    "index_head_dim": ("index_head_dim", "sparse_attention_config.sparse_index_dim"),
    "index_topk_blocks": ("index_topk_blocks", "sparse_attention_config.sparse_topk_blocks"),
    "index_block_size": ("index_block_size", "sparse_attention_config.sparse_block_size"),
}
"""What readers ask for, and the keys that say it."""
FIRST_COUNTS = frozenset(["mamba_head_dim", "max_position_embeddings", "num_nextn_predict_layers"])
"""Sizes of which files have several, where the first of the keys above counts; elsewhere they must be alike."""
NESTED = frozenset(
    ["attn_config", "ffn_config", "linear_attn_config", "sparse_attention_config", "attention_other_setting", "ssm_cfg"]
)
"""Parts of a file that belong to the same model."""
SIZES = frozenset([spelling for spellings in SPELLINGS.values() for spelling in spellings]) | {
    "attn_type_list",
    "block_ffn_dim_multiplier",
    "conv_L_cache",
    "decoder_sparse_step",
    "qk_rope_head_dim",
    "total_ut_steps",
}
"""Sizes, by all their names, and others whose words do not show it."""
OF_SIZES = """
num n d size sizes dim dims rank head heads layer layers layernum block blocks expert experts moe hybrid mamba
ssm state linear interleave interval period offset freq step stride every pattern window sliding chunk swa
global local full compress compression ratio ratios index indexer topk latent lora lru conv kernel expand
width wide group groups shared share cla kv altup laurel mult multi multiple mlp ffn hc zero config configs
cfg enum idxs ids indices types
"""
WORDS = frozenset(OF_SIZES.split())
"""A key with one of these words may ask for sizes."""
TEXTS = frozenset(["pattern", "enum"])
"""The words of keys whose text may ask for sizes."""
FLAGS = frozenset(
    [
        "attention_k_eq_v",
        "attn_output_gate",
        "enable_moe_block",
        "gating",
        "is_encoder_decoder",
        "mhc",
        "mla_use_output_gate",
        "multi_query",
        "new_decoder_architecture",
        "share_layers",
        "use_cla",
        "use_double_wide_mlp",
        "use_mla",
        "use_full_rank_gate",
        "residual_moe",
        "use_attention_gate",
        "head_wise_attn_gate",
        "use_head_wise_attn_gate",
        "use_residual",
        "parallel_attn_mlp_res",
        "linear_attn_config.use_full_rank_gate",
    ]
)
"""The keys of which `true` changes sizes."""


def may_change_sizes(name: str, value: Any) -> bool:
    """Return whether a key that is not read may ask for other sizes: by what it is, and by the words of its name."""
    own = name.rpartition(".")[2]
    if not value or own in harmless.KEYS:
        return False
    if name in SIZES | FLAGS:
        return True
    words = own.lower().split("_")
    if isinstance(value, bool) or words[0] in harmless.OTHER_PARTS or words[-1] in harmless.NO_SIZES:
        return False
    return not (TEXTS if isinstance(value, str) else WORDS).isdisjoint(words)
