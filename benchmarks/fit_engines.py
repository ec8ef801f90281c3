"""Fit the overheads of engines (mocker/timing/data/engines.json) to published end-to-end points.

    python benchmarks/fit_engines.py ../shared/perfdata/e2e_points.csv           # print times and errors of both halves
    python benchmarks/fit_engines.py ../shared/perfdata/e2e_points.csv --write   # also write them; 5 minutes

vLLM's times are fitted to every second dense point, for both architectures together, because the engine's own work is
the same on both. H100 ran with synchronous scheduling and B200 with asynchronous, which separates host from GPU.
Prompts of 1 k and 8 k tokens do not separate the time of a request from the time to launch its kernels, so what a short
prompt spends outside the engine is that of other runs (short_prompts.py), and its parts are fitted once more
(`fit_outside`). The other backends get vLLM's times and a factor on their kernels for each architecture
(`fit_kernels`). These are fitted to every second of at most 40 points of each model, GPU and precision that have the
backend's own scheduler, of dense models if there are any. What launching the kernels of mixtures adds, without CUDA
graphs, is fitted for vLLM and TensorRT-LLM to TTFT of short prompts (`fit_mixtures`). benchmarks/fidelity_points.py
defines points.

Some values are not fitted here: the times of RTX cards are those of their recorded runs, which had no HTTP; the cost of
exchanges between ranks comes from the recorded run of two; and the sizes up to which vLLM fused all-reduces are the
runs'.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
from fidelity_points import predict, read
from fit_kernels import written
from joblib import Parallel, delayed
from scipy.optimize import least_squares
from splits import ARCHITECTURES, chosen, mixtures, rows

from mocker.timing import catalog
from mocker.timing.choose import resolve

ENGINES = Path("mocker/timing/data/engines.json")
COMMON = {"step_s": 9.2e-4, "sequence_s": 3.1e-5, "layer_s": 1.5e-5, "request_s": 0.011, "prompt_token_s": 5e-7}
START = {
    "hopper": {"quantise.fp8": 0.26},
    "blackwell": {"quantise.fp8": 2.4, "quantise.fp4": 6.0, "launch_layer_s": 9e-4, "fused_s": 6.5e-6},
}
OUTSIDE = {"prompt_token_s": 5e-6, "launch_layer_s": 9e-4}
SHORT_PROMPT, SHORT_S = 580, 7.54e-3
"""Tokens of a short prompt, and what it spends outside the engine (s): the time of a request, and of its tokens."""
SERVED = (*ARCHITECTURES, "ampere", "ada")
"""Architectures whose vLLM is behind its HTTP server: the time outside is the host's. RTX PRO was recorded without."""
TTFT_WEIGHT = 0.4
TIGHT = 0.03
"""Errors (logarithms) up to which the loss is quadratic; beyond, it is linear."""
PULL = 0.02
LAUNCHES = (0.0, 3e-3, 4e-3)
"""Tried, in seconds a layer."""
SHARES = tuple({"fp8": share, "fp4": share} for share in (0.0, 0.25, 0.5, 1.0))
TRIED = (0.0, 1e-3, 2e-3, 4e-3)
"""The same for vLLM's and TensorRT-LLM's mixtures, between which TTFT is interpolated."""
FINE_S = 5e-5
MOST_ERROR = 0.7
"""Errors (logarithms) beyond which a point counts no more: the first runs of SGLang in FP4 waited for seconds at any load."""
PARTS = 4
ROUNDS = 2
Engines = dict[str, dict[str, dict[str, Any]]]
Point = dict[str, Any]


def predict_with(engines: Engines, points: list[Point]) -> list[tuple[float, float]]:
    """Return (TTFT, TPOT) of some points (ms) with these engines."""
    read_file = catalog._read
    resolve.cache_clear()
    with patch.object(catalog, "_read", lambda name: engines if name == "engines" else read_file(name)):
        return [predict(argparse.Namespace(**point), point["gpu"])[:2] for point in points]


def log_errors(engines: Engines, points: list[Point]) -> np.ndarray:
    """Return log(predicted / measured) of TTFT and TPOT; NaN if a point cannot be predicted."""
    parts = Parallel(n_jobs=-1)(delayed(predict_with)(engines, points[start::PARTS]) for start in range(PARTS))
    found = np.empty((len(points), 2))
    for start, part in enumerate(parts):
        found[start::PARTS] = part
    real = np.array([(point["silicon_ttft_ms"], point["silicon_tpot_ms"]) for point in points])
    return np.asarray(np.log(found / real))


def told(name: str, points: list[Point], engines: Engines) -> None:
    """Print the errors."""
    errors = log_errors(engines, points)
    ttft, tpot = (np.abs(np.expm1(errors[~np.isnan(errors).any(axis=1)])) * 100).T
    print(
        f"{name:34}{len(tpot):4} points  TPOT {tpot.mean():5.1f} {np.median(tpot):5.1f}  "
        f"TTFT {ttft.mean():5.1f} {np.median(ttft):5.1f}  (mean and median error, %)",
        flush=True,
    )


def fitted(table: pd.DataFrame) -> list[Point]:
    """Return the half of vLLM's dense points that choose its times."""
    halves = [rows(chosen(table, "vllm", architecture))[::2] for architecture in ARCHITECTURES]
    return [point for points in halves for point in points]


def fit_vllm(engines: Engines, points: list[Point]) -> None:
    """Fit vLLM's times, in logarithms."""
    names = [(ARCHITECTURES, name) for name in COMMON]
    names += [((architecture,), name) for architecture, own in START.items() for name in own]
    start = np.array([*COMMON.values(), *(value for own in START.values() for value in own.values())])

    def put(logs: np.ndarray) -> None:
        for (architectures, name), value in zip(names, start * np.exp(logs - 1), strict=True):
            for architecture in architectures:
                own, (key, _, kind) = engines["vllm"].setdefault(architecture, {}), name.partition(".")
                into, key = (own.setdefault(key, {}), kind) if kind else (own, key)
                into[key] = float(f"{value:.3g}")

    def residuals(logs: np.ndarray) -> np.ndarray:
        put(logs)
        errors = np.nan_to_num(log_errors(engines, points)) * (TTFT_WEIGHT, 1.0)
        return np.concatenate([errors.ravel(), PULL * (logs - 1)])  # pull undetermined values to their start

    found = least_squares(residuals, np.ones(len(start)), diff_step=0.1, loss="soft_l1", f_scale=TIGHT, max_nfev=3)
    put(found.x)


def fit_outside(engines: Engines, points: list[Point]) -> None:
    """Fit what a prompt token adds outside the engine and what launching a layer takes on Blackwell, in logarithms.

    A request's own time is what they leave of SHORT_S.
    """
    start = np.array(list(OUTSIDE.values()))

    def put(logs: np.ndarray) -> None:
        token_s, launch_s = (float(f"{value:.3g}") for value in start * np.exp(logs - 1))
        request_s = float(f"{SHORT_S - SHORT_PROMPT * token_s:.3g}")
        for architecture in SERVED:
            engines["vllm"].setdefault(architecture, {}).update(request_s=request_s, prompt_token_s=token_s)
        engines["vllm"]["blackwell"]["launch_layer_s"] = launch_s

    def residuals(logs: np.ndarray) -> np.ndarray:
        put(logs)
        return (np.nan_to_num(log_errors(engines, points)) * (TTFT_WEIGHT, 1.0)).ravel()

    found = least_squares(residuals, np.ones(len(start)), diff_step=0.1, loss="soft_l1", f_scale=TIGHT, max_nfev=3)
    put(found.x)


def fit_kernels(engines: Engines, backend: str, architecture: str, points: list[Point]) -> None:
    """Fit the factor on a backend's kernels, from TPOT, and what only TTFT shows; its other times are vLLM's.

    If it has dense points, that is the share of quantising that other kernels do not hide. If it has only mixtures, it is
    the time to launch a layer's kernels in steps with prompts, and those with linear attention, whose kernels were not
    measured, do not count for the factor.
    """
    own = engines[backend][architecture]
    has_dense = bool(points) and "Llama" in points[0]["model_path"]
    is_known = np.array(["Qwen3.5" not in point["model_path"] for point in points])
    for _ in range(ROUNDS):
        tpot = log_errors(engines, points)[:, 1]
        own["scale"] = float(f"{own['scale'] * np.exp(-np.nanmedian(tpot[is_known])):.3g}")
        fit_ttft(own, *(("quantise", SHARES) if has_dense else ("launch_experts_s", LAUNCHES)), engines, points)


def fit_ttft(own: dict[str, Any], name: str, tried: Sequence[Any], engines: Engines, points: list[Point]) -> None:
    """Choose the value with the least mean error of TTFT."""
    errors = []
    for own[name] in tried:
        errors.append(np.nanmean(np.minimum(np.abs(log_errors(engines, points)[:, 0]), MOST_ERROR)))
    own[name] = tried[int(np.argmin(errors))]


def fit_mixtures(engines: Engines, backend: str, architecture: str, table: pd.DataFrame) -> None:
    """Fit what launching kernels adds in layers with experts, and with latent attention: the least mean error of TTFT.

    Models without latent attention tell the first, those with it the second. Each point is predicted at a few values, and
    its TTFT is interpolated between them.
    """
    own = engines[backend][architecture]
    is_latent = table.model_path.str.contains("DeepSeek|Kimi")
    for name, points in (("launch_experts_s", rows(table[~is_latent])), ("launch_latent_s", rows(table[is_latent]))):
        if not points:
            continue
        errors = []
        for launch_s in TRIED:
            own[name] = launch_s
            errors.append(log_errors(engines, points)[:, 0])
        fine = np.arange(0, TRIED[-1], FINE_S)
        found = np.array([np.interp(fine, TRIED, point) for point in np.transpose(errors)])
        own[name] = float(f"{fine[np.nanmean(np.minimum(np.abs(found), MOST_ERROR), axis=0).argmin()]:.3g}")


def fit_dense(engines: Engines, table: pd.DataFrame, backends: Sequence[str], only_scales: bool) -> None:
    """Fit vLLM's times, then the factors of the other backends, and print the errors of both halves."""
    if not only_scales:
        fit_vllm(engines, fitted(table))
        fit_outside(engines, fitted(table))
    for architecture in ARCHITECTURES:
        for backend in ("vllm", *backends):
            points = rows(chosen(table, backend, architecture))
            if backend != "vllm":
                fit_kernels(engines, backend, architecture, points[::2])
            print(f"{backend} on {architecture}: {engines[backend][architecture]}")
            told("  the half that chose them", points[::2], engines)
            told("  the other half", points[1::2], engines)
        print(flush=True)


def main() -> None:
    """Fit vLLM's times, then the scales, then what launching mixtures takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", type=Path)
    parser.add_argument("--only-scales", action="store_true")
    parser.add_argument("--only-mixtures", action="store_true")
    parser.add_argument("--only-outside", action="store_true", help="what short and long prompts spend outside vLLM")
    parser.add_argument("--backends", nargs="*", default=("trtllm", "sglang"), help="whose factors are fitted")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    table, engines = read(options.points), json.loads(ENGINES.read_text())
    if options.only_outside:
        fit_outside(engines, fitted(table))
        told("vllm, the half that chose them", fitted(table), engines)
    elif not options.only_mixtures:
        fit_dense(engines, table, options.backends, options.only_scales)
    for architecture in () if options.only_outside else ARCHITECTURES:
        for backend in ("vllm", "trtllm"):
            fit_mixtures(engines, backend, architecture, mixtures(table, backend, architecture)[0])
            print(f"{backend} on {architecture}: {engines[backend][architecture]}", flush=True)
    if options.write:
        ENGINES.write_text(written(engines))


if __name__ == "__main__":
    main()
