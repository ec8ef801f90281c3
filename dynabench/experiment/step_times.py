"""Describe where simulated step times come from."""

from collections.abc import Sequence
from pathlib import Path

from dynabench.deployment.description import Deployment
from foundation.own_code import shown
from mocker.timing.config import TimingConfig
from mocker.timing.files import read_calibration

MOST = 4
"""Different step times of arms are listed individually up to this number."""


def describe_step_times(deployments: Sequence[Deployment]) -> str | None:
    """Describe the step-time model, model and GPU of the arms' simulated engines; None if no engine is simulated."""
    found = list(dict.fromkeys(text for one in deployments if (text := _of_deployment(one))))
    if len(found) > MOST:
        return f"{len(found)} kinds, by arm (see the settings)"
    return ("by arm: " if len(found) > 1 else "") + "; or ".join(found) or None


def _of_deployment(deployment: Deployment) -> str:
    """Describe the step times of all pools, or of each pool if they differ."""
    pools = {pool.name: _of_pool(pool.timing) for pool in deployment.pools if pool.engine == "mocker"}
    if len(set(pools.values())) > 1:
        return "; ".join(f"{name}: {text}" for name, text in pools.items())
    return next(iter(pools.values()), "")


def _of_pool(timing: TimingConfig) -> str:
    text = _source(timing)
    if timing.speedup_ratio != 1:
        text += f", divided by {timing.speedup_ratio:g}" if timing.speedup_ratio else ", set to take no time"
    if timing.decode_speedup_ratio != 1:
        text += f", decode by {timing.decode_speedup_ratio:g}" if timing.decode_speedup_ratio else ", decode in no time"
    return text


def _source(timing: TimingConfig) -> str:
    match timing.timing_name:
        case "roofline":
            weights = f" with {timing.quantization} weights" if timing.quantization else ""
            gpus = f" and tensor parallel size {timing.tensor_parallel_size}" if timing.tensor_parallel_size > 1 else ""
            kernels = f" with moe_backend {timing.moe_backend}" if timing.moe_backend != "auto" else ""
            return f"roofline of {timing.model}{weights} on {timing.gpu}{gpus}, timed as {timing.host_times}{kernels}"
        case "constant":
            prefill, decode = timing.constant_prefill_ms, timing.constant_decode_ms
            return (
                f"generic: constant, {prefill:g} ms for prefill and {decode:g} ms for decode, of no particular model "
                "or GPU"
            )
        case "polynomial":
            return "generic: a polynomial of no particular model or GPU"
        case "own":
            assert timing.timing_file is not None
            return f"those of {Path(shown(timing.timing_file)).name}, a class of your own"
        case "calibrated":
            assert timing.timing_file is not None
            found = read_calibration(timing.timing_file)
            if "fitted_to" in found:
                return f"fitted to {found['fitted_to']}"
            engine = f"{found['engine'].get('name')} {found['engine'].get('version')}"
            return f"calibrated on {engine} with {found.get('model')} on {found.get('hardware')}"
        case _:
            assert timing.timing_file is not None
            return f"table {Path(timing.timing_file).name} of measured steps"
