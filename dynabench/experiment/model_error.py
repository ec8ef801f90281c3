"""The error of simulated times: of the nearest case that was measured, or the average; the figures of docs/fidelity.md."""

from typing import NamedTuple

from mocker.models.catalog import find_model
from mocker.models.shape import ModelShape
from mocker.timing.catalog import find_gpu
from mocker.timing.config import TimingConfig
from reports.figures.outcomes import percent

WITHIN = 2.0
"""Times as many parameters, or as few, all or active ones, as a case may have to be quoted for a model."""


class Case(NamedTuple):
    """A model whose simulated times were compared with published ones: the mean absolute errors, as shares."""

    engine: str
    model: str
    gpu: str
    weights: str
    tpot: float
    ttft: float
    points: int

    def __str__(self) -> str:
        return " ".join(filter(None, (self.model, self.weights, "on", self.engine, "and", self.gpu)))


class MeasuredError(NamedTuple):
    """How far mean TPOT and TTFT are known to be off, as shares, and which published points say so."""

    tpot: float
    ttft: float
    points: int
    of: str
    average_name: str = ""
    """Which average it is, if no case is near enough."""
    differs: str = ""
    """In what the model differs from the nearest case."""

    def __str__(self) -> str:
        if self.average_name:
            return f"{self._points} (only a hint: this model was not measured)"
        return f"the nearest measured case, {self.of} ({self.differs})" if self.differs else self.of

    @property
    def text(self) -> str:
        """How far off the means are, and for what that was measured."""
        off = f"mean TPOT off by {percent(self.tpot)}, mean TTFT by {percent(self.ttft)}"
        if self.average_name:
            return f"not measured for this model; {self.average_name}, only a hint here: {off} ({self._points})"
        return f"{off} on average over {self.points} published points of {self}"

    @property
    def _points(self) -> str:
        return f"{self.points:,} published points of {self.of}"


HELD_OUT = {
    "vllm": MeasuredError(0.038, 0.126, 82, "Llama 3.1 70B on vllm, h100 and b200", average_name="held-out average"),
    "trtllm": MeasuredError(0.068, 0.187, 313, "dense models on trtllm", average_name="held-out average"),
}
"""The points of dense models that chose no constants, by engine."""
OVERALL = MeasuredError(0.123, 0.263, 1663, "all models and engines", average_name="overall average")


def model_error(timing: TimingConfig) -> MeasuredError | None:
    """Return the error of the nearest case of the same kind on the same engine and GPU, or else an average.

    Return None if step times have another source, or are divided.
    """
    if timing.timing_name != "roofline" or timing.gpu is None or timing.model is None:
        return None
    if timing.speedup_ratio != 1 or timing.decode_speedup_ratio != 1:
        return None
    shape, gpu = timing.shape, find_gpu(timing.gpu).name
    near = [
        case
        for case in KNOWN
        if (case.engine, case.gpu) == (timing.host_times, gpu) and _distance(case, shape) <= WITHIN
    ]
    if not near:
        return HELD_OUT.get(timing.host_times, OVERALL) if kind_of(shape) == "dense" else OVERALL
    case = min(
        near,
        key=lambda case: (
            not _is_same(case, shape),
            case.weights != shape.weights,
            case.model != timing.model,
            _distance(case, shape),
            -case.points,
        ),
    )
    return MeasuredError(case.tpot, case.ttft, case.points, str(case), differs=_differences(case, shape))


def kind_of(shape: ModelShape) -> str:
    """Say what its layers are made of, where that decides which kernels it spends its time in."""
    mixers = [mixer for mixer, _ in shape.mixers]
    attention = {
        "hybrid": any(mixer.state_bytes for mixer in mixers),
        "sparse": any(mixer.index is not None or mixer.compression > 1 for mixer in mixers),
        "latent": any(mixer.latent_flops for mixer in mixers),
        "windowed": any(mixer.window for mixer in mixers),
    }
    words = [word for word, has in attention.items() if has]
    return " ".join([*words, "mixture" if shape.num_experts else "dense"])


def _distance(case: Case, shape: ModelShape) -> float:
    """Return how many times as large or small a model is as a case; infinite if it is of another kind."""
    other = find_model(case.model)
    if kind_of(other) != kind_of(shape):
        return float("inf")
    ratios = (
        shape.num_parameters / other.num_parameters,
        shape.num_active_parameters / other.num_active_parameters,
    )
    return max(max(ratio, 1 / ratio) for ratio in ratios)


def _is_same(case: Case, shape: ModelShape) -> bool:
    """Return whether a model differs from a case in its weights' types at most."""
    return find_model(case.model).quantised("bfloat16").layers == shape.quantised("bfloat16").layers


def _differences(case: Case, shape: ModelShape) -> str:
    """Say in what a model differs from a case; nothing if in nothing."""
    found = []
    if not _is_same(case, shape):
        own, other = (f"{one.num_parameters / 1e9:,.1f} B" for one in (shape, find_model(case.model)))
        found.append(f"{own} parameters" if own == other else f"{own} parameters, not {other}")
    if case.weights and case.weights != shape.weights:
        found.append(f"{shape.weights} weights")
    return f"this model has {', and '.join(found)}" if found else ""


KNOWN = (
    Case("sglang", "Qwen/Qwen3.5-397B-A17B", "b200", "bfloat16", 0.033, 0.193, 35),
    Case("sglang", "Qwen/Qwen3.5-397B-A17B", "b200", "fp4", 0.197, 0.124, 12),
    Case("sglang", "Qwen/Qwen3.5-397B-A17B", "b200", "fp8", 0.060, 0.222, 54),
    Case("sglang", "Qwen/Qwen3.5-397B-A17B", "h200", "fp8", 0.158, 0.193, 34),
    Case("sglang", "deepseek-ai/DeepSeek-R1", "b200", "fp4", 0.145, 0.421, 73),
    Case("sglang", "deepseek-ai/DeepSeek-R1", "b200", "fp8", 0.107, 0.276, 35),
    Case("sglang", "deepseek-ai/DeepSeek-R1", "h200", "fp8", 0.056, 0.168, 20),
    Case("sglang", "zhipuai/GLM-5", "b200", "fp4", 0.120, 0.325, 10),
    Case("sglang", "zhipuai/GLM-5", "b200", "fp8", 0.118, 0.217, 22),
    Case("sglang", "zhipuai/GLM-5", "h200", "fp8", 0.226, 0.507, 16),
    Case("trtllm", "deepseek-ai/DeepSeek-R1", "b200", "fp4", 0.130, 0.490, 46),
    Case("trtllm", "deepseek-ai/DeepSeek-R1", "b200", "fp8", 0.189, 0.435, 22),
    Case("trtllm", "deepseek-ai/DeepSeek-R1", "h200", "fp8", 0.291, 0.600, 31),
    Case("trtllm", "meta-llama/Llama-3.1-70B", "b200", "fp4", 0.052, 0.126, 72),
    Case("trtllm", "meta-llama/Llama-3.1-70B", "b200", "fp8", 0.035, 0.074, 72),
    Case("trtllm", "meta-llama/Llama-3.1-70B", "h200", "fp8", 0.048, 0.078, 72),
    Case("trtllm", "meta-llama/Llama-3.1-8B-Instruct", "h100", "", 0.084, 0.259, 177),
    Case("trtllm", "openai/gpt-oss-120b", "b200", "fp4", 0.116, 0.358, 89),
    Case("trtllm", "openai/gpt-oss-120b", "h200", "fp4", 0.080, 0.456, 97),
    Case("vllm", "MiniMaxAI/MiniMax-M2.5", "b200", "fp4", 0.112, 0.434, 78),
    Case("vllm", "MiniMaxAI/MiniMax-M2.5", "b200", "fp8", 0.131, 0.247, 134),
    Case("vllm", "Qwen/Qwen3-235B-A22B-FP8", "h200", "fp8", 0.388, 0.189, 38),
    Case("vllm", "meta-llama/Llama-3.1-70B", "b200", "fp4", 0.045, 0.171, 60),
    Case("vllm", "meta-llama/Llama-3.1-70B", "b200", "fp8", 0.031, 0.086, 60),
    Case("vllm", "meta-llama/Llama-3.1-70B", "h100", "fp8", 0.026, 0.057, 45),
    Case("vllm", "moonshotai/Kimi-K2.5", "b200", "fp4", 0.053, 0.290, 60),
    Case("vllm", "moonshotai/Kimi-K2.5", "b200", "int4", 0.051, 0.074, 35),
    Case("vllm", "moonshotai/Kimi-K2.5", "h200", "int4", 0.103, 0.144, 45),
    Case("vllm", "openai/gpt-oss-120b", "h100", "fp4", 0.776, 0.346, 56),
    Case("vllm", "openai/gpt-oss-120b", "h200", "fp4", 0.128, 0.307, 63),
)
