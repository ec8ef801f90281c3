"""The GPUs, engines and models that are bundled by name, and models from a config.json."""

import json
from pathlib import Path
from typing import Any

from foundation.text import instead_of
from mocker.timing.gpu import Decode, EngineTimes, Experts, Gemm, Gpu
from mocker.timing.model_shape import ModelShape, shape_of

DATA = Path(__file__).with_name("data")
VARIANTS = ("-instruct", "-chat", "-hf", "-base", "-it", "-fp8", "-nvfp4")


def find_gpu(name: str) -> Gpu:
    """Return a bundled GPU.

    Raises:
        ValueError: it is not bundled.
    """
    known = _read("gpus")
    plain = name.lower().replace("_", "-").removeprefix("nvidia-").removesuffix("-sxm")
    if plain not in known:
        raise ValueError(f"gpu {name!r} is not known; {instead_of(plain, known)}")
    facts = known[plain]
    return Gpu(
        name=plain,
        memory=facts["memory"],
        bandwidth=facts["bandwidth"],
        flops=facts["flops"],
        gemm={dtype: Gemm(*row) for dtype, row in facts["gemm"].items()},
        experts={dtype: Experts(*row) for dtype, row in facts["experts"].items()},
        decode={dtype: Decode(*row) for dtype, row in facts["decode"].items()},
        prefill=facts["prefill"],
        all_reduce={int(n): [(size, time * 1e-6) for size, time in rows] for n, rows in facts["all_reduce"].items()},
        architecture=facts["architecture"],
        **{
            name: facts[name]
            for name in ("prefill_pad", "mixed_decode_slowdown", "mixed_row_s", "mixed_tile_s")
            if name in facts
        },
    )


def gpu_names() -> list[str]:
    """Return the names of the bundled GPUs."""
    return list(_read("gpus"))


def find_engine(name: str, architecture: str) -> EngineTimes:
    """Return the times that a bundled engine adds to kernels on an architecture: vLLM's, with its differences."""
    known = _read("engines")
    facts: dict[str, Any] = {}
    for engine in dict.fromkeys(("vllm", name)):
        facts |= known[engine]["any"] | known[engine].get(architecture, {})
    return EngineTimes(**facts)


def find_model(name: str) -> ModelShape:
    """Return the shape of a bundled model, by its Hugging Face id, or of the config.json at a path.

    Raises:
        ValueError: the model is unknown, and there is no such file.
    """
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        try:
            return shape_of(json.loads(path.read_text()))
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: not the config.json of a language model ({error})") from error
    known = model_configs()
    plain = {_plain(key): key for key in sorted(known, reverse=True)}
    key = name if name in known else plain.get(_plain(name))
    if key is None:
        raise ValueError(
            f"model {name!r} is neither bundled nor a folder or file with a config.json; bundled are {', '.join(known)}"
        )
    config = dict(known[key])
    if name.lower().endswith("-fp8"):
        config["weights"] = "fp8"
    if name.lower().endswith("-nvfp4"):
        config["weights"] = "fp4"
    return shape_of(config)


def model_configs() -> dict[str, dict[str, Any]]:
    """Return the bundled parts of common models' config.json, by Hugging Face id."""
    configs: dict[str, dict[str, Any]] = json.loads((DATA / "models.json").read_text())
    return configs


def _read(name: str) -> dict[str, dict[str, Any]]:
    known: dict[str, dict[str, Any]] = json.loads((DATA / f"{name}.json").read_text())
    return known


def _plain(name: str) -> str:
    """Reduce a model's id to the name of its shape: without organisation and without changes to the weights."""
    plain = name.lower().rpartition("/")[2].removeprefix("meta-")
    while plain.endswith(VARIANTS):
        plain = plain.rpartition("-")[0]
    return plain
