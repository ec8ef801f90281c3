"""Fit the kernels that only AIConfigurator's own folder has into mocker/timing/data/gpus.json.

    python benchmarks/engine_kernels.py SYSTEMS           # coefficients, held-out errors
    python benchmarks/engine_kernels.py SYSTEMS --write   # also write them

SYSTEMS is the folder aic-core/src/aiconfigurator_core/systems/data of ai-dynamo/aiconfigurator. Fitted are the kernels of
SGLang and TensorRT-LLM, by the version that most published points were measured with, and of vLLM those that
`fit_kernels.py` has no table of. Run that first: peaks and bandwidths are from its file.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from fit_kernels import (
    BLOCKS,
    EXPERTS,
    L2_BYTES,
    SYSTEMS,
    Array,
    Fit,
    all_reduces,
    decodes,
    fit,
    fit_prefill,
    fit_routed,
    gemms,
    seconds,
    written,
)

from mocker.models.weight_types import MXFP4, PLAIN

LATENT, LATENT_HEAD = 576, 192
"""Values of a token's latent in DeepSeek's attention, and the size of a head of its prompts."""
LATENT_FLOPS = 2 * (LATENT + 512)
"""For each head and token of context, in a decode."""


class Rows(NamedTuple):
    """The rows of a table that are a kernel's: of a version, a type of weights there, and a part of the kernel's name."""

    version: str
    weights: str
    kernel: str = ""
    engine: str = ""
    """Whose table it is, if it is another engine's that has the same kernel."""


class Engine(NamedTuple):
    """The kernels of an engine on a GPU: those that recipes ask for, or that it chooses itself."""

    gemm: Mapping[str, Rows] = {}
    experts: Mapping[str, Rows] = {}
    """By weights; after a slash, one that must be asked for."""
    attention: str = ""
    """The version of the tables of attention and of all-reduces; empty: vLLM's are used."""
    fused: tuple[str, ...] = ("fp8",)
    """Types of weights for which quantising the inputs is part of the kernel before."""


TORCH = "moe_torch_flow"
FUSED = ("fp8", "fp4")
DEEPGEMM = Rows("0.5.9", BLOCKS, engine="sglang")
"""vLLM has it, too, but its own tables launch it outside of CUDA graphs: in small batches, they take three times as long."""
MARLIN_ON_HOPPER = {"fp4/marlin": Rows("0.24.0", "int4_wo", "marlin")}
"""Measured with INT4 and the shapes of Kimi K2: it unpacks all weights of 4 bits."""
MXFP4_ON_BLACKWELL = {
    "mxfp4": Rows("0.24.0", "w4a8_mxfp4_mxfp8", "mxfp4_mxfp8"),
    "mxfp4/marlin": Rows("0.24.0", "w4a16_mxfp4", "marlin"),
}
"""Marlin was not measured with NVFP4, whose own kernels multiply in 4 bits."""


def _of_vllm(blocks: Rows, experts: Mapping[str, Rows]) -> Engine:
    return Engine({BLOCKS: blocks}, experts)


def _gemms(version: str, *kinds: str) -> dict[str, Rows]:
    return {kind: Rows(version, kind) for kind in kinds} | {BLOCKS: Rows(version, BLOCKS)}


TRTLLM_ON_HOPPER = Engine(
    _gemms("1.2.0rc5", "bfloat16", "fp8"),
    {
        "bfloat16": Rows("1.2.0rc5", "bfloat16", TORCH),
        "fp8": Rows("1.2.0rc5", BLOCKS, TORCH),
        "fp4": Rows("1.2.0rc5", "w4a16_mxfp4", TORCH),
    },
    "1.3.0rc10",
    FUSED,
)
ENGINES = {
    "h100": {"vllm": _of_vllm(DEEPGEMM, MARLIN_ON_HOPPER), "trtllm": TRTLLM_ON_HOPPER},
    "h200": {
        "vllm": _of_vllm(
            DEEPGEMM,
            MARLIN_ON_HOPPER
            | {
                "bfloat16": Rows("0.24.0", "bfloat16", EXPERTS["h100"]["bfloat16"]),
                "fp8": Rows("0.24.0", BLOCKS, EXPERTS["h100"]["fp8"]),
                "int4": Rows("0.24.0", "int4_wo", EXPERTS["h100"]["int4"]),
                "fp4": Rows("0.24.0", "w4a16_mxfp4", EXPERTS["h100"]["fp4"]),
            },
        ),
        "trtllm": TRTLLM_ON_HOPPER,
    },
    "b200": {
        "vllm": _of_vllm(Rows("0.19.0", BLOCKS), MXFP4_ON_BLACKWELL),
        "trtllm": Engine(
            _gemms("1.2.0rc5", "bfloat16", "fp8_static", "nvfp4"),
            {
                "bfloat16": Rows("1.2.0rc5", "bfloat16", "cutlass"),
                "fp4": Rows("1.2.0rc5", "nvfp4", "min_latency"),
                "fp4/cutlass": Rows("1.2.0rc5", "nvfp4", "cutlass"),
                "mxfp4": Rows("1.3.0rc10", "w4a8_mxfp4_mxfp8", TORCH),
            },
            "1.2.0rc5",
            FUSED,
        ),
    },
}
"""TensorRT-LLM's attention on Hopper is that of a later version: in the tables of 1.2.0rc5, the smallest decodes of latent
attention take twice as long. Its experts with weights of 8 bits on B200 are FlashInfer's, which vLLM has, too."""


class Tables:
    """The tables of an engine on a GPU."""

    def __init__(self, systems: Path, gpu: str, engine: str) -> None:
        self._folder, self._engine = systems / SYSTEMS[gpu], engine

    def read(self, family: str, version: str, kind: str, engine: str = "") -> pd.DataFrame:
        """Read one, with its times in microseconds."""
        table = pd.read_parquet(self._folder / family / (engine or self._engine) / version / f"{kind}_perf.parquet")
        return table.assign(latency_us=table["latency"] * 1000)

    def rows(self, family: str, rows: Rows, name: str) -> pd.DataFrame:
        """Return those of a kernel; `name` is the column of the weights."""
        table = self.read(family, rows.version, family, rows.engine)
        is_kernel = table["kernel_source"].str.contains(rows.kernel) & ~table["kernel_source"].str.contains("nongated")
        return table[(table[name] == rows.weights) & is_kernel]


def fit_gemms(tables: Tables, gpu: dict[str, Any], engine: Engine) -> Iterator[tuple[str, Fit]]:
    """Fit each type of weight."""
    yield from gemms(
        pd.concat([tables.rows("gemm", rows, "gemm_dtype") for rows in engine.gemm.values()]), gpu, engine.fused
    )


def fit_all_experts(tables: Tables, gpu: dict[str, Any], kinds: Mapping[str, Rows]) -> Iterator[tuple[str, Fit]]:
    """Fit each kernel of routed experts."""
    for kind, rows in kinds.items():
        weight = MXFP4 if "mxfp4" in rows.weights else PLAIN[kind.partition("/")[0]]
        yield kind, fit_routed(tables.rows("moe", rows, "moe_dtype"), weight, gpu)


def fit_latent_prefill(table: pd.DataFrame, peak: float) -> Fit:
    """Fit [efficiency, pad, launch_s] of latent attention over new prompts, as `fit_prefill` does."""
    rows = table[(table["isl"] >= 256) & (table["kv_cache_dtype"] == "bfloat16") & (table["num_heads"] >= 8)]
    batch, length, heads = (rows[name].to_numpy(float) for name in ("batch_size", "isl", "num_heads"))

    def model(c: Array, batch: Array, length: Array, heads: Array) -> Array:
        return np.asarray(4 * heads * LATENT_HEAD * batch * (length**2 / 2 + c[1] * length) / peak / c[0] + c[2])

    return fit(model, [(0.4, 0.05, 1.2), (200, 0, 4000), (1e-5, 0, 1e-3)], [batch, length, heads], seconds(rows))


def fit_latent_decode(rows: pd.DataFrame, peak: float, bandwidth: float, size: float) -> Fit:
    """Fit [memory, launch_s, row_s, compute] of latent attention in decodes: bytes or operations, whichever take longer."""
    batch, step, heads = (rows[name].to_numpy(float) for name in ("batch_size", "step", "num_heads"))

    def model(c: Array, tokens: Array, batch: Array, heads: Array) -> Array:
        read, compute = tokens * LATENT * size / bandwidth / c[0], tokens * heads * LATENT_FLOPS / peak / c[3]
        return np.asarray(np.maximum(read, compute) + c[1] + c[2] * batch)

    ranges = [(0.8, 0.1, 1.1), (1e-5, 0, 1e-4), (1e-8, 0, 1e-6), (0.5, 0.05, 1.2)]
    return fit(model, ranges, [batch * (step + 1), batch, heads], seconds(rows))


def fit_attention(tables: Tables, gpu: dict[str, Any], version: str, l2: float) -> Iterator[tuple[str, str, Any, str]]:
    """Yield the keys, coefficients and errors of attention and of all-reduces."""
    for dtype, found in decodes(tables.read("attention", version, "generation_attention"), gpu, l2):
        yield "decode", dtype, found.coefficients, found.error
    context = tables.read("attention", version, "context_attention")
    found = fit_prefill(context[context["attn_dtype"] == "bfloat16"], gpu["flops"]["bfloat16"])
    yield "prefill", "", found.coefficients[:2], found.error
    peak = gpu["flops"]["bfloat16"]
    found = fit_latent_prefill(tables.read("mla", version, "context_mla"), peak)
    yield "latent_prefill", "", found.coefficients[:2], found.error
    for dtype, rows in tables.read("mla", version, "generation_mla").groupby("kv_cache_dtype"):
        found = fit_latent_decode(rows, peak, gpu["bandwidth"], PLAIN[str(dtype)].bytes)
        yield "latent_decode", str(dtype), found.coefficients, found.error
    table = tables.read("comm", version, "custom_allreduce")
    table = table.assign(backend=table.get("backend", "graph"))
    for count, points in all_reduces(table).items():
        yield "all_reduce", count, points, ""


def fit_engine(tables: Tables, gpu: dict[str, Any], engine: Engine, l2: float) -> Iterator[tuple[str, str, Any, str]]:
    """Yield the keys, coefficients and errors of all kernels."""
    for name, fits in (
        ("gemm", fit_gemms(tables, gpu, engine)),
        ("experts", fit_all_experts(tables, gpu, engine.experts)),
    ):
        for kind, found in fits:
            yield name, kind, found.coefficients, found.error
    if engine.attention:
        yield from fit_attention(tables, gpu, engine.attention, l2)


def main() -> None:
    """Fit the kernels of every engine on every GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", type=Path)
    parser.add_argument("--gpus", type=Path, default=Path("mocker/timing/data/gpus.json"))
    parser.add_argument("--write", action="store_true", help="put the coefficients into the file of GPUs")
    options = parser.parse_args()
    gpus = json.loads(options.gpus.read_text())
    print(f"{'':30}{'held-out error: median, mean':32}coefficients")
    for gpu_name, engines in ENGINES.items():
        for name, engine in engines.items():
            gpu = gpus[gpu_name]
            own = gpu.setdefault("engines", {}).setdefault(name, {})
            tables = Tables(options.systems, gpu_name, name)
            for kind, key, value, error in fit_engine(tables, gpu, engine, L2_BYTES[gpu_name]):
                # vLLM's own choice of experts' kernels is that of engines without tables, too.
                into = gpu if (name, kind) == ("vllm", "experts") and "/" not in key else own
                if key:
                    into.setdefault(kind, {})[key] = value
                else:
                    into[kind] = value
                if error:
                    print(f"{gpu_name:6}{name:8}{kind:9}{key:10}{error}   {value}", flush=True)
    if options.write:
        options.gpus.write_text(written(gpus))


if __name__ == "__main__":
    main()
