"""The table of architectures: for each `model_type` of a config.json, what its layers are made of."""

from dataclasses import replace

from mocker.models import attention as attend
from mocker.models import feed_forward as feed
from mocker.models import kinds as by
from mocker.models import latent, states
from mocker.models import other_parameters as others
from mocker.models.architecture import Architecture
from mocker.models.attention import attention
from mocker.models.feed_forward import mixture
from mocker.models.kinds import CONV, FULL, HYBRID, INDEXED, LINEAR, SLIDING, SPARSE_BLOCKS
from mocker.models.latent import indexed_attention, latent_attention

MIXTRAL = {
    "mlp.experts.0.gate_proj": "block_sparse_moe.experts.0.w1",
    "mlp.experts.0.down_proj": "block_sparse_moe.experts.0.w2",
    "mlp.experts.0.up_proj": "block_sparse_moe.experts.0.w3",
    "mlp.experts": "block_sparse_moe.experts",
    "mlp.shared_experts": "block_sparse_moe.shared_experts",
}
BLOCK_SPARSE = (
    "blocksparse_block_size",
    "blocksparse_num_local_blocks",
    "blocksparse_triton_kernel_block_size",
    "blocksparse_vert_stride",
)
SHARED_EXPERT = {"shared_experts": "shared_expert"}
DEEPSEEK = mixture(feed.after_dense)
QWEN = mixture(feed.every_few, has_shared_gate=True)

PLAIN = Architecture()
TIED = replace(PLAIN, is_tied=True)
WITH_PLAIN_NETWORK = replace(PLAIN, feed_forward=feed.plain)
WINDOWED = Architecture(kinds=by.one_window)
QWEN_DENSE = Architecture(kinds=by.late_windows)
QWEN_MOE = Architecture(feed_forward=QWEN, kinds=by.late_windows, names=SHARED_EXPERT)
PLAIN_MIXTURE = Architecture(feed_forward=mixture())
DENSE_THEN_MIXTURE = Architecture(feed_forward=DEEPSEEK)
LATENT = Architecture(attention=latent_attention(), feed_forward=DEEPSEEK)
SPARSE = Architecture(
    attention=indexed_attention(), feed_forward=DEEPSEEK, kinds=by.all_of(INDEXED), ignored=("compress_ratios",)
)
QWEN_HYBRID = Architecture(
    attention=attend.gated_if_said,
    state=states.gated_delta,
    kinds=by.every(4, "full_attention_interval", others=LINEAR),
    names=SHARED_EXPERT,
)
FALCON = Architecture(attention=attend.multi_query, feed_forward=feed.plain, is_tied=True)
GROK = Architecture(feed_forward=feed.grok, names=MIXTRAL, no_ops={"sliding_window_size": -1, "global_attn_every_n": 1})
HUNYUAN = Architecture(attention=attend.shared_across_layers, feed_forward=feed.if_any(DEEPSEEK))
STEP = Architecture(
    attention=attend.step,
    feed_forward=mixture(feed.enumerated),
    kinds=by.listed,
    ignored=("num_local_experts", "moe_every_n_layer", "use_head_wise_attn_gate"),
)
MINIMAX_1 = Architecture(
    state=states.lightning,
    feed_forward=mixture(),
    kinds=by.flags("attn_type_list", {0: LINEAR, 1: FULL}, 1),
    names=MIXTRAL,
)
GEMMA_4 = Architecture(
    names={"mlp.experts": "experts", "mlp.shared_experts": "mlp"},
    attention=attend.gemma_4,
    feed_forward=feed.gemma_4,
    kinds=by.every(6),
    is_tied=True,
    other_parameters=others.per_layer_inputs,
)

ARCHITECTURES: dict[str, Architecture] = {
    # Dense, full attention
    "llama": PLAIN,
    "aquila": PLAIN,
    "apertus": WITH_PLAIN_NETWORK,
    "apertus1p5_text": WITH_PLAIN_NETWORK,
    "arcee": WITH_PLAIN_NETWORK,
    "baichuan": PLAIN,
    "bitnet": TIED,
    "chatglm": Architecture(ignored=("multi_query_attention",)),
    "cohere": TIED,
    "deci": PLAIN,
    "dots_ocr": QWEN_DENSE,
    "emu3_text_model": PLAIN,
    "ernie4_5": TIED,
    "exaone": PLAIN,
    "gemma": TIED,
    "glm": PLAIN,
    "glm4": PLAIN,
    "glm4v": PLAIN,
    "glm4v_text": PLAIN,
    "glm_ocr_text": PLAIN,
    "granite": PLAIN,
    "helium": PLAIN,
    "hunyuan_v1_dense": HUNYUAN,
    "hyperclovax": PLAIN,
    "internlm": PLAIN,
    "internlm2": PLAIN,
    "internlm3": PLAIN,
    "iquestcoder": PLAIN,
    "jais2": WITH_PLAIN_NETWORK,
    "minicpm": Architecture(feed_forward=feed.if_any(mixture()), is_tied=True),
    "minicpmo": QWEN_DENSE,
    "minicpmv": QWEN_DENSE,
    "nanochat": WITH_PLAIN_NETWORK,
    "nemotron": WITH_PLAIN_NETWORK,
    "nemotron-nas": Architecture(attention=attend.in_block, feed_forward=feed.in_block, kinds=by.blocks),
    "olmo": PLAIN,
    "olmo2": PLAIN,
    "orion": PLAIN,
    "persimmon": WITH_PLAIN_NETWORK,
    "phi": WITH_PLAIN_NETWORK,
    "phi-msft": WITH_PLAIN_NETWORK,
    "phi3small": Architecture(
        is_tied=True,
        ignored=("dense_attention_every_n_layers", *BLOCK_SPARSE),
        approximation="its block-sparse attention is counted as full attention",
    ),
    "qwen": Architecture(feed_forward=feed.gated_halves),
    "seed_oss": PLAIN,
    "stablelm": PLAIN,
    "stablelm_epoch": PLAIN,
    "telechat": TIED,
    "telechat2": PLAIN,
    "xverse": PLAIN,
    "yi": PLAIN,
    # Older ones
    "bloom": Architecture(feed_forward=feed.plain, is_tied=True),
    "codegen": WITH_PLAIN_NETWORK,
    "falcon": FALCON,
    "gpt2": Architecture(feed_forward=feed.plain, is_tied=True, other_parameters=others.positions),
    "gpt_bigcode": replace(FALCON, other_parameters=others.positions),
    "gpt_neo": Architecture(feed_forward=feed.plain, kinds=by.gpt_neo, is_tied=True, other_parameters=others.positions),
    "gpt_neox": WITH_PLAIN_NETWORK,
    "gptj": WITH_PLAIN_NETWORK,
    "mpt": Architecture(feed_forward=feed.plain, is_tied=True),
    "opt": Architecture(feed_forward=feed.plain, is_tied=True, other_parameters=others.opt),
    "RefinedWeb": FALCON,
    "RefinedWebModel": FALCON,
    # Dense, with windows
    "cohere2": Architecture(is_tied=True, kinds=by.every(4)),
    "cwm": Architecture(kinds=by.first_of_every(4)),
    "exaone4": Architecture(kinds=by.exaone),
    "exaone4_5": Architecture(kinds=by.exaone),
    "gemma2": Architecture(is_tied=True, kinds=by.every(2)),
    "gemma3": Architecture(is_tied=True, kinds=by.every(6)),
    "gemma3n": Architecture(
        attention=attend.gemma_3n, is_tied=True, kinds=by.every(5), other_parameters=others.gemma_3n
    ),
    "gemma4": GEMMA_4,
    "gemma4_unified": GEMMA_4,
    "granite_swa": Architecture(is_tied=True, kinds=by.first_of_every(4)),
    "mimo": QWEN_DENSE,
    "ministral": Architecture(kinds=by.listed),
    "ministral3": WINDOWED,
    "mistral": WINDOWED,
    "mistral3": WINDOWED,
    "muse_glimmer_text": Architecture(attention=attention(gate="element"), kinds=by.every(4)),
    "olmo3": Architecture(kinds=by.every(4)),
    "phi3": WINDOWED,
    "phi4mm": WINDOWED,
    "phi4_multimodal": WINDOWED,
    "qwen2": QWEN_DENSE,
    "qwen2_vl": QWEN_DENSE,
    "qwen2_5_omni": QWEN_DENSE,
    "qwen2_5_vl": QWEN_DENSE,
    "qwen3": QWEN_DENSE,
    "qwen3_asr": QWEN_DENSE,
    "qwen3_vl": QWEN_DENSE,
    "smollm3": Architecture(is_tied=True, kinds=by.late_windows),
    "starcoder2": Architecture(feed_forward=feed.plain, kinds=by.one_window, is_tied=True),
    "vaultgemma": Architecture(is_tied=True, kinds=by.every(2)),
    # Mixtures of experts
    "afmoe": Architecture(
        attention=attention(gate="element"), feed_forward=DEEPSEEK, kinds=by.every(4, "global_attn_every_n_layers")
    ),
    "arctic": Architecture(feed_forward=feed.arctic, kinds=by.one_window),
    "aria_text": PLAIN_MIXTURE,
    "bailing_moe": DENSE_THEN_MIXTURE,
    "bailing_moe_v2": DENSE_THEN_MIXTURE,
    "cohere2_moe": Architecture(feed_forward=DEEPSEEK, is_tied=True, kinds=by.cohere_moe),
    "dbrx": Architecture(feed_forward=feed.dbrx, names={"mlp": "ffn"}),
    "deepseek": DENSE_THEN_MIXTURE,
    "dots1": Architecture(feed_forward=DEEPSEEK, kinds=by.late_windows),
    "ernie4_5_moe": Architecture(feed_forward=mixture(feed.from_to), is_tied=True),
    "exaone_moe": Architecture(feed_forward=DEEPSEEK, kinds=by.exaone),
    "beam": Architecture(attention=attention(gate="element"), feed_forward=mixture(feed.after(3)), kinds=by.listed),
    "flint": Architecture(feed_forward=QWEN, kinds=by.listed),
    "flex_olmo": PLAIN_MIXTURE,
    "glm4_moe": replace(DENSE_THEN_MIXTURE, attention=attend.rounded_down),
    "glm4v_moe": DENSE_THEN_MIXTURE,
    "glm4v_moe_text": DENSE_THEN_MIXTURE,
    "gpt_oss": Architecture(feed_forward=mixture(), kinds=by.every(2)),
    "granitemoe": Architecture(feed_forward=mixture(), names=MIXTRAL),
    "granitemoe_swa": Architecture(feed_forward=mixture(), kinds=by.first_of_every(4), names=MIXTRAL),
    "granitemoeshared": Architecture(feed_forward=mixture(), names=MIXTRAL),
    "grok": GROK,
    "grok-1": GROK,
    "grok1": GROK,
    "hunyuan": HUNYUAN,
    "hunyuan_v1_moe": HUNYUAN,
    "hy_v3": Architecture(feed_forward=mixture(feed.after(1))),
    "kolibri1": Architecture(feed_forward=mixture(), kinds=by.listed),
    "laguna": Architecture(
        attention=attention(gate="head"), feed_forward=mixture(feed.after(1)), kinds=by.listed, ignored=("gating",)
    ),
    "llama4": Architecture(
        feed_forward=feed.llama_4,
        kinds=by.llama_4,
        defaults={"attention_chunk_size": 8192},
        names={"mlp": "feed_forward", **SHARED_EXPERT},
    ),
    "mellum": Architecture(feed_forward=DEEPSEEK, kinds=by.listed),
    "mimo_v2_flash": Architecture(
        attention=attend.window_of_its_own,
        feed_forward=mixture(feed.after_dense),
        kinds=by.flags("hybrid_layer_pattern", {0: FULL, 1: SLIDING}, 0),
        ignored=("attention_chunk_size",),
    ),
    "minimax_m2": Architecture(
        attention=attend.normed_across, feed_forward=mixture(), names=MIXTRAL, ignored=("attn_type_list",)
    ),
    "minimax_m3": Architecture(
        attention=attend.picks_blocks,
        defaults={"index_n_heads": 4, "index_head_dim": 128, "index_topk_blocks": 16, "index_block_size": 128},
        feed_forward=DEEPSEEK,
        kinds=by.flags("sparse_attention_config.sparse_attention_freq", {0: FULL, 1: SPARSE_BLOCKS}, 0),
        names=MIXTRAL,
    ),
    "mixtral": Architecture(feed_forward=mixture(), kinds=by.one_window, names=MIXTRAL),
    "olmoe": PLAIN_MIXTURE,
    "phimoe": Architecture(feed_forward=mixture(), kinds=by.one_window, names=MIXTRAL),
    "qwen2_moe": QWEN_MOE,
    "qwen3_moe": QWEN_MOE,
    "qwen3_omni_moe": replace(QWEN_MOE, attention=attend.rounded_down),
    "qwen3_vl_moe": QWEN_MOE,
    "sarvam_moe": DENSE_THEN_MIXTURE,
    "solar_open": DENSE_THEN_MIXTURE,
    "step3_text": Architecture(attention=attend.step_3, feed_forward=mixture(feed.enumerated)),
    "step3p5": STEP,
    "step3p7": STEP,
    # Latent attention
    "axk1": Architecture(attention=latent_attention(), feed_forward=mixture(feed.after(1))),
    "deepseek_v2": replace(LATENT, attention=latent.latent_if_used),
    "deepseek_v3": LATENT,
    "glm4_moe_lite": Architecture(attention=latent_attention(), feed_forward=mixture(feed.after(1))),
    "kimi_k2": LATENT,
    "kimi_k25": LATENT,
    "longcat_flash": Architecture(attention=latent_attention(), feed_forward=feed.longcat, num_attentions=2),
    "minicpm3": Architecture(attention=latent_attention(), is_tied=True),
    "mistral4": LATENT,
    "sarvam_mla": LATENT,
    "youtu": Architecture(attention=latent_attention(), is_tied=True),
    "deepseek_v32": SPARSE,
    "glm_moe_dsa": SPARSE,
    "deepseek_v4": Architecture(
        attention=latent.compressed_attention,
        feed_forward=mixture(),
        kinds=by.deepseek_v4,
        other_parameters=others.hyper_connections,
        ignored=("mlp_layer_types",),
        names={"mlp": "ffn"},
    ),
    "hy_v4": Architecture(
        attention=indexed_attention(gate="element"),
        feed_forward=mixture(feed.after(1)),
        kinds=by.all_of(INDEXED),
        other_parameters=others.light_connections,
    ),
    "dots3_note": Architecture(
        attention=indexed_attention(gate="head"), feed_forward=mixture(feed.after(1)), kinds=by.listed
    ),
    # States
    "bailing_hybrid": Architecture(
        attention=latent.bailing,
        state=states.bailing,
        feed_forward=DEEPSEEK,
        kinds=by.every(6, "layer_group_size", others=LINEAR),
    ),
    "bamba": Architecture(state=states.mamba_2, kinds=by.places("attn_layer_indices", FULL, LINEAR)),
    "falcon_h1": Architecture(state=states.mamba_2, kinds=by.all_of(HYBRID)),
    "falcon_mamba": Architecture(
        state=states.mamba_alone, feed_forward=feed.none, kinds=by.all_of(LINEAR), is_tied=True
    ),
    "glm5_next": Architecture(
        attention=indexed_attention(),
        state=states.kimi_delta,
        feed_forward=mixture(feed.after(3)),
        kinds=by.renamed({FULL: INDEXED}, by.places("linear_attn_config.kda_layers", LINEAR, INDEXED)),
        other_parameters=others.hyper_connections,
        ignored=("mhc",),
    ),
    "granitemoehybrid": Architecture(state=states.mamba_2, feed_forward=feed.granite_hybrid, kinds=by.listed),
    "jamba": Architecture(
        state=states.mamba_1,
        feed_forward=feed.if_any(mixture(feed.with_period)),
        kinds=by.jamba,
        names={"mlp": "feed_forward"},
    ),
    "kimi_linear": Architecture(
        attention=latent_attention(),
        state=states.kimi_delta,
        feed_forward=mixture(feed.after(1)),
        kinds=by.places("linear_attn_config.kda_layers", LINEAR, FULL, first=1),
        names=MIXTRAL,
        ignored=("attn_res_block_size",),
    ),
    "lara_mini": Architecture(
        state=states.gated_delta, feed_forward=QWEN, kinds=by.listed, is_tied=True, names=SHARED_EXPERT
    ),
    "lfm2": Architecture(
        state=states.short_convolution,
        feed_forward=feed.lfm2,
        kinds=by.places("full_attn_idxs", FULL, CONV),
        is_tied=True,
        names={"mlp": "feed_forward"},
    ),
    "lfm2_moe": Architecture(
        state=states.short_convolution,
        feed_forward=DEEPSEEK,
        kinds=by.places("full_attn_idxs", FULL, CONV),
        is_tied=True,
        names={"mlp": "feed_forward"},
    ),
    "lfm3": Architecture(
        attention=attention(gate="head"),
        state=states.short_convolution,
        kinds=by.listed,
        is_tied=True,
        ignored=("use_attention_gate",),
    ),
    "mamba": Architecture(state=states.mamba_alone, feed_forward=feed.none, kinds=by.all_of(LINEAR), is_tied=True),
    "mamba2": Architecture(state=states.mamba_2, feed_forward=feed.none, kinds=by.all_of(LINEAR)),
    "minimax": Architecture(
        state=states.lightning,
        feed_forward=mixture(),
        kinds=by.every(2, None, others=FULL, last=LINEAR),
        names=MIXTRAL,
    ),
    "minimax_text_01": MINIMAX_1,
    "minimax_m1": MINIMAX_1,
    "nemotron_h": Architecture(
        state=states.mamba_2,
        feed_forward=feed.nemotron_h,
        kinds=by.nemotron_h,
        names={"mlp": "mixer", "self_attn": "mixer"},
        ignored=("expand", "mamba_expand", "num_hidden_layers"),
    ),
    "olmo_hybrid": Architecture(state=states.gated_delta, kinds=by.every(4, "full_attention_interval", others=LINEAR)),
    "qwen3_next": replace(QWEN_HYBRID, feed_forward=QWEN),
    "qwen3_5": QWEN_HYBRID,
    "qwen3_5_moe": replace(QWEN_HYBRID, feed_forward=QWEN),
    "recurrent_gemma": Architecture(
        state=states.gated_recurrence, feed_forward=feed.gated_halves, kinds=by.recurrent_gemma, is_tied=True
    ),
    "zamba": Architecture(
        attention=attention(wide=2),
        state=states.mamba_1,
        feed_forward=feed.only_hybrid,
        kinds=by.zamba,
        is_tied=True,
        other_parameters=others.shared_blocks,
    ),
    "zamba2": Architecture(
        attention=attention(wide=2),
        state=states.mamba_2,
        feed_forward=feed.only_hybrid,
        kinds=by.zamba,
        ignored=("kv_channels",),
        is_tied=True,
        other_parameters=others.shared_blocks,
    ),
}
OTHER_NAMES = {
    "deepseek_ref": "deepseek_v4",
    "git": "grok",  # what Grok 2's file says
    "mimo_v2": "mimo_v2_flash",
    "minimax_m3_vl": "minimax_m3",
    "minimax_m3_vl_text": "minimax_m3",
    "phi3_v": "phi3",
    "llava": "llama",
    "llava_llama": "llama",
}
"""Architectures by other names of theirs."""
