"""Compare the roofline with 38 runs of vLLM 0.15.1 that BLIS's authors measured, and with what others predict for them.

    python benchmarks/blis_runs.py [--csv]          # simulate what benchmarks/measured/blis_runs.csv describes; --csv writes it
    python benchmarks/blis_runs.py --read FOLDER    # make that file from a clone of the repository with the measurements

The repository is inference-sim/sim-to-real-accuracy-validation. `results_iter36/error_records.csv` at 7f3b270 has the
means that were measured and those of BLIS, Vidur, llm-optimizer and AIConfigurator 0.9; LLMServingSim 1.1's are in
`results/llmservingsim_error_records_matched.csv` at dcec3fd, for the first 300 requests of a run.

The requests are not published, but the profiles of inference-perf that made them are (`default_args/*/profile.yaml` of
inference-sim/training, seven of these runs): WORKLOADS. Each of few prompts is sent again and again at a constant rate,
so that after a few seconds the prefix cache has all of each but its last block. What is inferred:

- The rates of `general-lite`: "6 rps peak" is said, and 2.5 follows from the means of both stages and of all requests.
- The rate of `reasoning-lite`, one run: it is not said. It is taken to be 0.3 times that of `reasoning`, as the peak of
  `general-lite` is 0.3 times that of `general`; that the ITL agrees with it was seen first.
- How requests are sampled: they say nothing, so as `generation_config.json` of the model says (SAMPLED, from memory: the
  files are not here), at temperature 1 where it says nothing.

Their ITL is (E2E - TTFT) / (tokens - 1), where the tokens are those of the answer's text, tokenised again: 237 instead
of 248 for Llama 3.1 8B. Ours is divided by the same number. 8 GiB of host memory for KV, which some runs have, is not
simulated: no block is evicted.
"""

import argparse
import io
import subprocess
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from joblib import Parallel, delayed

from dynabench.arm import Run, Settings
from dynabench.deployment.description import Deployment, Pool
from dynabench.virtual.run import simulate
from mocker import EngineConfig
from mocker.timing.config import TimingConfig
from mocker.timing.sampling import Sampling
from workloads import Request, Workload
from workloads.pacing import LoadConfig

FILE = Path(__file__).with_name("measured") / "blis_runs.csv"
RECORDS = "7f3b270:results_iter36/error_records.csv"
OF_LLMSERVINGSIM = "dcec3fd:results/llmservingsim_error_records_matched.csv"
WHOLE_RUN = -1
"""Number of the stage that stands for all."""
METRICS = ("ttft", "itl", "e2e")
OURS = "dynabench"
REAL = "real"
OTHERS = {
    "blis-trained-physics": "blis",
    "blis-roofline": "blis_roofline",
    "llmservingsim": "llmservingsim",
    "vidur": "vidur",
    "aiconfigurator-estimate": "aiconfigurator",
    "llm-optimizer-estimate": "llm_optimizer",
}
"""Names of columns, by those of the repository."""
GPUS = {"H100": "h100", "A100-80GB": "a100", "L40S": "l40s"}
KEYS = {
    "exp_id": "run",
    "model": "model",
    "hardware": "gpu",
    "tp": "tp",
    "workload": "workload",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "gpu_mem_util": "gpu_memory_utilization",
    "cpu_offload": "host_kv",
}
MODELS = {
    "codellama/CodeLlama-34b-Instruct-hf": str(FILE.with_name("codellama-34b.json")),
    "mistralai/Mixtral-8x22B-Instruct-v0.1": "mistralai/Mixtral-8x22B-v0.1",
}
"""Models that are called otherwise here, or are not bundled."""
SAMPLED: dict[str, Sampling] = {
    "meta-llama/Llama-2-70b-hf": "top-p",
    "meta-llama/Llama-3.1-8B-Instruct": "top-p",
    "Qwen/Qwen3-14B": "top-p",
}
BLOCK = 16


class Prompts(NamedTuple):
    """What inference-perf sends: its prompts, and at which rates."""

    shared: int
    """Tokens that all prompts of a group begin with."""
    own: int
    """Tokens after those."""
    osl: int
    """Tokens of an answer, forced."""
    groups: int
    each: int
    """Prompts of a group."""
    stages: tuple[tuple[float, float], ...]
    """Requests per second, and how long (s)."""


WORKLOADS = {
    "general": Prompts(100, 447, 248, 9, 5, ((8, 600), (20, 600))),
    "general-lite": Prompts(100, 447, 248, 9, 5, ((2.5, 600), (6, 600))),
    "codegen": Prompts(100, 466, 247, 11, 4, ((5, 600), (10, 600))),
    "roleplay": Prompts(150, 600, 251, 10, 5, ((6, 1200),)),
    "reasoning": Prompts(100, 934, 1448, 23, 1, ((4, 1200),)),
    "reasoning-lite": Prompts(100, 934, 1448, 23, 1, ((1.2, 1200),)),
}


def read(folder: Path) -> pd.DataFrame:
    """Return what the repository says of each run: settings, measured means, and what others predict (ms)."""
    records = pd.concat([_csv(folder, RECORDS), _csv(folder, OF_LLMSERVINGSIM)])
    records = records[(records.simulator != "simulator") & (records.stage_index.astype(int) == WHOLE_RUN)]
    records["exp_id"] = records.exp_id.astype(float).astype(int)
    records = records[records.metric_name.isin([f"{metric}_mean" for metric in METRICS])]
    table = records[records.simulator == "blis-roofline"].drop_duplicates("exp_id").set_index("exp_id", drop=False)
    table = table[list(KEYS)].rename(columns=KEYS)
    table["gpu"] = table.gpu.map(GPUS)
    for metric in METRICS:
        of_metric = records[records.metric_name == f"{metric}_mean"].drop_duplicates(["simulator", "exp_id"])
        values = of_metric.pivot(index="exp_id", columns="simulator", values="predicted").astype(float)
        table[f"{REAL}_{metric}"] = of_metric.drop_duplicates("exp_id").set_index("exp_id").actual.astype(float)
        for name, column in OTHERS.items():
            table[f"{column}_{metric}"] = values[name]
    whole = ["tp", "max_num_batched_tokens"]
    return table.astype(dict.fromkeys(whole, int)).reset_index(drop=True).sort_values("run")


def _csv(folder: Path, place: str) -> pd.DataFrame:
    text = subprocess.run(["git", "-C", folder, "show", place], capture_output=True, text=True, check=True).stdout
    return pd.read_csv(io.StringIO(text), dtype=str)


def workload_of(prompts: Prompts) -> Workload:
    """Return the requests of a run: the prompts in turn, at a constant rate."""
    starts = [0.0, *accumulate(duration for _, duration in prompts.stages)]
    arrivals = [
        start + number / rate
        for start, (rate, duration) in zip(starts, prompts.stages, strict=False)
        for number in range(round(rate * duration))
    ]
    isl, count = prompts.shared + prompts.own, prompts.groups * prompts.each
    ids = [_blocks(prompts, number) for number in range(count)]
    requests = [Request(at, isl, prompts.osl, ids[number % count]) for number, at in enumerate(arrivals)]
    return Workload("run", BLOCK, requests)


def _blocks(prompts: Prompts, number: int) -> tuple[int, ...]:
    """Return the blocks of a prompt: negative ones for what its group begins with."""
    shared, total = prompts.shared // BLOCK, -(-(prompts.shared + prompts.own) // BLOCK)
    group = number % prompts.groups
    return (
        *(-1 - group * shared - block for block in range(shared)),
        *range(number * total, (number + 1) * total - shared),
    )


def predict(run: Any) -> dict[str, float]:
    """Return mean TTFT, ITL and E2E latency (ms) of a run as we simulate it."""
    engine = EngineConfig(
        block_size=BLOCK, max_num_seqs=128, max_num_batched_tokens=int(run.max_num_batched_tokens), max_model_len=4096
    )
    timing = TimingConfig(
        model=MODELS.get(run.model, run.model),
        gpu=run.gpu,
        tensor_parallel_size=int(run.tp),
        gpu_memory_utilization=float(run.gpu_memory_utilization),
        sampling=SAMPLED.get(run.model, "temperature"),
    )
    deployment = Deployment(pools=(Pool(mocker=engine, timing=timing),))
    found = simulate(Run.alone(Settings(deployment, load=LoadConfig())), workload_of(WORKLOADS[run.workload])).requests
    ttft, e2e = (found.first_token_s - found.sent_s).mean() * 1e3, (found.last_token_s - found.sent_s).mean() * 1e3
    num_gaps = (run.real_e2e - run.real_ttft) / run.real_itl
    return {"ttft": float(ttft), "itl": float((e2e - ttft) / num_gaps), "e2e": float(e2e)}


def predict_all(runs: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Predict runs on two cores."""
    return list(Parallel(n_jobs=2)(delayed(predict)(argparse.Namespace(**run)) for run in runs))


def add_ours(table: pd.DataFrame) -> None:
    """Simulate every run."""
    found = predict_all(table.to_dict("records"))
    for metric in METRICS:
        table[f"{OURS}_{metric}"] = [row[metric] for row in found]


def errors(table: pd.DataFrame, who: str) -> pd.DataFrame:
    """Return the errors of someone's predictions (%), by metric; NaN where there are none."""
    found = {metric: (table[f"{who}_{metric}"] / table[f"{REAL}_{metric}"] - 1) * 100 for metric in METRICS}
    return pd.DataFrame(found)


def worst_first(table: pd.DataFrame) -> pd.DataFrame:
    """Order runs by how much larger our mean error is than that of the best other simulator."""
    means = {who: errors(table, who).abs().mean(axis=1) for who in (OURS, *OTHERS.values())}
    lost = means.pop(OURS) - pd.DataFrame(means).min(axis=1)
    return table.loc[lost.sort_values(ascending=False).index]


def main() -> None:
    """Simulate and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--read", type=Path, metavar="FOLDER", help="clone of sim-to-real-accuracy-validation")
    parser.add_argument("--csv", action="store_true", help=f"write {FILE.name}")
    options = parser.parse_args()
    table = read(options.read) if options.read else pd.read_csv(FILE)
    add_ours(table)
    table = worst_first(table)
    if options.csv or options.read:
        table.to_csv(FILE, index=False, float_format="%.5g")
    print(errors(table, OURS).abs().describe().loc[["mean", "50%", "max"]].round(1))


if __name__ == "__main__":
    main()
