"""Find what short prompts spend outside vLLM 0.15.1, from runs on H100 that are not among those of blis_runs.py.

    python benchmarks/short_prompts.py      # reads benchmarks/measured/short_prompts.csv; half a minute

BLIS's authors published 15 runs that their coefficients were fitted to, and profiles and means of others. The file has
the mean TTFT and E2E latency of each stage of those that are not judged: from `results_trainval/error_records.csv` of
inference-sim/sim-to-real-accuracy-validation at dcec3fd (runs with a number), and from `default_args` of
inference-sim/training at 6236e9e. Their requests are those of blis_runs.py. The shapes of models are from memory, as is
how they sample.

The prefix cache has all of these prompts but their last block. So a TTFT is half a step, two steps, and what is outside.
The steps are ours, scaled by measured / simulated time of a token. What is outside is one time for all runs; with
5.7 us for each prompt token of it, or with 1 us, it is the same, because the prompts have 550 to 750 tokens.

Left out are `reasoning-lite`, whose rate is a guess, and a stage in which requests wait for one of 128 places. The
printed slope is the time that each running request adds. It is not modelled.
"""

import argparse
from pathlib import Path
from typing import Any

import blis_runs
import numpy as np
import pandas as pd
from joblib import Parallel, delayed
from scipy.optimize import least_squares

from dynabench.arm import Run, Settings
from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.overhead import OverheadConfig
from dynabench.virtual.run import simulate
from mocker import EngineConfig
from mocker.timing.config import TimingConfig
from workloads.pacing import LoadConfig

FILE = Path(__file__).with_name("measured") / "short_prompts.csv"
RUN = ["run", "model", "tp", "workload", "max_num_batched_tokens", "sampling", "quantization"]
GUESSED = "reasoning-lite"
MOST_RUNNING = 100
"""Stages with more requests at a time are left out: some of them wait."""
TIGHT = 0.03
"""Errors (logarithms) up to which the loss is quadratic; beyond, it is linear."""


def engine_times(run: Any) -> list[tuple[float, float]]:
    """Return, for each stage of a run, the mean TTFT and the mean time of the other tokens (ms), with nothing outside."""
    config = FILE.parent / f"{run.model}.json"
    engine = EngineConfig(
        block_size=blis_runs.BLOCK,
        max_num_seqs=128,
        max_num_batched_tokens=run.max_num_batched_tokens,
        max_model_len=4096,
    )
    timing = TimingConfig(
        model=str(config) if config.is_file() else run.model,
        gpu="h100",
        tensor_parallel_size=run.tp,
        gpu_memory_utilization=0.9,
        sampling=run.sampling,
        quantization=run.quantization or None,
    )
    nothing = OverheadConfig(request_overhead_ms=0, prompt_overhead_us=0)
    deployment = Deployment(pools=(Pool(mocker=engine, timing=timing),), overhead=nothing)
    prompts = blis_runs.WORKLOADS[run.workload]
    found = simulate(Run.alone(Settings(deployment, load=LoadConfig())), blis_runs.workload_of(prompts)).requests
    stages = np.searchsorted(np.cumsum([duration for _, duration in prompts.stages]), found.sent_s, side="right")
    parts = [stages == stage for stage in range(len(prompts.stages))]
    ttft, rest = found.first_token_s - found.sent_s, found.last_token_s - found.first_token_s
    return [(float(ttft[part].mean() * 1e3), float(rest[part].mean() * 1e3)) for part in parts]


def read() -> pd.DataFrame:
    """Return the stages that are used, with the time that their requests are in the engine until the first token (ms)."""
    table = pd.read_csv(FILE, keep_default_na=False)
    runs = table[RUN].drop_duplicates()
    found = Parallel(n_jobs=2)(delayed(engine_times)(argparse.Namespace(**run)) for run in runs.to_dict("records"))
    times = {
        (*key, stage): time
        for key, stages in zip(runs.itertuples(index=False, name=None), found, strict=True)
        for stage, time in enumerate(stages)
    }
    ttft, rest = np.transpose([times[key] for key in table[[*RUN, "stage"]].itertuples(index=False, name=None)])
    prompts = [blis_runs.WORKLOADS[name] for name in table.workload]
    rates = [prompt.stages[stage][0] for prompt, stage in zip(prompts, table.stage, strict=True)]
    table["engine_ttft"] = ttft * (table.real_e2e - table.real_ttft) / rest
    table["tokens"] = [prompt.shared + prompt.own for prompt in prompts]
    table["running"] = rates * table.real_e2e / 1e3
    return table[(table.workload != GUESSED) & (table.running <= MOST_RUNNING)]


def outside(table: pd.DataFrame, columns: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the coefficients of what is outside (ms), and the mean error of TTFT with them (%)."""

    def errors(values: np.ndarray) -> np.ndarray:
        return np.log((table.engine_ttft + columns @ values) / table.real_ttft)

    found = least_squares(errors, np.ones(columns.shape[1]), loss="soft_l1", f_scale=TIGHT).x
    return found, float(np.abs(np.expm1(errors(found))).mean() * 100)


def main() -> None:
    """Print the time outside the engine, alone and with a part for each running request."""
    table = read()
    ones = np.ones(len(table))
    (request_ms,), error = outside(table, ones[:, None])
    print(f"{len(table)} stages, {table.tokens.mean():.0f} tokens a prompt: {request_ms:.2f} ms ({error:.1f}% off)")
    (request_ms, slope), error = outside(table, np.column_stack([ones, table.running]))
    print(f"with a slope: {request_ms:.2f} ms + {slope:.3f} ms for each running request ({error:.1f}% off)")


if __name__ == "__main__":
    main()
