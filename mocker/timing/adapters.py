"""How many LoRA adapters an engine has room for, and how long one takes to load."""

from mocker.contract import AdapterMemory
from mocker.timing.config import TimingConfig
from mocker.vllm.config import EngineConfig

USUAL_ADAPTER = 81920 * 32
"""Parameters of an adapter of rank 1 for Llama 3.1 8B, where the model is not known."""


def adapter_memory(engine: EngineConfig, timing: TimingConfig) -> AdapterMemory | None:
    """Return the room for adapters; each GPU copies whole ones, because vLLM divides only one of an adapter's two matrices."""
    if not engine.enable_lora:
        return None
    load_s = 0.0 if engine.lora_load_ms is None else engine.lora_load_ms / 1e3
    if engine.lora_load_ms is None:
        rank = engine.max_lora_rank
        count = USUAL_ADAPTER * rank if timing.model is None else timing.shape.num_adapter_parameters(rank)
        load_s = engine.host_latency_us / 1e6 + 2 * count / (engine.host_bandwidth_gb_s * 1e9)
    return AdapterMemory(
        engine.max_loras, engine.max_cpu_loras or engine.max_loras, load_s=load_s, read_s=engine.lora_read_ms / 1e3
    )
