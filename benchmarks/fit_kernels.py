"""Fit the coefficients of mocker/data/gpus.json to tables of measured kernels (AIConfigurator's CSV, see docs/fidelity.md).

    python benchmarks/fit_kernels.py ../shared/perfdata            # print the coefficients and their held-out errors

Half of the rows are fitted in log space with a robust loss; the errors are of the other half.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

SYSTEMS = {
    "h100_sxm": "h100",
    "h200_sxm": "h200",
    "b200_sxm": "b200",
    "a100_sxm": "a100",
    "l40s": "l40s",
    "rtx_pro_6000_server": "rtx-pro-6000",
}
L2_BYTES = {"h100": 50e6, "h200": 50e6, "b200": 126e6, "a100": 40e6, "l40s": 96e6, "rtx-pro-6000": 128e6}
BYTES = {"bfloat16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "nvfp4": 0.5625}
NAMES = {"bfloat16": "bfloat16", "fp8": "fp8", "fp8_block": "fp8-block", "nvfp4": "fp4"}
Array = np.ndarray


def fit(model, start, low, high, x: list[Array], y: Array) -> tuple[list[float], dict[str, float]]:
    """Fit in log space on every other row; return the coefficients and the errors (%) on the rest."""
    order = np.random.default_rng(0).permutation(len(y))
    train, test = order[::2], order[1::2]

    def residual(c: Array) -> Array:
        return np.log(model(c, *(v[train] for v in x))) - np.log(y[train])

    found = least_squares(
        residual, start, bounds=(low, high), loss="soft_l1", f_scale=0.1, x_scale=np.maximum(np.abs(start), 1e-9)
    ).x
    error = np.abs(model(found, *(v[test] for v in x)) / y[test] - 1) * 100
    return [float(f"{v:.4g}") for v in found], {
        "median": round(float(np.median(error)), 1),
        "mean": round(float(error.mean()), 1),
        "rows": len(y),
    }


def fit_gemm(table: pd.DataFrame, flops: float, bandwidth: float, width: float, act: float):
    """Fit t = ((2mnk / (P ec))^p + (bytes / (BW em))^p)^(1/p) + c."""
    t = table[(table.n >= 512) & (table.k >= 512) & (table.m <= 16384)]
    m, n, k = (t[c].to_numpy(float) for c in "mnk")
    work, load = 2 * m * n * k / flops, (n * k * width + m * k * act + m * n * 2) / bandwidth

    def model(c, work, load):
        return ((work / c[0]) ** c[3] + (load / c[1]) ** c[3]) ** (1 / c[3]) + c[2]

    return fit(
        model,
        [0.7, 0.8, 4e-6, 1.5],
        [0.1, 0.1, 0, 0.5],
        [1.2, 1.2, 5e-5, 6],
        [work, load],
        t.latency_us.to_numpy() * 1e-6,
    )


def fit_decode(table: pd.DataFrame, bandwidth: float, l2: float, width: float):
    """Fit t = KV bytes / (BW e) + c0 + cb B Kv, for KV that does not fit the L2 cache: serving is always cold."""
    t = table[(table.head_dim == 128) & (table.get("window_size", 0) == 0)]
    size = 2.0 * t.batch_size * (t.step + 1) * t.num_key_value_heads * 128 * width
    t, size = t[size > 1.3 * l2], size[size > 1.3 * l2]
    rows = (t.batch_size * t.num_key_value_heads).to_numpy(float)

    def model(c, size, rows):
        return size / bandwidth / c[0] + c[1] + c[2] * rows

    return fit(
        model,
        [0.85, 1e-5, 1e-8],
        [0.2, 0, 0],
        [1.1, 1e-4, 1e-6],
        [size.to_numpy() / 1, rows],
        t.latency_us.to_numpy() * 1e-6,
    )


def fit_prefill(table: pd.DataFrame, flops: float):
    """Fit t = pairs 4 H d / (P e) + c: causal attention over new prompts."""
    t = table[(table.head_dim == 128) & (table.get("window_size", 0) == 0) & (table.isl >= 256)]
    work = 2.0 * t.batch_size * t.isl**2 * t.num_heads * 128 / flops

    def model(c, work):
        return work / c[0] + c[1]

    return fit(model, [0.5, 1e-5], [0.05, 0], [1.1, 1e-3], [work.to_numpy()], t.latency_us.to_numpy() * 1e-6)


def fit_all_reduce(table: pd.DataFrame):
    """Fit t = a + b n + 2 (n-1)/n bytes / bandwidth; `message_size` counts elements of two bytes."""
    t = table[table.backend.str.contains("graph")]
    n, size = t.num_gpus.to_numpy(float), t.message_size.to_numpy(float) * 2

    def model(c, n, size):
        return c[0] + c[1] * n + 2 * (n - 1) / n * size / c[2]

    return fit(model, [5e-6, 2e-7, 3e11], [0, 0, 1e9], [1e-3, 1e-5, 2e12], [n, size], t.latency_us.to_numpy() * 1e-6)


def main() -> None:
    """Fit every GPU that has tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--gpus", type=Path, default=Path("mocker/data/gpus.json"))
    arguments = parser.parse_args()
    gpus = json.loads(arguments.gpus.read_text())
    found: dict[str, dict] = {}
    for system, name in SYSTEMS.items():
        gpu, folder, out = gpus[name], arguments.data / "kernels" / system, found.setdefault(name, {})

        def read(kind: str, folder: Path = folder) -> pd.DataFrame:
            return pd.read_csv(next(folder.glob(f"{kind}*.csv.gz")))

        gemm, bandwidth = read("gemm"), gpu["bandwidth"]
        for dtype, rows in gemm.groupby("gemm_dtype"):
            if len(rows) > 1000:
                peak = gpu["flops"][NAMES[dtype].removesuffix("-block")]
                act = 2.0
                out[f"gemm {NAMES[dtype]}"] = fit_gemm(rows, peak, bandwidth, BYTES[dtype], act)
        decode, prefill = read("generation"), read("context")
        for dtype, rows in decode.groupby("kv_cache_dtype"):
            out[f"decode {dtype}"] = fit_decode(rows, bandwidth, L2_BYTES[name], BYTES[dtype])
        for dtype, rows in prefill.groupby("kv_cache_dtype"):
            out[f"prefill {dtype}"] = fit_prefill(rows, gpu["flops"]["bfloat16"])
        out["all-reduce"] = fit_all_reduce(read("custom_allreduce"))
        for key, (coefficients, errors) in out.items():
            print(f"{name:14}{key:18}{coefficients!s:48}{errors}")


if __name__ == "__main__":
    main()
