"""A config.json, and which of its keys were read."""

import re
from collections.abc import Mapping
from typing import Any

# Keys by which the size of a model, of its KV or of its state can depend.
SIZE = re.compile(
    r"^(n|num|hybrid|mamba|linear|interleave|compress|index|indexer|ssm|swa|global|lru|conv|block|kv|q)_"
    r"|_(size|sizes|dim|dims|rank|layer|layers|layernum|heads|freq|step|interval|period|offset|pattern|window|types?)$"
    r"|expert|moe|pattern|latent|_configs?$|expand"
)
# Of these, the ones that change nothing that is timed or counted.
HARMLESS = re.compile(
    r"^(rotary_dim|num_(return_sequences|beams|beam_groups|labels|logits_to_keep|nextn_predict_layers|mtp_modules|hash_layers|"
    r"assistant_tokens|assistant_tokens_schedule)|n_group|n_groups|n_positions|n_ctx|num_expert_groups?|"
    r"num_experts_per_group|num_expert_per_group|max_window_layers|"
    r"(mtp|vision|audio|image|video|boa|boi|mm|ngram|tie|rope|eagle|spec)_.*|"
    r".*_(token_id|norm|norm_type|bias|act|activation|loss_coef|dtype|init|implementation|theta|scale|scaling|scaling_factor)|"
    r"(encoder_)?no_repeat_ngram_size|chunk_size_feed_forward|cross_attention_hidden_size|moe_router_.*|router_.*|"
    r"norm_topk_prob|moe_layer_activation|attention_bias|qkv_bias|initializer_.*|index_(topk_freq|topk_pattern|"
    r"skip_topk_offset|share_for_mtp_iteration)|indexer_rope_interleave|rope_interleave|conv_bias|use_.*|kv_cache_.*|"
    r"model_type|ep_size|tokenizer_.*|position_embedding_type|.*_max_position_embeddings|expert_capacity.*|"
    r"moe_capacity.*|moe_(min|eval|train|token|aux|z|loss|use|norm|gate|drop|group|topk_method|routed_scaling).*|"
    r"pad_token|vocab_size_per_layer_input|type_vocab_size|problem_type|moe_shared_expert_overlap|quantization_config|"
    r"text_config|time_step_.*|mamba_(hidden_act|proj_bias|conv_bias|chunk_size|dt_.*|rms_norm|norm_before_gate)|"
    r"generation_config|torch_dtype|mlp_(bias|hidden_act)|compress_rope_theta|q_scale|kv_scale|linear_bias|"
    r"use_moe|moe_bias|num_code_.*|global_rope.*|swa_rope.*|n_shared_head|hybrid_attention_rope|block_auto_adjust.*)$"
)


class Keys:
    """The values of a config.json, with an architecture's defaults for those that it leaves out."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._values = {**defaults, **{name: value for name, value in values.items() if value is not None}}
        self._given = values
        self._read: set[str] = set()

    def number(self, *names: str, default: int | None = None) -> int:
        """Return the first of these that is given, as a whole number.

        Raises:
            ValueError: none is given and there is no default, or it is no number.
        """
        for name, value in [(name, self.get(name)) for name in names]:
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
                    raise ValueError(f"{name} is {value!r}; expected a whole number")
                return int(value)
        if default is None:
            raise ValueError(f"it lacks {names[0]}")
        return default

    def sequence(self, name: str) -> list[Any] | None:
        """Return a list, or None.

        Raises:
            ValueError: it is something else.
        """
        value = self.get(name)
        if value is not None and not isinstance(value, list):
            raise ValueError(f"{name} is {value!r}; expected a list")
        return value

    def get(self, name: str) -> Any:
        """Return a value, or None if it is absent or null."""
        self._read.add(name)
        return self._values.get(name)

    def unread_sizes(self) -> list[str]:
        """Return the keys that may change sizes, ask for something, and were not read."""
        return sorted(
            name
            for name, value in self._given.items()
            if name not in self._read and value and SIZE.search(name) and not HARMLESS.match(name)
        )
