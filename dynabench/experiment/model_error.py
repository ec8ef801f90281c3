"""The known error of simulated times, by engine, model and GPU: the figures of docs/fidelity.md."""

from typing import NamedTuple

from mocker.models.catalog import find_model
from mocker.models.shape import ModelShape
from mocker.timing.catalog import find_gpu
from mocker.timing.config import TimingConfig


class ModelError(NamedTuple):
    """Mean absolute error of mean TTFT and TPOT against published points, as shares."""

    engine: str
    model: str
    gpu: str
    weights: str
    tpot: float
    ttft: float
    points: int

    def __str__(self) -> str:
        return " ".join(filter(None, (self.model, self.weights, "on", self.engine, "and", self.gpu)))


def model_error(timing: TimingConfig) -> ModelError | None:
    """Return the known error of a model on a GPU, or of the most similar model there.

    Return None if step times have another source, or if no such model on that GPU was compared.
    """
    if timing.timing_name != "roofline" or timing.gpu is None or timing.model is None:
        return None
    shape, gpu = timing.shape, find_gpu(timing.gpu).name
    alike = [
        known
        for known in KNOWN
        if known.engine == timing.timed_as
        and known.gpu == gpu
        and bool(find_model(known.model).num_experts) == bool(shape.num_experts)
    ]
    weights = shape.weights
    return max(
        alike,
        key=lambda known: (_is_same(find_model(known.model), shape), known.weights == weights, known.points),
        default=None,
    )


def _is_same(one: ModelShape, other: ModelShape) -> bool:
    """Return whether two models differ in their weights' types at most."""
    return one.quantised("bfloat16").layers == other.quantised("bfloat16").layers


KNOWN = (
    ModelError("vllm", "meta-llama/Llama-3.1-70B", "h100", "fp8", 0.026, 0.057, 45),
    ModelError("vllm", "meta-llama/Llama-3.1-70B", "b200", "fp8", 0.031, 0.086, 60),
    ModelError("vllm", "meta-llama/Llama-3.1-70B", "b200", "fp4", 0.045, 0.171, 60),
    ModelError("sglang", "Qwen/Qwen3.5-397B-A17B", "b200", "bfloat16", 0.037, 0.721, 60),
    ModelError("sglang", "Qwen/Qwen3.5-397B-A17B", "b200", "fp4", 0.215, 0.646, 12),
    ModelError("sglang", "Qwen/Qwen3.5-397B-A17B", "b200", "fp8", 0.206, 0.713, 124),
    ModelError("sglang", "Qwen/Qwen3.5-397B-A17B", "h200", "fp8", 0.264, 0.715, 30),
    ModelError("sglang", "deepseek-ai/DeepSeek-R1", "b200", "fp4", 0.152, 0.764, 54),
    ModelError("sglang", "deepseek-ai/DeepSeek-R1", "b200", "fp8", 0.296, 4.853, 67),
    ModelError("sglang", "deepseek-ai/DeepSeek-R1", "h200", "fp8", 0.041, 0.422, 30),
    ModelError("sglang", "deepseek-ai/DeepSeek-V3", "b200", "fp4", 0.100, 0.881, 36),
    ModelError("sglang", "deepseek-ai/DeepSeek-V3", "b200", "fp8", 0.189, 2.442, 13),
    ModelError("sglang", "deepseek-ai/DeepSeek-V3", "h200", "fp8", 0.041, 0.422, 15),
    ModelError("sglang", "zhipuai/GLM-5", "b200", "fp4", 0.134, 0.567, 10),
    ModelError("sglang", "zhipuai/GLM-5", "b200", "fp8", 0.094, 0.249, 36),
    ModelError("sglang", "zhipuai/GLM-5", "h200", "fp8", 0.232, 0.618, 30),
    ModelError("trtllm", "deepseek-ai/DeepSeek-R1", "b200", "fp4", 0.349, 0.598, 96),
    ModelError("trtllm", "deepseek-ai/DeepSeek-R1", "b200", "fp8", 0.309, 2.301, 69),
    ModelError("trtllm", "deepseek-ai/DeepSeek-R1", "h200", "fp8", 0.374, 0.671, 43),
    ModelError("trtllm", "deepseek-ai/DeepSeek-V3", "h200", "fp8", 0.176, 0.548, 16),
    ModelError("trtllm", "meta-llama/Llama-3.1-70B", "b200", "fp4", 0.060, 0.261, 72),
    ModelError("trtllm", "meta-llama/Llama-3.1-70B", "b200", "fp8", 0.053, 0.227, 72),
    ModelError("trtllm", "meta-llama/Llama-3.1-70B", "h200", "fp8", 0.196, 0.219, 72),
    ModelError("trtllm", "meta-llama/Llama-3.1-8B-Instruct", "h100", "", 0.091, 0.525, 177),
    ModelError("trtllm", "openai/gpt-oss-120b", "b200", "fp4", 0.138, 0.379, 105),
    ModelError("trtllm", "openai/gpt-oss-120b", "h200", "fp4", 0.138, 0.449, 77),
    ModelError("vllm", "MiniMaxAI/MiniMax-M2.5", "b200", "fp4", 0.127, 0.391, 104),
    ModelError("vllm", "MiniMaxAI/MiniMax-M2.5", "b200", "fp8", 0.159, 0.221, 195),
    ModelError("vllm", "Qwen/Qwen3-235B-A22B-FP8", "h200", "fp8", 0.383, 0.341, 38),
    ModelError("vllm", "moonshotai/Kimi-K2.5", "b200", "fp4", 0.157, 0.794, 75),
    ModelError("vllm", "moonshotai/Kimi-K2.5", "b200", "int4", 0.051, 0.081, 45),
    ModelError("vllm", "moonshotai/Kimi-K2.5", "h200", "int4", 0.103, 0.144, 45),
    ModelError("vllm", "openai/gpt-oss-120b", "h100", "fp4", 0.656, 0.331, 69),
    ModelError("vllm", "openai/gpt-oss-120b", "h200", "fp4", 0.127, 0.306, 75),
)
