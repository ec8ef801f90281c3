"""A model that is cut into stages, each on GPUs of its own.

    layers 0 ............ 19 | 20 .......... 39 | 40 .......... 59 | 60 .......... 79, and the head
          stage 0                 stage 1            stage 2            stage 3

Layers of different kinds are counted as if each stage had the same share of every kind. The time in which hidden states
are sent from stage to stage is not counted.
"""

from mocker.models.shape import ModelShape
from mocker.timing.config import TimingConfig
from mocker.timing.engine_times import roofline_of
from mocker.timing.groups import layout_of
from mocker.vllm.config import EngineConfig

USUAL_STEP = 64
"""Tokens of the step from whose times the stages' shares are taken."""


def layers_of_stages(num_layers: int, num_stages: int) -> list[int]:
    """Return the layers of each stage as vLLM divides them: evenly, and the rest to the last stages but one, one each.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    if num_layers < num_stages:
        raise ValueError(f"pipeline_parallel_size is {num_stages}; expected at most the model's {num_layers} layers")
    each, rest = divmod(num_layers, num_stages)
    return [each + (num_stages - 1 - rest <= stage < num_stages - 1) for stage in range(num_stages)]


def shares_of_stages(layers: list[int], layers_s: float, head_s: float) -> tuple[float, ...]:
    """Return the share of a step's time that each stage takes; the last has the head."""
    times = [layers_s * count / sum(layers) for count in layers]
    times[-1] += head_s
    total = sum(times)
    return tuple([seconds / total for seconds in times[:-1]] + [1 - sum(times[:-1]) / total])


def saved_by_stages(shape: ModelShape, layers: list[int], weights: float, num_gpus: int) -> float:
    """Return the bytes of a model's weights on one GPU that the fullest stage does not have: other layers, and a head."""
    share, embeddings = max(layers) / sum(layers), 2.0 * shape.embedding_parameters / num_gpus
    elsewhere = 0.0 if shape.is_tied else embeddings / 2
    return (1 - share) * (weights - embeddings) + elsewhere


def stages_of(engine: EngineConfig, timing: TimingConfig) -> tuple[float, ...]:
    """Return the share of a step's time that each stage of the model takes; nothing if it is not cut into stages.

    Raises:
        ValueError: that cannot be, or not with these settings.
    """
    num_stages = timing.pipeline_parallel_size
    if num_stages == 1:
        return ()
    for is_so, what in (
        (engine.kv_role is not None, "prefill and decode apart"),
        (engine.has_host_memory, "host memory for KV"),
        (engine.dp_size > 1, "data-parallel ranks"),
        (engine.enable_lora, "LoRA adapters"),
        (engine.num_speculative_tokens > 0, "speculative decoding"),
        (engine.has_encoder, "an encoder of images (max_tokens_per_mm_item)"),
        (not layout_of(engine, timing).is_plain, f"{timing.model}, whose layers do not all keep all tokens"),
    ):
        if is_so:
            raise ValueError(
                f"pipeline_parallel_size is {num_stages}; expected 1 with {what}: it is not simulated with stages"
            )
    layers = layers_of_stages(timing.shape.num_layers, num_stages)
    return shares_of_stages(layers, *roofline_of(engine, timing, 1).parts_of_a_step(USUAL_STEP))
