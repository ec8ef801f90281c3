"""Where a simulated engine's step times come from: a model on a GPU, a file of measurements, or a formula."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from foundation.own_code import is_own
from foundation.settings import Count, NotNegative, Positive, Whole, check_settings
from mocker.models.catalog import find_model
from mocker.models.shape import ModelShape
from mocker.timing.sampling import Sampling

Quantization = Literal["bfloat16", "fp8", "fp4", "int4"]
KvCacheDtype = Literal["auto", "bfloat16", "fp8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingConfig:
    """Settings of the step times, and of the memory left for KV blocks."""

    speedup_ratio: NotNegative = 1.0
    """Divide every step's duration by this (0: steps take no time)."""

    decode_speedup_ratio: NotNegative = 1.0
    """Also divide the decode part of a step's duration by this (0: it takes no time)."""

    timing: Literal["polynomial", "constant", "roofline", "calibrated", "table"] | None = None
    """Step-time model (default: roofline with --gpu, the file's with --timing-file, else polynomial)."""

    timing_file: str | None = None
    """File of step times measured on a real engine: from `dynabench calibrate`, or a table (.npz, .csv, .parquet);
    or a Python file whose class derives from mocker.timing.own.StepTimes."""

    model: str | None = None
    """The model: its Hugging Face id, or a folder or file with a config.json. With --gpu, its step times are predicted.
    In live runs it is also the name under which the model is served (default there: mock)."""

    gpu: str | None = None
    """GPU that the model runs on, such as h100 or rtx-pro-6000 (`dynabench hardware` lists them)."""

    tensor_parallel_size: Count = 1
    """GPUs that share each layer of the model."""

    pipeline_parallel_size: Count = 1
    """Stages that the model's layers are divided into, each on tensor_parallel_size GPUs of its own."""

    enable_expert_parallel: bool = False
    """Give each GPU whole experts of a mixture-of-experts model, not a slice of every expert."""

    quantization: Quantization | None = None
    """Type of the weights of all layers (default: the model's; a model that mostly has this type keeps its exact types)."""

    read_model_as: str | None = None
    """Read the model's config.json as this architecture's (a `model_type`, such as llama), and ignore sizes in it that
    this does not have: for architectures that are not known here."""

    kv_cache_dtype: KvCacheDtype = "auto"
    """Type of the KV cache (auto: what the model's quantization asks for, else bfloat16)."""

    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Share of the GPU's memory for weights, activations and KV cache."""

    link_gbps: Positive | None = None
    """Bandwidth of all-reduces between the engine's GPUs (GB/s of NCCL's bus bandwidth), if it differs from the bundled
    GPU's."""

    sampling: Sampling = "greedy"
    """How requests sample. With --gpu, anything but greedy makes steps longer, by sequence and vocabulary: top-p sorts all
    of it. (vLLM's server takes top-p and top-k from the model's generation_config.json, unless requests set them.)"""

    max_cudagraph_capture_size: Whole | None = None
    """Most tokens of a step with prompts that vLLM launches as CUDA graphs (0: none; default: as vLLM 0.32, twice
    max_num_seqs, at most 512, or 1024 on Blackwell). It launches the kernels of a larger step one by one, which takes longer.
    So do SGLang and TensorRT-LLM for every step with prompts."""

    moe_backend: str = "auto"
    """Kernels of routed experts: vLLM's --moe-backend (marlin), or the backend of TensorRT-LLM's moe_config (cutlass; auto:
    those that the engine chooses). Only those that were measured with the engine on the GPU are accepted, with weights of as
    many bits: Marlin for 4 bits, on Blackwell only for MXFP4 and INT4."""

    timed_as: Literal["vllm", "sglang", "trtllm"] | None = None
    """Engine whose kernels and host times the roofline adds up (default: that of engine_type)."""

    constant_prefill_ms: NotNegative = 20.0
    """Duration of the prefill part of a step, for the constant step-time model (ms)."""

    constant_decode_ms: NotNegative = 10.0
    """Duration of the decode part of a step, for the constant step-time model (ms)."""

    def __post_init__(self) -> None:
        """Refuse values that leave a step's time undefined, or define it twice."""
        check_settings(self)
        object.__setattr__(self, "moe_backend", self.moe_backend.lower().replace("-", "_"))  # as vLLM reads it
        if self.pipeline_parallel_size > 1 and self.timing_name != "roofline":
            raise ValueError(
                f"pipeline_parallel_size is {self.pipeline_parallel_size}, and timing is {self.timing_name}; expected 1, or a gpu "
                "and a model: only their times can be divided among stages"
            )
        if self.sampling != "greedy" and self.timing_name != "roofline":
            raise ValueError(
                f"sampling is {self.sampling}, and timing is {self.timing_name}; expected greedy, or a gpu and a model: other "
                "step times say nothing about sampling"
            )
        if self.moe_backend != "auto" and self.timing_name != "roofline":
            raise ValueError(
                f"moe_backend is {self.moe_backend}, and timing is {self.timing_name}; expected auto, or a gpu and a model with "
                "experts: other step times say nothing about kernels"
            )
        if self.timing == "constant" and self.constant_prefill_ms + self.constant_decode_ms == 0:
            raise ValueError("constant_prefill_ms and constant_decode_ms cannot both be 0")
        if self.gpu is not None and self.model is None:
            raise ValueError(f"gpu {self.gpu} needs a model: a Hugging Face id, or a folder or file with a config.json")
        if self.timing == "roofline" and self.gpu is None:
            raise ValueError("timing roofline needs a gpu and a model")
        if self.timing in ("calibrated", "table") and self.timing_file is None:
            raise ValueError(f"timing {self.timing} needs a timing_file")
        if self.timing_file is not None and self.timing not in (None, "calibrated", "table"):
            raise ValueError(f"timing_file cannot be combined with timing {self.timing}")

    @property
    def shape(self) -> ModelShape:
        """The model, with its weights as set.

        Raises:
            ValueError: it is unknown, or its config.json is not understood.
        """
        assert self.model is not None
        found = find_model(self.model, self.read_model_as)
        return found if self.quantization is None else found.quantised(self.quantization)

    @property
    def kv_dtype(self) -> str:
        """The type of the KV cache: as set, or the model's.

        Raises:
            ValueError: it is the model's, which is unknown.
        """
        if self.kv_cache_dtype != "auto":
            return self.kv_cache_dtype
        return "bfloat16" if self.model is None else self.shape.kv_dtype

    @property
    def timing_name(self) -> str:
        """The step-time model: as given, or what the other settings imply."""
        if self.timing is not None:
            return self.timing
        if self.timing_file is not None:
            if is_own(self.timing_file):
                return "own"
            return "calibrated" if self.timing_file.endswith(".json") else "table"
        return "polynomial" if self.gpu is None else "roofline"

    @property
    def is_generic(self) -> bool:
        """Whether no setting determines the step times, so that they are those of no particular engine."""
        return self.timing is None and self.timing_file is None and self.gpu is None

    @property
    def calibration(self) -> str | None:
        """The file of a calibrated engine, if the step times come from one."""
        return self.timing_file if self.timing_name == "calibrated" else None

    @property
    def host_times(self) -> Literal["vllm", "sglang", "trtllm"]:
        """The engine whose kernels and host times these are."""
        return self.timed_as or "vllm"

    @property
    def speedup(self) -> float:
        """What every step's duration is divided by."""
        return self.speedup_ratio or math.inf

    @property
    def decode_speedup(self) -> float:
        """What the duration of steps that decode is divided by."""
        return self.speedup * (self.decode_speedup_ratio or math.inf)


def divide(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a simulated engine's settings into those of its scheduler and those of `TimingConfig`."""
    names = TimingConfig.__dataclass_fields__.keys()
    own = {name: value for name, value in settings.items() if name not in names}
    return own, {name: value for name, value in settings.items() if name in names}
