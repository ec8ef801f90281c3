"""Compare the roofline with published end-to-end points (InferenceX and NVIDIA, collected by AIConfigurator).

    python benchmarks/fidelity_points.py ../shared/perfdata/e2e_points.csv [--backend vllm] [--model Llama] [--most 20]
    python benchmarks/fidelity_points.py ../shared/perfdata/e2e_points.csv --csv dynabench/experiment/published_points.csv

Each point is a closed loop of C requests at a time, 10 C in total. `recipes.py` says how the engines were started, and
which lengths were sent; `contradictions.py`, which rows do not count because they contradict others or repeat them.
The figures are means over all requests, including the burst at the start. The constants of
mocker/timing/data/engines.json were fitted to every second of some of the points (fit_engines.py); `splits.py` says
which. `dynabench/experiment/published_points.csv` has every point with its prediction, which
`tests/dynabench/test_published_points.py` computes again for some; `fidelity_page.py` makes tables and pictures of it.
"""

import argparse
import random
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from contradictions import doubts
from joblib import Parallel, delayed
from recipes import MEASURED_ON, moe_backend_of, pool_of, shortest_of
from splits import is_dense, rows, split_of

from dynabench.arm import Run, Settings
from dynabench.deployment.description import Deployment
from dynabench.virtual.run import simulate
from mocker.timing.catalog import gpu_names
from workloads import Request, Workload
from workloads.pacing import LoadConfig

MOST_REQUESTS = 2000
SAME_RUN = [
    *("backend", "system", "precision", "mode", "isl", "osl", "concurrency"),
    *("silicon_ttft_ms", "silicon_tpot_ms"),
]
"""Columns that rows of one run share: several files list it, DeepSeek-R1's also as V3's."""
TEXT = [
    *("silicon_data_source", "measured", "backend", "backend_version", "model_path", "system", "gpu", "precision"),
    "drafts",
    "moe_backend",
]
WHOLE = ["isl", "osl", "concurrency", "batch_size", "tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size"]
MEASURED = ["silicon_ttft_ms", "silicon_tpot_ms"]
PREDICTED = ["ttft", "tpot"]
SHARDS = 16
KEYS = ["backend", "model_path", "gpu", "precision"]
WITH_RANKS = "config_id=707;"
BLOCK = 1 << 20
"""Block size at which no two prompts share a block."""


def workload_of(point: Any, count: int = 0) -> Workload:
    """Return the requests of a point, or a smaller number of them."""
    rng = random.Random(0)
    shortest = shortest_of(point)
    count = count or min(10 * int(point.concurrency), MOST_REQUESTS)

    def length(mean: float) -> int:
        return rng.randint(int(shortest * mean), int(mean))

    return Workload(
        "point", BLOCK, [Request(0.0, length(point.isl), length(point.osl), (place,)) for place in range(count)]
    )


def predict(point: Any, gpu: str) -> tuple[float, float, str]:
    """Return mean TTFT and TPOT (ms), or the reason why there are none."""
    if point.drafts:
        return float("nan"), float("nan"), f"{point.backend}'s speculation (MTP) is not modelled"
    try:
        load = LoadConfig(concurrency=int(point.concurrency))
        deployment = Deployment(pools=(pool_of(point, gpu),))
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
    """Return the aggregated points on bundled GPUs, each run once."""
    table = pd.read_csv(path)
    table["concurrency"] = table.silicon_data_source.str.extract(r"silicon_concurrency=(\d+)").astype(float)
    table["gpu"] = table.system.str.removesuffix("_sxm")
    for name in ("moe_tp_size", "moe_ep_size"):
        table[name] = table[name].fillna(1)
    ranks = (table.moe_tp_size * table.moe_ep_size / table.tp_size).clip(lower=1)
    table["attention_dp_size"] = table.attention_dp_size.fillna(ranks)  # NVIDIA's sweep of Qwen3 235B leaves it out
    correct_layouts(table)
    table["precision"] = table.precision.fillna("")
    table["backend_version"] = table.backend_version.fillna("")
    table["measured"] = table.silicon_data_source.str.extract(MEASURED_ON)[0].fillna("")
    table["drafts"] = drafts(table)
    table = table[~table.duplicated(SAME_RUN)]
    return table[(table["mode"] == "agg") & table.gpu.isin(gpu_names()) & table.concurrency.notna() & (table.osl > 1)]


def correct_layouts(table: pd.DataFrame) -> None:
    """Correct rows that count GPUs twice: where the experts' two sizes are equal, one of them is already the other.

    InferenceX's "tp 8, ep 8" is 8 GPUs with whole experts on each, but in some files attention has 64 (8 times 8). 107 of
    the 269 rows are in another file, too, with the same figures and 8.

    vLLM's "tp 4, ep 4" is listed as 4 times 4 attention ranks on 16 GPUs. Its scripts start 4 GPUs with
    `--tensor-parallel-size=4` and, for MiniMax, `--enable-expert-parallel`; the configurations that ask for attention DP
    (`dp-attn`) are those of WITH_RANKS.
    """
    is_twice = (table.moe_tp_size == table.moe_ep_size) & (table.moe_ep_size > 1)
    for name in ("tp_size", "attention_dp_size"):
        is_large = is_twice & (table[name] > table.moe_ep_size)
        table.loc[is_large, name] /= table.loc[is_large, "moe_tp_size"]
    table.loc[is_twice, "moe_tp_size"] = 1.0
    is_square = (table.backend == "vllm") & (table.attention_dp_size > 1) & (table.tp_size == table.attention_dp_size)
    has_ranks = is_square & table.silicon_data_source.str.contains(WITH_RANKS)
    table.loc[is_square, "moe_ep_size"] = table.loc[is_square, "tp_size"]
    table.loc[has_ranks, "tp_size"] = 1.0
    table.loc[is_square & ~has_ranks, "attention_dp_size"] = 1.0


def drafts(table: pd.DataFrame) -> pd.Series:
    """Return which points ran with multi-token prediction, which no column says.

    InferenceX has a configuration with MTP and one without for each of these models. TensorRT-LLM's were run on other days
    or with another image. SGLang's DeepSeek-R1 in FP8 on B200 was run on the same day with the same image; the
    configurations without MTP have at most 64 requests at a time and are also in the dump of the database.
    """
    is_deepseek = table.model_path.str.contains("DeepSeek")
    is_trtllm = (table.backend == "trtllm") & is_deepseek
    is_new = (table.backend_version == "1.2.0rc6.post3") | (
        (table.backend_version == "1.1.0rc2.post2")
        & ((table.measured == "2026-01-14") | ((table.measured == "2026-01-28") & (table.attention_dp_size > 1)))
    )
    is_sglang = (table.backend == "sglang") & (table.gpu == "b200") & (table.precision == "fp8")
    is_dumped = table.silicon_data_source.str.contains("db-dump")
    figures = table.silicon_ttft_ms.round(3).astype(str) + "/" + table.silicon_tpot_ms.round(3).astype(str)
    is_plain = figures.isin(figures[is_sglang & is_deepseek & is_dumped])
    is_qwen = table.model_path.str.contains("Qwen3.5") & (table.tp_size == 4) & (table.moe_ep_size == 1)
    is_r1 = is_deepseek & (table.tp_size == 8) & (table.measured == "2026-03-25") & ~is_plain
    return (is_trtllm & is_new) | (is_sglang & (is_qwen | is_r1))


def mape(values: pd.Series) -> str:
    """Return mean and median absolute error and the mean error (%)."""
    values = values.dropna()
    return f"{values.abs().mean():6.1f} {values.abs().median():6.1f} {values.mean():+6.1f}"


def compact(table: pd.DataFrame) -> pd.DataFrame:
    """Return what the file of points says of each: where it is from, how it was run, what was measured and predicted."""
    source = table.silicon_data_source.str.replace(r".*/(aic-auto-gap-analysis/[^;]*).*", r"\1", regex=True)
    source = source.str.extract(r"^(?:source_file=)?([^;]*(?:; config_id=\d+)?)")[0]
    figures = {name: table[name].map(lambda value: f"{value:.4g}") for name in MEASURED + PREDICTED}
    whole = {name: table[name].astype(int) for name in WHOLE}
    kernels = [moe_backend_of(point, point.gpu) for point in table.itertuples()]
    found = table.assign(silicon_data_source=source + ";", moe_backend=kernels, **figures, **whole)
    return found[[*TEXT, *WHOLE, *MEASURED, *PREDICTED, "split", "problem"]]


def points_in(path: Path) -> pd.DataFrame:
    """Return the points of such a file."""
    return pd.read_csv(path, keep_default_na=False, na_values={name: ["nan"] for name in PREDICTED})


def summary(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Return the points that are predicted, by the rows of the page's tables."""
    done = table[table.problem == ""]
    dense = is_dense(done)
    is_held_out = done.split != "fitted"
    parts = [
        (f"dense on {backend}, {name}", done[dense & (done.backend == backend) & part])
        for backend in ("vllm", "trtllm")
        for name, part in (("fitted", ~is_held_out), ("all other points", is_held_out))
    ]
    parts += [
        (f"mixtures on {backend}, {name}", done[~dense & (done.backend == backend) & part])
        for backend in ("vllm", "sglang", "trtllm")
        for name, part in (("fitted", ~is_held_out), ("all other points", is_held_out))
    ]
    parts += [(" ".join(str(part) for part in key), rows_of) for key, rows_of in done.groupby(KEYS)]
    return [*((name, rows_of) for name, rows_of in parts if len(rows_of)), ("all", done)]


def gpus_of(point: Any) -> str:
    """Say how many GPUs an engine has."""
    count = int(point.tp_size * point.attention_dp_size)
    return "1 GPU" if count == 1 else f"{count} GPUs"


def main() -> None:
    """Predict and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", type=Path)
    parser.add_argument("--backend", default="")
    parser.add_argument("--model", default="")
    parser.add_argument("--most", type=int, default=0, help="most points of a row of the table, drawn at random")
    parser.add_argument("--csv", type=Path, help="write every point with what was predicted")
    options = parser.parse_args()
    if options.csv and (options.backend or options.model or options.most):
        parser.error("--csv writes every point; leave out --backend, --model and --most")
    table = read(options.points)
    table["split"] = split_of(table)
    table["model_path"] = table.model_path.str.replace("DeepSeek-V3", "DeepSeek-R1")  # which some files call V3
    table = table[table.backend.str.contains(options.backend) & table.model_path.str.contains(options.model)].copy()
    if options.most:
        table = table.loc[table.sample(frac=1, random_state=0).groupby(KEYS).head(options.most).index.sort_values()]
    points = rows(table)
    shards = [points[start::SHARDS] for start in range(SHARDS)]
    parts = Parallel(n_jobs=2)(delayed(predict_all)(shard) for shard in shards)
    found: list[Any] = [None] * len(points)
    for start, part in enumerate(parts):
        found[start::SHARDS] = part
    table["ttft"], table["tpot"], table["problem"] = zip(*found, strict=True)
    table["problem"] = table.problem.where(table.problem != "", doubts(table))
    if options.csv:
        compact(table).to_csv(options.csv, index=False)
    add_errors(table)
    print(f"{'':64}{'n':>4}   TPOT: MAPE, median, bias    TTFT: MAPE, median, bias (%)")
    for label, rows_of in summary(table):
        print(f"{label:64}{len(rows_of):4}   {mape(rows_of.tpot_error)}        {mape(rows_of.ttft_error)}")
    for problem, count in table[table.problem != ""].problem.value_counts().items():
        print(f"not predicted: {count} points: {problem}")


def add_errors(table: pd.DataFrame) -> None:
    """Add the errors of a prediction (%)."""
    for name in PREDICTED:
        table[f"{name}_error"] = (table[name] / table[f"silicon_{name}_ms"] - 1) * 100


if __name__ == "__main__":
    main()
