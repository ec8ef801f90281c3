"""The GPUs and engines that are bundled by name."""

import json
from pathlib import Path
from typing import Any

from foundation.text import instead_of
from mocker.timing.gpu import Decode, EngineTimes, Experts, Gemm, Gpu, PrefillAttention

DATA = Path(__file__).with_name("data")


def find_gpu(name: str, engine: str = "vllm") -> Gpu:
    """Return a bundled GPU, with the kernels of an engine where it has some of its own, else with those of all.

    Raises:
        ValueError: it is not bundled.
    """
    known = _read("gpus")
    plain = name.lower().replace("_", "-").removeprefix("nvidia-").removesuffix("-sxm")
    if plain not in known:
        raise ValueError(f"gpu {name!r} is not known; {instead_of(plain, known)}")
    facts = known[plain] | _over(known[plain], known[plain].get("engines", {}).get(engine, {}))
    return Gpu(
        name=plain,
        memory=facts["memory"],
        bandwidth=facts["bandwidth"],
        flops=facts["flops"],
        gemm={dtype: Gemm(*row) for dtype, row in facts["gemm"].items()},
        experts={kernel: Experts(*row) for kernel, row in facts["experts"].items()},
        decode={dtype: Decode(*row) for dtype, row in facts["decode"].items()},
        prefill=PrefillAttention(*facts["prefill"]),
        latent_decode={dtype: Decode(*row) for dtype, row in facts.get("latent_decode", {}).items()},
        latent_prefill=PrefillAttention(*facts.get("latent_prefill", facts["prefill"])),
        all_reduce={int(n): [(size, time * 1e-6) for size, time in rows] for n, rows in facts["all_reduce"].items()},
        architecture=facts["architecture"],
        engine=engine,
        **{name: facts[name] for name in ("mixed_decode_slowdown", "mixed_row_s", "mixed_tile_s") if name in facts},
    )


def gpu_names() -> list[str]:
    """Return the names of the bundled GPUs."""
    return list(_read("gpus"))


def moe_backends() -> list[str]:
    """Return the names of kernels of experts that were measured on any GPU, and auto."""
    engines = [own for facts in _read("gpus").values() for own in facts.get("engines", {}).values()]
    asked = [name.partition("/")[2] for own in engines for name in own.get("experts", {})]
    return [*dict.fromkeys(["auto", *filter(None, asked)])]


def _over(facts: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return an engine's own facts, with those of vLLM where it has none."""
    return {key: facts.get(key, {}) | value if isinstance(value, dict) else value for key, value in own.items()}


def find_engine(name: str, architecture: str) -> EngineTimes:
    """Return the times that a bundled engine adds to kernels on an architecture: vLLM's, with its differences."""
    known = _read("engines")
    facts: dict[str, Any] = {}
    for engine in dict.fromkeys(("vllm", name)):
        facts |= known[engine]["any"] | known[engine].get(architecture, {})
    return EngineTimes(**facts)


def _read(name: str) -> dict[str, dict[str, Any]]:
    known: dict[str, dict[str, Any]] = json.loads((DATA / f"{name}.json").read_text())
    return known
