"""What drafts in an engine that speculates: how large it is, and how long it takes."""

from dataclasses import replace

from mocker.models.catalog import find_model
from mocker.models.shape import ModelShape
from mocker.timing.catalog import find_engine, find_gpu
from mocker.timing.config import TimingConfig
from mocker.timing.drafting import Drafting, FixedDrafting, ModelDrafting
from mocker.timing.engine_times import expert_parallel_size
from mocker.timing.model import Faster, TimingModel
from mocker.timing.parts import drafter_coefficients, layer_with_head
from mocker.timing.roofline import Coefficients, Roofline
from mocker.vllm.config import EngineConfig

WITH_MTP = frozenset(
    [
        *("deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_ref", "glm_moe_dsa", "kimi_k3", "pangu_ultra_moe"),
        *("mimo", "mimo_v2", "mimo_v2_flash", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_ocr_text", "glm5_next"),
        *("ernie4_5_moe", "nemotron_h", "qwen3_next", "qwen3_5", "qwen3_5_moe", "longcat_flash", "dots3_note"),
        *("bailing_hybrid", "exaone_moe", "exaone4_5", "step3p5", "minimax_m3", "hy_v3", "hy_v4", "gemma4"),
    ]
)
"""Architectures whose models have layers that predict further tokens, as vLLM 0.32 drafts with them (`config/speculative.py`)."""
ONLY_WITH_COUNT = frozenset(["nemotron_h"])
"""Those of which vLLM takes only models whose config.json has a num_nextn_predict_layers above 0."""


def drafting_of(engine: EngineConfig, timing: TimingConfig) -> Drafting:
    """Return how long drafting takes.

    Raises:
        ValueError: the model or the GPU on which that depends is unknown, or the method needs another model.
    """
    method = engine.speculative_method
    if (method == "draft_model") != (engine.draft_model is not None):
        raise ValueError(
            f"speculative_method is {method}, and draft_model is {engine.draft_model}; expected both to be of a draft model"
        )
    if method == "mtp" and timing.timing_name == "roofline":
        _check_mtp(timing)
    speedup = timing.decode_speedup
    if engine.drafting_ms is not None:
        return FixedDrafting(engine.drafting_ms / 1000 / speedup)
    if not engine.has_drafter:
        return FixedDrafting(0.0)
    if timing.timing_name != "roofline":
        raise ValueError(
            f"num_speculative_tokens is {engine.num_speculative_tokens}, and timing {timing.timing_name} does not say how long "
            f"{method} drafts; expected drafting_ms with it, or a gpu and a model"
        )
    model: TimingModel = Roofline(_drafter(engine, timing))
    if speedup != 1:
        model = Faster(model, timing.speedup, speedup)
    return ModelDrafting(model, engine.num_speculative_tokens)


def _check_mtp(timing: TimingConfig) -> None:
    """Refuse a model without layers that predict further tokens."""
    shape = timing.shape
    if shape.architecture not in WITH_MTP:
        lacking = f"models of the architecture {shape.architecture}, as {timing.model}, have"
    elif shape.architecture in ONLY_WITH_COUNT and not shape.num_nextn_layers:
        lacking = f"{timing.model}, whose config.json has no num_nextn_predict_layers above 0, has"
    else:
        return
    raise ValueError(
        f"speculative_method is mtp, and {lacking} no layers that predict further tokens (MTP); expected another method, "
        "such as eagle3"
    )


def drafter_shape(engine: EngineConfig, timing: TimingConfig) -> ModelShape | None:
    """Return what drafts: a model of its own, or a layer that shares the model's embeddings and head; None: neither."""
    if not engine.has_drafter:
        return None
    return (
        find_model(engine.draft_model) if engine.draft_model else replace(layer_with_head(timing.shape), vocab_size=0)
    )


def _drafter(engine: EngineConfig, timing: TimingConfig) -> Coefficients:
    assert timing.gpu is not None
    gpu = find_gpu(timing.gpu, timing.host_times)
    return drafter_coefficients(
        find_model(engine.draft_model) if engine.draft_model else layer_with_head(timing.shape),
        gpu,
        find_engine(timing.host_times, gpu.architecture),
        tensor_parallel_size=timing.tensor_parallel_size,
        expert_parallel_size=expert_parallel_size(engine, timing),
        kv_dtype=timing.kv_dtype,
        link_gbps=timing.link_gbps,
        moe_backend="auto" if engine.draft_model else timing.moe_backend,
    )
