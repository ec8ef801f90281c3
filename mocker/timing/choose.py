"""The step-time model that an engine's settings name."""

import functools

from mocker.config import EngineConfig
from mocker.timing import files as timing_files
from mocker.timing.calibrated import Calibrated
from mocker.timing.gpu import find_engine, find_gpu
from mocker.timing.model import Constant, Faster, Polynomial, TimingModel
from mocker.timing.model_shape import find_model
from mocker.timing.roofline import Roofline
from mocker.timing.table import Table


@functools.lru_cache(maxsize=64)
def timing_model(config: EngineConfig) -> TimingModel:
    """Build the model; it holds no state of an engine, so equal settings share one.

    Raises:
        ValueError: its file cannot be read, or the GPU or model is not known.
    """
    name = config.timing_name
    if name == "polynomial":
        return Polynomial(config)
    if name == "constant":
        return Constant(config)
    model = _roofline(config) if name == "roofline" else _measured(config, name)
    if config.speedup_ratio == config.decode_speedup_ratio == 1:
        return model
    return Faster(model, config)


def _roofline(config: EngineConfig) -> TimingModel:
    assert config.gpu is not None
    assert config.model is not None
    gpu = find_gpu(config.gpu)
    return Roofline(
        find_model(config.model),
        gpu,
        find_engine(config.timed_as, gpu.architecture),
        tensor_parallel_size=config.tensor_parallel_size,
        expert_parallel_size=config.expert_parallel_size,
        attention_ranks=config.dp_size,
        weights=config.quantization or "",
        kv_dtype=config.kv_cache_dtype,
        link_gbps=config.link_gbps,
    )


def _measured(config: EngineConfig, name: str) -> TimingModel:
    assert config.timing_file is not None
    if name == "calibrated":
        return Calibrated(timing_files.read_calibration(config.timing_file)["step"])
    return Table(timing_files.read_table(config.timing_file))
