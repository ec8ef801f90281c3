"""What a plan did not search, and the flags that make it."""

from collections.abc import Iterator

from dynabench.capacity.candidates import has_one_size
from dynabench.capacity.settings import PlanConfig
from dynabench.deployment.flags import SPLIT
from dynabench.experiment.axes import setting_of
from dynabench.experiment.settings import ExperimentConfig
from mocker.timing.config import TimingConfig


def unsearched(config: PlanConfig, experiment: ExperimentConfig, timing: TimingConfig) -> str:
    """Say in a line which kinds of layouts were not searched."""
    parts = list(_parts(config, timing, {setting_of(text) for text in experiment.vary}))
    return f"Not searched: {'; '.join(parts)}." if parts else ""


def _parts(config: PlanConfig, timing: TimingConfig, varied: set[str]) -> Iterator[str]:
    if varied.isdisjoint(SPLIT):
        yield "split prefill and decode (--vary prefill_workers=1..3)"
    if timing.timing_name == "roofline" and varied.isdisjoint(("engine_type", "timed_as")):
        yield f"engines other than {timing.host_times} (--vary engine_type=vllm,sglang,trtllm)"
    one_size = len(config.tensor_parallel_size) == 1 and not has_one_size(config, timing)
    if one_size and "tensor_parallel_size" not in varied:
        yield f"tensor parallel sizes other than {config.tensor_parallel_size[0]}"
    if len(config.max_num_batched_tokens) == 1 and "max_num_batched_tokens" not in varied:
        yield f"chunks other than {config.max_num_batched_tokens[0]:,} tokens"
    if timing.gpu is not None and not config.price and "gpu" not in varied:
        yield f"GPUs other than {timing.gpu} (--price)"
