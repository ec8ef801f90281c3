"""The step-time model of an engine: of its model and GPU, measured, or generic."""

from typing import Any

from mocker.timing.calibrated import Calibrated
from mocker.timing.catalog import find_engine, find_gpu
from mocker.timing.config import TimingConfig
from mocker.timing.constant import Constant
from mocker.timing.files import read_calibration, read_table
from mocker.timing.gpu import Gpu
from mocker.timing.model import Faster, TimingModel
from mocker.timing.own import own_times
from mocker.timing.parts import coefficients
from mocker.timing.polynomial import Polynomial
from mocker.timing.roofline import Roofline
from mocker.timing.table import Table
from mocker.timing.vllm_defaults import largest_graph
from mocker.vllm.config import EngineConfig


def timing_model(
    engine: EngineConfig, timing: TimingConfig, num_blocks: int, *, num_busy_ranks: int | None = None
) -> TimingModel:
    """Return the step-time model, with so many ranks that compute as much as the one it is asked for (default: all)."""
    speedup, decode_speedup = timing.speedup, timing.decode_speedup
    match timing.timing_name:
        case "polynomial":
            return Polynomial(num_blocks * engine.block_size, speedup, decode_speedup)
        case "constant":
            return Constant(
                timing.constant_prefill_ms / 1000 / speedup, timing.constant_decode_ms / 1000 / decode_speedup
            )
        case "roofline":
            model: TimingModel = roofline_of(engine, timing, num_busy_ranks or engine.dp_size)
        case "own":
            assert timing.timing_file is not None
            model = own_times(timing.timing_file)
        case _:
            model = _measured(timing)
    return model if speedup == decode_speedup == 1 else Faster(model, speedup, decode_speedup)


def roofline_of(engine: EngineConfig, timing: TimingConfig, num_busy_ranks: int) -> Roofline:
    """Return the step times that follow from the model and the GPU, with so many ranks that compute as much."""
    assert timing.gpu is not None
    gpu = find_gpu(timing.gpu, timing.host_times)
    found = coefficients(
        timing.shape,
        gpu,
        find_engine(timing.host_times, gpu.architecture),
        tensor_parallel_size=timing.tensor_parallel_size,
        expert_parallel_size=expert_parallel_size(engine, timing),
        attention_ranks=num_busy_ranks,
        kv_dtype=timing.kv_dtype,
        link_gbps=timing.link_gbps,
        async_scheduling=engine.is_async,
        sampling=timing.sampling,
        graph_tokens=_graph_tokens(engine, timing, gpu),
        moe_backend=timing.moe_backend,
    )
    return Roofline(found)


def _graph_tokens(engine: EngineConfig, timing: TimingConfig, gpu: Gpu) -> int:
    """Return the most tokens of a step with prompts whose kernels a CUDA graph launches."""
    if timing.host_times != "vllm":
        return 0
    given = timing.max_cudagraph_capture_size
    return largest_graph(gpu, engine.max_num_seqs, engine.num_speculative_tokens) if given is None else given


def _measured(timing: TimingConfig) -> TimingModel:
    assert timing.timing_file is not None
    if timing.timing_name == "calibrated":
        return Calibrated(read_calibration(timing.timing_file)["step"])
    return Table(read_table(timing.timing_file))


def measured_engine(timing: TimingConfig) -> dict[str, Any]:
    """Return the settings of the engine that a calibration measured."""
    if timing.calibration is None:
        return {}
    found: dict[str, Any] = read_calibration(timing.calibration)["engine"]
    return found


def expert_parallel_size(engine: EngineConfig, timing: TimingConfig) -> int:
    """Count the GPUs over which whole experts are spread."""
    return timing.tensor_parallel_size * engine.dp_size if timing.enable_expert_parallel else 1
