"""Fit what engines add to their kernels (mocker/timing/data/engines.json) to published end-to-end points.

    python benchmarks/fit_engines.py ../shared/perfdata/e2e_points.csv            # print the times and errors of both halves
    python benchmarks/fit_engines.py ../shared/perfdata/e2e_points.csv --write    # write them too; four minutes

vLLM's times are fitted to every second dense point of an architecture; the other backends get vLLM's times and one scale for
each architecture, by the TPOT of every second of at most 16 points of each model, GPU and precision; of dense models, where
there are any. See benchmarks/fidelity_points.py for what a point is.

Not fitted here: host times of a step and a sequence (as in the recorded runs of RTX cards), what ranks exchange (chosen by
the recorded run of two), and the sizes up to which vLLM fuses all-reduces (its own settings).
"""

import argparse
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
from fidelity_points import predict, read
from fit_kernels import written
from joblib import Parallel, delayed
from scipy.optimize import minimize, minimize_scalar

from mocker.timing import catalog
from mocker.timing.choose import resolve

ENGINES = Path("mocker/timing/data/engines.json")
ARCHITECTURES = {"hopper": ("h100", "h200"), "blackwell": ("b200",)}
COMMON = {"layer_s": 2.5e-5, "request_s": 0.02}
START = {
    "hopper": COMMON | {"quantise": 0.15},
    "blackwell": COMMON
    | {"quantise": 1.8, "prefill_layer_s": 2.5e-4, "prefill_least_layer_s": 6.5e-4, "fused_all_reduce": 0.2},
}
TTFT_WEIGHT = 0.4
KINDS = ["model_path", "gpu", "precision"]
MOST_OF_A_KIND = 16
PARTS = 4
Engines = dict[str, dict[str, dict[str, Any]]]
Point = dict[str, Any]


def predict_with(engines: Engines, points: list[Point]) -> list[tuple[float, float]]:
    """Return (TTFT, TPOT) of some points (ms) with these engines."""
    read_file = catalog._read
    resolve.cache_clear()
    with patch.object(catalog, "_read", lambda name: engines if name == "engines" else read_file(name)):
        return [predict(argparse.Namespace(**point), point["gpu"])[:2] for point in points]


def log_errors(engines: Engines, points: list[Point]) -> np.ndarray:
    """Return log(predicted / measured) of TTFT and TPOT, for the points that can be predicted."""
    parts = Parallel(n_jobs=-1)(delayed(predict_with)(engines, points[start::PARTS]) for start in range(PARTS))
    found = np.empty((len(points), 2))
    for start, part in enumerate(parts):
        found[start::PARTS] = part
    real = np.array([(point["silicon_ttft_ms"], point["silicon_tpot_ms"]) for point in points])
    errors = np.log(found / real)
    return np.asarray(errors[~np.isnan(errors).any(axis=1)])


def loss(errors: np.ndarray) -> float:
    """Return the mean error, smooth at 0 and fair to points that nothing predicts."""
    smooth = np.sqrt(errors**2 + 0.01**2)
    return float(smooth[:, 1].mean() + TTFT_WEIGHT * smooth[:, 0].mean())


def told(name: str, points: list[Point], engines: Engines) -> None:
    """Print the errors."""
    ttft, tpot = (np.abs(np.expm1(log_errors(engines, points))) * 100).T
    print(
        f"{name:34}{len(tpot):4} points  TPOT {tpot.mean():5.1f} {np.median(tpot):5.1f}  "
        f"TTFT {ttft.mean():5.1f} {np.median(ttft):5.1f}  (mean and median error, %)",
        flush=True,
    )


def rows(table: pd.DataFrame) -> list[Point]:
    """Return points as they travel to other processes."""
    return [{str(key): value for key, value in row.items()} for row in table.to_dict("records")]


def fit_vllm(engines: Engines, architecture: str, points: list[Point]) -> None:
    """Find the times of one architecture, in logarithms."""
    start = START[architecture]
    own = engines["vllm"].setdefault(architecture, {})

    def put(logs: np.ndarray) -> None:
        for name, value, log in zip(start, start.values(), logs, strict=True):
            own[name] = float(f"{value * np.exp(log):.3g}")

    def objective(logs: np.ndarray) -> float:
        put(logs)
        return loss(log_errors(engines, points))

    simplex = np.vstack([np.zeros(len(start)), np.eye(len(start)) * 0.3])
    options = {"initial_simplex": simplex, "xatol": 0.02, "fatol": 2e-4, "maxfev": 60 * len(start)}
    put(minimize(objective, simplex[0], method="Nelder-Mead", options=options).x)


def fit_scale(engines: Engines, backend: str, architecture: str, points: list[Point]) -> None:
    """Find the scale of a backend's kernels, by TPOT; its other times are vLLM's."""
    own = engines[backend][architecture] = {}

    def objective(scale: float) -> float:
        own["scale"] = round(scale, 2)
        return float(np.abs(log_errors(engines, points)[:, 1]).mean())

    found = minimize_scalar(objective, bounds=(0.5, 2.0), method="bounded", options={"xatol": 0.01, "maxiter": 15})
    own["scale"] = round(float(found.x), 2)


def main() -> None:
    """Fit vLLM's times, then the scales."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", type=Path)
    parser.add_argument("--only-scales", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    table, engines = read(options.points), json.loads(ENGINES.read_text())
    for architecture, gpus in ARCHITECTURES.items():
        of_gpus = table[table.gpu.isin(gpus)]
        dense = rows(of_gpus[(of_gpus.backend == "vllm") & of_gpus.model_path.str.contains("Llama")])
        if not options.only_scales:
            fit_vllm(engines, architecture, dense[::2])
        times = engines["vllm"][architecture]
        print(f"vllm on {architecture}: {times}")
        told("  the half that chose them", dense[::2], engines)
        told("  the other half", dense[1::2], engines)
        for backend in ("trtllm", "sglang"):
            of_backend = of_gpus[of_gpus.backend == backend]
            is_dense = of_backend.model_path.str.contains("Llama")
            chosen = of_backend[is_dense] if is_dense.any() else of_backend  # whose kernels are known best
            groups = chosen.sample(frac=1, random_state=0).groupby(KINDS, dropna=False)
            points = rows(groups.head(MOST_OF_A_KIND))
            fit_scale(engines, backend, architecture, points[::2])
            print(f"{backend} on {architecture}: scale {engines[backend][architecture]['scale']}")
            told("  the half that chose it", points[::2], engines)
            told("  the other half", points[1::2], engines)
    if options.write:
        ENGINES.write_text(written(engines))


if __name__ == "__main__":
    main()
