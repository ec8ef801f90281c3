"""Compare the roofline with published end-to-end points (InferenceX and NVIDIA, collected by AIConfigurator).

    python benchmarks/fidelity_points.py ../shared/perfdata/e2e_points.csv [--backend vllm] [--model Llama] [--csv OUT]

Each point is a closed loop of C requests at a time, 10 C in total, with lengths uniform from 80% to 100% of ISL and
OSL, as InferenceX sends them. Its figures are means over all requests, including the burst at the start. The constants
of mocker/timing/data/engines.json were fitted to every second of the dense vLLM points; the table shows the halves
separately.
"""

import argparse
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from joblib import Parallel, delayed
from matplotlib import pyplot as plt
from matplotlib.ticker import NullFormatter

from dynabench.arm import Run, Settings
from dynabench.deployment.description import Deployment, Pool
from dynabench.virtual.run import simulate
from mocker import EngineConfig
from mocker.timing.catalog import gpu_names
from mocker.timing.config import TimingConfig
from workloads import Request, Workload
from workloads.pacing import LoadConfig

MOST_REQUESTS = 2000
BLOCK = 1 << 20
"""Block size at which no two prompts share a block."""
BLACKWELL = ("b200", "b300", "gb200")


class Started(NamedTuple):
    """How the script of a benchmark starts its engine."""

    has_small_kv: bool
    async_scheduling: bool = True
    gpu_memory_utilization: float = 0.9
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 0
    """Set if it is more than the number of concurrent requests."""


def started(point: Any, gpu: str, is_quantized: bool) -> Started:
    """Return how an engine was started, according to the scripts of InferenceX at the time of the runs (up to 2026-04).

    Llama 70B ran on vLLM 0.11.0 with a file of settings: an 8-bit KV cache and asynchronous scheduling. On H100 the
    file was given as `--config=config.yaml`, which vLLM's parser ignores, because it looks for the separate word
    `--config`. (That was corrected on 2025-10-19 on a branch that was not merged before the model was dropped.) So the
    defaults of 0.11 apply there: a 16-bit cache and synchronous scheduling. TensorRT-LLM and SGLang overlap host and
    GPU by default, vLLM since 0.14.
    """
    if point.backend != "vllm":
        return Started(is_quantized)
    match point.model_path.rpartition("/")[2]:
        case "Llama-3.1-70B":
            is_plain = gpu == "h100"
            return Started(not is_plain, not is_plain, max_num_seqs=512 if gpu in BLACKWELL else 0)
        case "MiniMax-M2.5":
            is_first = point.backend_version == "0.17.0"
            return Started(not is_first, max_num_batched_tokens=8192 if is_first else 2 * int(point.isl))
        case "Kimi-K2.5":
            return Started(False, gpu_memory_utilization=0.9 if point.precision == "fp4" else 0.95)
        case "gpt-oss-120b":
            return Started(False)
    return Started(False, async_scheduling=False)  # NVIDIA's sweep on 0.12


def settings_of(point: Any, gpu: str) -> tuple[EngineConfig, TimingConfig]:
    """Return the engine of a point and its step times."""
    quantization = point.precision if point.precision in ("fp8", "fp4", "int4") else None
    if quantization is None and "FP8" in str(point.silicon_data_source):
        quantization = "fp8"
    script = started(point, gpu, quantization is not None)
    concurrency = int(point.concurrency)
    engine = EngineConfig(
        dp_size=int(point.attention_dp_size) if point.attention_dp_size > 1 else 1,
        block_size=16,
        max_num_seqs=max(script.max_num_seqs, concurrency),
        max_num_batched_tokens=max(script.max_num_batched_tokens, script.max_num_seqs, concurrency),
        enable_prefix_caching=False,
        async_scheduling=script.async_scheduling,
    )
    timing = TimingConfig(
        model=point.model_path,
        gpu=gpu,
        tensor_parallel_size=int(point.tp_size),
        enable_expert_parallel=bool(point.moe_ep_size > 1),
        quantization=quantization,
        kv_cache_dtype="fp8" if script.has_small_kv else "bfloat16",
        gpu_memory_utilization=script.gpu_memory_utilization,
        timed_as=point.backend,
    )
    return engine, timing


def workload_of(point: Any, count: int = 0) -> Workload:
    """Return the requests of a point, or a smaller number of them."""
    rng = random.Random(0)
    count = count or min(10 * int(point.concurrency), MOST_REQUESTS)

    def length(mean: float) -> int:
        return rng.randint(int(0.8 * mean), int(mean))

    return Workload(
        "point", BLOCK, [Request(0.0, length(point.isl), length(point.osl), (place,)) for place in range(count)]
    )


def predict(point: Any, gpu: str) -> tuple[float, float, str]:
    """Return mean TTFT and TPOT (ms), or the reason why there are none."""
    try:
        engine, timing = settings_of(point, gpu)
        load = LoadConfig(concurrency=int(point.concurrency))
        deployment = Deployment(pools=(Pool(replicas=1, mocker=engine, timing=timing),))
        run = simulate(Run.alone(Settings(deployment, load=load)), workload_of(point))
    except ValueError as error:
        return float("nan"), float("nan"), str(error)
    c = run.requests
    tpot = (c.last_token_s - c.first_token_s) / np.maximum(c.osl - 1, 1)
    return float((c.first_token_s - c.sent_s).mean() * 1e3), float(tpot.mean() * 1e3), ""


def predict_all(points: list[dict[str, Any]]) -> list[tuple[float, float, str]]:
    """Predict a share of the points in one process."""
    return [predict(argparse.Namespace(**point), point["gpu"]) for point in points]


def read(path: Path) -> pd.DataFrame:
    """Return the aggregated points on bundled GPUs."""
    table = pd.read_csv(path)
    table["concurrency"] = table.silicon_data_source.str.extract(r"silicon_concurrency=(\d+)").astype(float)
    table["gpu"] = table.system.str.removesuffix("_sxm")
    for name in ("attention_dp_size", "moe_ep_size"):
        table[name] = table[name].fillna(1)
    table["precision"] = table.precision.fillna("")
    return table[(table["mode"] == "agg") & table.gpu.isin(gpu_names()) & table.concurrency.notna() & (table.osl > 1)]


def mape(values: pd.Series) -> str:
    """Return mean and median absolute error and the mean error (%)."""
    values = values.dropna()
    return f"{values.abs().mean():6.1f} {values.abs().median():6.1f} {values.mean():+6.1f}"


def draw(table: pd.DataFrame, out: Path) -> None:
    """Draw predicted over measured TTFT and TPOT, with bands of 10%."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.6))
    for axes, name in zip(panels, ("tpot", "ttft"), strict=True):
        measured, predicted = table[f"silicon_{name}_ms"], table[name]
        edges = np.array([min(measured.min(), predicted.min()) * 0.8, max(measured.max(), predicted.max()) * 1.2])
        axes.fill_between(edges, edges * 0.9, edges * 1.1, color="0.9", label="within 10%")
        for (gpu, precision), rows in table.groupby(["gpu", "precision"]):
            axes.plot(rows[f"silicon_{name}_ms"], rows[name], "o", markersize=4, alpha=0.7, label=f"{gpu}, {precision}")
        axes.set(
            xscale="log", yscale="log", xlabel="measured (ms)", ylabel="predicted (ms)", title=f"mean {name.upper()}"
        )
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter(NullFormatter())
        axes.legend(fontsize=8)
    figure.suptitle("Llama 3.1 70B on vLLM, 4 to 64 requests at a time, 1 to 8 GPUs", fontsize=11)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def main() -> None:
    """Predict and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", type=Path)
    parser.add_argument("--backend", default="")
    parser.add_argument("--model", default="")
    parser.add_argument("--csv", type=Path, help="write every point with what was predicted")
    parser.add_argument("--chart", type=Path, help="write a picture of the dense vLLM points")
    options = parser.parse_args()
    table = read(options.points)
    table = table[table.backend.str.contains(options.backend) & table.model_path.str.contains(options.model)].copy()
    rows = list(table.itertuples(index=False, name=None))
    names = list(table.columns)
    shards = [[dict(zip(names, row, strict=True)) for row in rows[start::8]] for start in range(8)]
    parts = Parallel(n_jobs=2)(delayed(predict_all)(shard) for shard in shards)
    found: list[Any] = [None] * len(rows)
    for start, part in enumerate(parts):
        found[start::8] = part
    table["ttft"], table["tpot"], table["problem"] = zip(*found, strict=True)
    table["ttft_error"] = (table.ttft / table.silicon_ttft_ms - 1) * 100
    table["tpot_error"] = (table.tpot / table.silicon_tpot_ms - 1) * 100
    print(f"{'':64}{'n':>4}   TPOT: MAPE, median, bias    TTFT: MAPE, median, bias (%)")
    is_dense = (table.backend == "vllm") & table.model_path.str.contains("Llama")
    place = table[is_dense].groupby("gpu").cumcount()
    table["half"] = (place % 2).map({0: "fitted", 1: "other"})
    keys = ["backend", "model_path", "gpu", "precision"]
    for key, rows_of in [
        *table.groupby(keys),
        *((("dense vLLM", half, "", ""), part) for half, part in table[is_dense].groupby("half")),
        (("dense vLLM", "all", "", ""), table[is_dense]),
        (("all", "", "", ""), table),
    ]:
        done = rows_of[rows_of.problem == ""]
        label = " ".join(str(part) for part in key)
        print(f"{label:64}{len(done):4}   {mape(done.tpot_error)}        {mape(done.ttft_error)}")
    for problem, count in table[table.problem != ""].problem.value_counts().items():
        print(f"not predicted: {count} points: {problem}")
    if options.chart:
        draw(table[is_dense & (table.problem == "")], options.chart)
    if options.csv:
        table.to_csv(options.csv, index=False)


if __name__ == "__main__":
    main()
