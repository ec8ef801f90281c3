"""Fit the coefficients of mocker/timing/data/gpus.json to measured kernels.

    python benchmarks/fit_kernels.py ../shared/perfdata/kernels                        # coefficients, held-out errors
    python benchmarks/fit_kernels.py ../shared/perfdata/kernels --layers perf --write  # the RTX cards too; write them

Kernels are AIConfigurator's tables (CSV), layers those of LLMServingSim's profiler (its folder profiler/perf). Half of
the rows are fitted in log space with a robust loss, and the errors are those of the other half. The formulas are those
of mocker/timing/roofline.py. Some values are not fitted: peaks and bandwidths come from data sheets, and memory sizes
from torch. Where no table exists, the experts of Ampere and Ada are H100's, and those of the RTX 4090 are the RTX
PRO 6000's. Run `engine_kernels.py` afterwards, which adds H200's experts and other engines' kernels.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from mocker.models.catalog import find_model
from mocker.models.layers import WeightType
from mocker.models.weight_types import PLAIN
from mocker.timing.gpu import over_link

SYSTEMS = {
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "a100": "a100_sxm",
    "l40s": "l40s",
    "rtx-pro-6000": "rtx_pro_6000_server",
}
LAYERS = {"rtx-pro-6000": "RTXPRO6000", "rtx-4090": "RTX4090"}
L2_BYTES = {
    "h100": 50e6,
    "h200": 50e6,
    "b200": 126e6,
    "a100": 40e6,
    "l40s": 96e6,
    "rtx-pro-6000": 128e6,
    "rtx-4090": 72e6,
}
DTYPES = {"bfloat16": "bfloat16", "fp8": "fp8", "fp8_static": "fp8", "fp8_block": "fp8_block", "nvfp4": "fp4"}
BLOCKS = "fp8_block"
"""Weights of 8 bits that are scaled in blocks."""
EXPERTS = {
    "h100": {
        "bfloat16": "unquantizedfusedmoe_triton",
        "fp8": "fp8moe_triton",
        "int4": "wna16marlin",
        "fp4": "gptossmxfp4moe_triton",
    },
    "b200": {
        "bfloat16": "unquantizedfusedmoe_flashinfer_trtllm",
        "fp8": "_fp8moe_flashinfer_trtllm_trtllmfp8expertsmonolithic",
        "int4": "wna16marlin",
        "fp4": "nvfp4expertsmonolithic",
    },
}
"""The kernels that vLLM chooses on these GPUs by default; 8-bit kernels are those for weights scaled in blocks, like
those of published models."""
SHARED_EXPERTS = {"a100": "h100", "l40s": "h100", "rtx-4090": "rtx-pro-6000"}
ROUTING = "power_law_1.01"
"""How unevenly the tables' tokens choose experts; real models are between an even choice and a power law of 1.2."""
MESSAGES = [2**power for power in (10, 12, 14, 16, 17, 18, 19, 20, 22, 24, 26, 28)]
LINKS = {"rtx-pro-6000": 17e9}
"""PCIe of the machine on which its layers were profiled: LLMServingSim states 16 GB/s, its recorded run of two ranks
shows 17.

AIConfigurator's table, measured on a server, has 35.
"""
LEAST_WEIGHTS = 2**23
"""A matrix of 4,096 x 2,048. Smaller ones matter little in a model worth a GPU, and use other kernels."""
HEAD = 128
Array = np.ndarray


class Fit(NamedTuple):
    """Coefficients, and their errors on rows that were not fitted."""

    coefficients: list[float]
    error: str


def fit(model: Callable[..., Array], ranges: list[tuple[float, float, float]], x: list[Array], y: Array) -> Fit:
    """Fit in log space on every other row, each coefficient from a start within a range (start, low, high)."""
    order = np.random.default_rng(0).permutation(len(y))
    train, test = order[::2], order[1::2]
    start, low, high = (np.array(column) for column in zip(*ranges, strict=True))

    def residual(c: Array) -> Array:
        return np.log(model(c, *(v[train] for v in x))) - np.log(y[train])

    scale = np.maximum(start, 1e-9)
    found = least_squares(residual, start, bounds=(low, high), loss="soft_l1", f_scale=0.1, x_scale=scale).x
    error = np.abs(model(found, *(v[test] for v in x)) / y[test] - 1) * 100
    return Fit([float(f"{v:.4g}") for v in found], f"{np.median(error):5.1f} {error.mean():5.1f}%  of {len(y):6} rows")


def seconds(table: pd.DataFrame) -> Array:
    """Return the measured times (s)."""
    return np.asarray(table["latency_us"].to_numpy(float) * 1e-6)


def smooth_maximum(compute: Array, memory: Array, sharpness: float) -> Array:
    """Return a smooth maximum, which is close to the larger value if one is much larger."""
    return np.asarray((compute**sharpness + memory**sharpness) ** (1 / sharpness))


GEMM = [(0.7, 0.1, 1.2), (0.8, 0.1, 1.2), (4e-6, 0, 1e-4), (1.5, 0.5, 8)]


def fit_gemm(work: Array, load: Array, y: Array) -> Fit:
    """Fit [compute, memory, launch_s, sharpness]; `work` and `load` are the times at the peaks (s)."""

    def model(c: Array, work: Array, load: Array) -> Array:
        return smooth_maximum(work / c[0], load / c[1], c[3]) + c[2]

    return fit(model, GEMM, [work, load], y)


def fit_quantised_gemm(work: Array, load: Array, passes: Array, y: Array) -> Fit:
    """Fit [compute, memory, launch_s, sharpness, quantise]; `passes` is the time of one pass over the inputs (s)."""

    def model(c: Array, work: Array, load: Array, passes: Array) -> Array:
        return smooth_maximum(work / c[0], load / c[1], c[3]) + c[2] + c[4] * passes

    return fit(model, [*GEMM, (2, 0, 20)], [work, load, passes], y)


def gemms(table: pd.DataFrame, gpu: dict[str, Any], fused: tuple[str, ...] = ("fp8",)) -> Iterator[tuple[str, Fit]]:
    """Fit each type of weight.

    When serving, quantising is fused into the previous kernel for some types, so the launch is the 16-bit one; for others
    (vLLM: 4 bits, and blocks), it needs its own kernel.
    """
    table = table[(table["n"] * table["k"] >= LEAST_WEIGHTS) & (table["m"] <= 16384)]
    bandwidth, launch_s = gpu["bandwidth"], 0.0
    for source, dtype in DTYPES.items():
        rows = table[table["gemm_dtype"] == source]
        if rows.empty:
            continue
        m, n, k = (rows[name].to_numpy(float) for name in "mnk")
        weight = PLAIN["fp8" if dtype == BLOCKS else dtype]
        work = 2 * m * n * k / gpu["flops"][weight.name]
        load = (n * k * weight.bytes + m * k * weight.bytes + m * n * 2) / bandwidth
        if dtype == "bfloat16":
            found, error = fit_gemm(work, load, seconds(rows))
            launch_s = found[2]
            found.append(0.0)
        else:
            passes = m * k * (2 + weight.bytes) / bandwidth
            found, error = fit_quantised_gemm(work, load, passes, seconds(rows))
            if dtype in fused:
                found[2] = launch_s
        yield dtype, Fit(found, error)


def full_attention(table: pd.DataFrame) -> pd.DataFrame:
    """Leave out windows and other head sizes."""
    table = table[table["head_dim"] == HEAD]
    return table[table["window_size"] == 0] if "window_size" in table else table


def fit_decode(size: Array, rows: Array, y: Array, *, l2: float, bandwidth: float, warm: Array) -> Fit:
    """Fit [memory, launch_s, row_s] where the KV does not fit the L2 cache: the cache is always cold when serving.

    A separate kernel also waits for its launch. In a step that overlaps, so `launch_s` is the median of the smallest
    kernels.
    """
    cold = size > 1.3 * l2

    def model(c: Array, size: Array, rows: Array) -> Array:
        return np.asarray(size / bandwidth / c[0] + c[1] + c[2] * rows)

    ranges = [(0.85, 0.2, 1.0), (1e-5, 0, 1e-4), (1e-8, 0, 1e-6)]
    (memory, _, row_s), error = fit(model, ranges, [size[cold], rows[cold]], y[cold])
    return Fit([memory, float(f"{np.median(y[warm]):.3g}"), row_s], error)


def decodes(table: pd.DataFrame, gpu: dict[str, Any], l2: float) -> Iterator[tuple[str, Fit]]:
    """Fit each type of KV cache."""
    for dtype, rows in full_attention(table).groupby("kv_cache_dtype"):
        batch, step, heads = (rows[name].to_numpy(float) for name in ("batch_size", "step", "num_key_value_heads"))
        size = 2 * batch * (step + 1) * heads * HEAD * PLAIN[str(dtype)].bytes
        warm = (batch <= 8) & (step < 128)
        found = fit_decode(size, batch * heads, seconds(rows), l2=l2, bandwidth=gpu["bandwidth"], warm=warm)
        yield str(dtype), found


def fit_prefill(table: pd.DataFrame, peak: float) -> Fit:
    """Fit [efficiency, pad, launch_s]: causal attention over new prompts, each padded by `pad` tokens."""
    rows = full_attention(table)
    rows = rows[(rows["isl"] >= 256) & (rows["kv_cache_dtype"] == "bfloat16")]
    batch, length, heads = (rows[name].to_numpy(float) for name in ("batch_size", "isl", "num_heads"))

    def model(c: Array, batch: Array, length: Array, heads: Array) -> Array:
        return np.asarray(4 * heads * HEAD * batch * (length**2 / 2 + c[1] * length) / peak / c[0] + c[2])

    ranges = [(0.5, 0.05, 1.2), (64, 0, 2000), (1e-5, 0, 1e-3)]
    return fit(model, ranges, [batch, length, heads], seconds(rows))


def fit_experts(table: pd.DataFrame, weight_bytes: float, peak: float, bandwidth: float) -> Fit:
    """Fit [compute, memory, launch_s, sharpness, spread, pad, passes, token_passes] of `mocker.timing.gpu.Experts`.

    Columns: num_tokens, routed (rows of all experts), num_experts, share (of the experts that a token chooses),
    hidden_size, weights (of one expert).
    """
    names = ("num_tokens", "routed", "num_experts", "share", "hidden_size", "weights")

    def model(
        c: Array, tokens: Array, routed: Array, experts: Array, share: Array, hidden: Array, weights: Array
    ) -> Array:
        active = experts * (1 - (1 - share) ** (tokens * c[4]))
        compute = 2 * np.maximum(routed, c[5] * active) * weights / (peak * c[0])
        memory = active * weights * weight_bytes / (bandwidth * c[1])
        moved = (c[6] * routed + c[7] * tokens) * hidden * 2 / bandwidth
        return smooth_maximum(compute, memory, c[3]) + c[2] + moved

    ranges = [
        (0.4, 0.02, 1.2),
        (0.9, 0.2, 1.3),
        (4e-5, 0, 3e-4),
        (1.0, 0.4, 8),
        (1.0, 0.3, 3),
        (2, 0.5, 64),
        (3, 0, 30),
        (10, 0, 100),
    ]
    return fit(model, ranges, [table[name].to_numpy(float) for name in names], seconds(table))


def fit_routed(table: pd.DataFrame, weight: WeightType, gpu: dict[str, Any]) -> Fit:
    """Fit a kernel of routed experts to its rows of a table."""
    table = table[table["distribution"] == ROUTING]
    table = table.assign(
        routed=table["num_tokens"] * table["topk"] / table["moe_ep_size"],
        share=table["topk"] / table["num_experts"],
        num_experts=table["num_experts"] / table["moe_ep_size"],
        weights=3 * table["hidden_size"] * table["inter_size"] / table["moe_tp_size"],
    )
    return fit_experts(table, weight.bytes, gpu["flops"].get(weight.name, gpu["flops"]["bfloat16"]), gpu["bandwidth"])


def all_reduces(table: pd.DataFrame) -> dict[str, list[list[float]]]:
    """Return [bytes, us] by number of GPUs, as measured in CUDA graphs; `message_size` counts elements of two bytes.

    A message takes no longer than a larger one, which engines could send instead.
    """
    table = table[table["backend"].str.contains("graph")]
    found = {}
    for count, rows in table.groupby("num_gpus"):
        rows = rows.sort_values("message_size")
        size, time = np.log(rows["message_size"] * 2.0), np.log(rows["latency_us"])
        times = np.minimum.accumulate(np.exp(np.interp(np.log(MESSAGES), size, time))[::-1])[::-1]
        found[str(count)] = [[size, round(float(time), 2)] for size, time in zip(MESSAGES, times, strict=True)]
    return found


def from_tables(name: str, gpu: dict[str, Any], folder: Path) -> Iterator[tuple[str, Fit]]:
    """Fit a GPU to its tables and store the coefficients."""

    def read(kind: str) -> pd.DataFrame:
        return pd.read_csv(next(folder.glob(f"{kind}*.csv.gz")))

    table = read("gemm")
    for dtype, found in gemms(table[table["gemm_dtype"] != BLOCKS], gpu):  # which it launches outside of CUDA graphs
        gpu["gemm"][dtype] = found.coefficients
        yield f"gemm {dtype}", found
    for dtype, found in decodes(read("generation"), gpu, L2_BYTES[name]):
        gpu["decode"][dtype] = found.coefficients
        yield f"decode {dtype}", found
    found = fit_prefill(read("context"), gpu["flops"]["bfloat16"])
    gpu["prefill"] = found.coefficients[:2]
    yield "prefill", found
    gpu["all_reduce"] = all_reduces(read("custom_allreduce"))
    if name in LINKS:
        for count, rows in gpu["all_reduce"].items():
            slow = over_link([(size, us * 1e-6) for size, us in rows], int(count), LINKS[name])
            gpu["all_reduce"][count] = [[size, round(time * 1e6, 2)] for size, time in slow]
    if name in EXPERTS:
        table = read("moe")
        for dtype, kernel in EXPERTS[name].items():
            found = fit_routed(table[table["kernel_source"].str.contains(kernel)], PLAIN[dtype], gpu)
            gpu["experts"][dtype] = found.coefficients
            yield f"experts {dtype}", found


PARTS = {"qkv_proj": "attention", "o_proj": "attention", "gate_up_proj": "ffn", "down_proj": "ffn"}


def layer_tables(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the multiplications (flops, bytes, latency_us) and the attention of all models profiled on a card.

    The matrices around attention are combined, and so are those of the FFN, as in `mocker.timing.parts`: each row is
    their mean.
    """
    gemm, attention = [], []
    for path in sorted(folder.glob("*/*/bf16/tp*")):
        model, tp = "/".join(path.relative_to(folder).parts[:2]), int(path.name[2:])
        shape = find_model(model)
        (mixer, _), (network, _) = next(shape.mixers), next(shape.feed_forwards)
        heads, kv_heads = mixer.num_heads / tp, mixer.num_kv_heads / tp
        queries = heads * mixer.head_dim
        sizes = {
            "qkv_proj": (shape.hidden_size, queries + 2 * kv_heads * mixer.head_dim),
            "o_proj": (queries, shape.hidden_size),
            "gate_up_proj": (shape.hidden_size, 2 * network.size / tp),
            "down_proj": (network.size / tp, shape.hidden_size),
        }
        dense = pd.read_csv(path / "dense.csv")
        dense = dense[dense["layer"].isin(sizes)]
        m = dense["tokens"]
        k, n = (pd.Series([sizes[layer][place] for layer in dense["layer"]], index=dense.index) for place in (0, 1))
        rows = pd.DataFrame(
            {"flops": 2 * m * n * k, "bytes": 2 * (n * k + m * k + m * n), "latency_us": dense["time_us"]}
        )
        gemm.append(rows.groupby([m, dense["layer"].map(PARTS)]).mean())
        rows = pd.read_csv(path / "attention.csv").rename(columns={"time_us": "latency_us"})
        attention.append(rows.assign(heads=heads, kv_heads=kv_heads))
    return pd.concat(gemm), pd.concat(attention)


def layer_experts(folder: Path) -> pd.DataFrame:
    """Return the profiled routed layers, for which the number of active experts is known."""
    found = []
    for path in sorted(folder.glob("*/*/bf16/tp1/moe.csv")):
        shape = find_model("/".join(path.relative_to(folder).parts[:2]))
        network, _ = next(shape.feed_forwards)
        table = pd.read_csv(path)
        found.append(
            pd.DataFrame(
                {
                    "num_tokens": table["tokens"],
                    "routed": table["tokens"] * network.experts_per_token,
                    "num_experts": table["activated_experts"],
                    "share": 1.0,
                    "hidden_size": shape.hidden_size,
                    "weights": network.expert_parameters,
                    "latency_us": table["time_us"],
                }
            )
        )
    return pd.concat(found) if found else pd.DataFrame()


def fit_mixed(table: pd.DataFrame, memory: float, l2: float, peak: float, bandwidth: float) -> Fit:
    """Fit [prefill, prefill_pad, mixed_decode_slowdown, mixed_row_s, mixed_tile_s, launch_s] of shared kernels.

    Prefill and decode share a kernel in mixed batches. Contexts have at most 4,096 tokens; their KV either
    does not fit the L2 cache or hardly matters.
    """
    table = table[(table["n_decode"] > 0) & (table["prefill_chunk"] > 0)]
    table = table[(table["kv_decode"] <= 4096) & (table["kv_prefill"] <= 4096)]
    size = 4 * table["n_decode"] * table["kv_decode"] * table["kv_heads"] * HEAD
    table = table[(size > 1.3 * l2) | (size < 0.3 * l2)]
    names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "heads", "kv_heads")
    new, past, batch, context, heads, kv_heads = (table[name].to_numpy(float) for name in names)
    read = batch * context * kv_heads * HEAD * 4 / bandwidth / memory

    def model(c: Array, pairs: Array, tokens: Array, group: Array, read: Array, rows: Array, tiles: Array) -> Array:
        alone = (pairs + c[1] * tokens) / peak / c[0] + c[5]
        return np.asarray(alone + np.maximum(1, c[2] * group) * read + c[3] * rows + c[4] * tiles)

    work = 4 * heads * HEAD
    x = [work * new * (past + new / 2), work * (new + past), heads / kv_heads, read, batch * kv_heads]
    x.append(batch * heads * new)
    ranges = [(0.6, 0.1, 1.3), (300, 0, 3000), (0.45, 0.1, 3), (7e-8, 0, 1e-6), (1e-11, 0, 1e-8), (1e-5, 0, 1e-4)]
    return fit(model, ranges, x, seconds(table))


def from_layers(name: str, gpu: dict[str, Any], folder: Path) -> Iterator[tuple[str, Fit]]:
    """Fit a card to the layers of real models profiled on it, alone and in mixed batches."""
    gemm, attention = layer_tables(folder)
    if name not in SYSTEMS:
        work, load = gemm["flops"] / gpu["flops"]["bfloat16"], gemm["bytes"] / gpu["bandwidth"]
        found = fit_gemm(work.to_numpy(), load.to_numpy(), seconds(gemm))
        gpu["gemm"]["bfloat16"] = [*found.coefficients, 0.0]
        yield "layers' gemm", found
    alone = attention[attention["prefill_chunk"] == 0]
    batch, context, heads = (alone[column].to_numpy(float) for column in ("n_decode", "kv_decode", "kv_heads"))
    size = 4 * batch * context * heads * HEAD
    warm = (batch <= 8) & (context <= 128)
    found = fit_decode(size, batch * heads, seconds(alone), l2=L2_BYTES[name], bandwidth=gpu["bandwidth"], warm=warm)
    gpu["decode"]["bfloat16"] = found.coefficients
    yield "layers' decode", found
    memory, peak = found.coefficients[0], gpu["flops"]["bfloat16"]
    found = fit_mixed(attention, memory, L2_BYTES[name], peak, gpu["bandwidth"])
    gpu["prefill"] = found.coefficients[:2]
    names = ("mixed_decode_slowdown", "mixed_row_s", "mixed_tile_s")
    gpu |= dict(zip(names, found.coefficients[2:-1], strict=True))
    yield "layers' mixed", found
    table = layer_experts(folder)
    if not table.empty:
        found = fit_experts(table, 2.0, gpu["flops"]["bfloat16"], gpu["bandwidth"])
        found.coefficients[4] = 1.0  # the rows do not determine it
        gpu["experts"]["bfloat16"] = found.coefficients
        yield "layers' experts", found


def written(value: Any, depth: int = 0) -> str:
    """Return the contents of a file, with a line for each fact."""
    if not isinstance(value, dict) or (depth > 1 and not _has_rows(value)):
        return json.dumps(value)
    inner = ",\n".join(
        f"{'  ' * (depth + 1)}{json.dumps(key)}: {written(item, depth + 1)}" for key, item in value.items()
    )
    return f"{{\n{inner}\n{'  ' * depth}}}" + ("" if depth else "\n")


def _has_rows(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, dict) and any(_has_rows(item) for item in value.values()))


def main() -> None:
    """Fit every GPU that has tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", type=Path)
    parser.add_argument("--layers", type=Path)
    parser.add_argument("--gpus", type=Path, default=Path("mocker/timing/data/gpus.json"))
    parser.add_argument("--write", action="store_true", help="put the coefficients into the file of GPUs")
    options = parser.parse_args()
    gpus = json.loads(options.gpus.read_text())
    print(f"{'':14}{'held-out error: median, mean':48}coefficients")
    for name, gpu in gpus.items():
        fits: list[tuple[str, Fit]] = []
        if name in SYSTEMS:
            fits += from_tables(name, gpu, options.kernels / SYSTEMS[name])
        if options.layers and name in LAYERS:
            fits += from_layers(name, gpu, options.layers / LAYERS[name])
        for kind, found in fits:
            print(f"{name:14}{kind:22}{found.error}   {found.coefficients}")
    for name, source in SHARED_EXPERTS.items():
        gpus[name]["experts"] = {dtype: gpus[source]["experts"][dtype] for dtype in gpus[name]["experts"]}
    if options.write:
        options.gpus.write_text(written(gpus))


if __name__ == "__main__":
    main()
