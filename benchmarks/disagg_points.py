"""Compare disaggregation with published end-to-end points (InferenceX and NVIDIA, collected by AIConfigurator).

    python benchmarks/disagg_points.py ../shared/perfdata/e2e_points.csv [--backend vllm] [--most 4096] [--csv OUT]

Each point is a closed loop of C requests at a time, 10 C in total, as in fidelity_points.py, and its figures are means
over all of them. Only 3 C are simulated: the first C include the burst at the start, the last C the end, and those in
between represent 8 C. Points with the same model, engine, GPU, precision, lengths and layout of both pools form a
configuration. There are three predictions:

    half     in each configuration with three concurrencies or more, fit every second one: a table of decode steps and,
             from its TTFT, the time of a prompt; predict the others
    lines    the same without a simulation, for comparison: lines through the fitted points, both axes logarithmic
    blind    fit nothing: the bundled roofline, 20 GB/s per GPU for the KV; up to --most requests at a time, because
             more take a minute or longer for each point
"""

import argparse
import csv
import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from fidelity_points import workload_of
from recipes import CHECKPOINTS, MEASURED_ON, started

from dynabench.arm import Run, Settings
from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.overhead import OverheadConfig
from dynabench.virtual.run import simulate
from mocker import EngineConfig
from mocker.network.config import TransferConfig
from mocker.timing.catalog import gpu_names
from mocker.timing.config import TimingConfig
from mocker.timing.files import COLUMNS
from serving.life import DisaggregationConfig
from workloads import Workload
from workloads.pacing import LoadConfig

WAVES, ALL_WAVES, FEWEST_REQUESTS = 3, 10, 100
BLOCK_SIZE = 16
STAND_IN = {"gb200": "b200", "gb300": "b200"}
"""GPUs that are not bundled, and the most similar bundled one; its memory for KV is not used."""
LENGTH = 0.9
"""Mean length, as a share of ISL and OSL."""
FREE = TransferConfig(bandwidth_gb_s=0, latency_ms=0.0)
ROLES = ("prefill", "decode")
LAYOUT = [f"{role}_{part}" for role in ROLES for part in ("num_workers", "tp_size", "attention_dp_size", "moe_ep_size")]
CONFIGURATION = ["backend", "model_path", "gpu", "precision", "isl", "osl", *LAYOUT]
NUM_WORST = 8
NAMED = (
    "Qwen3-32B",
    "DeepSeek-V3 fp8, trtllm, h200, 1024/1024, 1 x TP8",
    "DeepSeek-V3 fp8, sglang, h200",
    "DeepSeek-V3 fp4, sglang, gb300, 1024/1024, 4 x DP4",
    "DeepSeek-V3 fp8, sglang, gb300, 8192/1024, 5 x DP8",
    "Kimi-K2.5",
)
LEAST_SHARE = 256
"""Requests at a time below which a fitted deployment is simulated without dividing it."""
GRID = np.geomspace(0.005, 1.0, 60)
"""Prompt times to try, as shares of the lowest known TTFT."""


def read(path: Path) -> tuple[pd.DataFrame, Counter[str]]:
    """Return the points with known numbers of workers, and how many were dropped for each reason.

    If a point has no concurrency, it is computed from the batch on each decode rank, as for all other points.
    """
    table = pd.read_csv(path)
    table = table[table["mode"] == "disagg"].copy()
    table["gpu"] = table.system.str.removesuffix("_sxm")
    table["precision"] = table.precision.fillna("")
    is_counted = table.prefill_num_workers.notna() & table.decode_num_workers.notna()
    is_known = table.gpu.isin([*gpu_names(), *STAND_IN])
    reasons = np.select([~is_counted, ~is_known], ["numbers of workers not given", "GPU not known"], "")
    kept = table[reasons == ""].copy()
    kept[LAYOUT] = kept[LAYOUT].clip(lower=1).astype(int)
    given = kept.silicon_data_source.str.extract(r"silicon_concurrency=(\d+)")[0].astype(float)
    batches = kept.decode_batch_size * kept.decode_num_workers * kept.decode_attention_dp_size
    kept["measured"] = kept.silicon_data_source.str.extract(MEASURED_ON)[0].fillna("")
    kept["concurrency"] = given.fillna(batches).astype(int)
    return kept.reset_index(drop=True), Counter(reasons[reasons != ""].tolist())


class Answer(NamedTuple):
    """The result of a simulation for a point."""

    ttft_ms: float
    tpot_ms: float
    problem: str = ""


def mean_of_waves(values: Any, concurrency: int) -> float:
    """Return the mean over all waves, given the values of some of them."""
    first, last = np.mean(values[:concurrency]), np.mean(values[-concurrency:])
    return float((first + (ALL_WAVES - 2) * np.mean(values[concurrency:-concurrency]) + last) / ALL_WAVES)


def requests_of(point: Any) -> Workload:
    """Return the first requests of a point."""
    most = ALL_WAVES * point.concurrency
    return workload_of(point, min(most, max(WAVES * point.concurrency, FEWEST_REQUESTS)))


def act_out(point: Any, deployment: Deployment) -> Answer:
    """Simulate a closed loop."""
    plan = Run.alone(Settings(deployment, load=LoadConfig(concurrency=point.concurrency)))
    c = simulate(plan, requests_of(point)).requests
    tpot = (c.last_token_s - c.first_token_s) / np.maximum(c.osl - 1, 1)
    order = np.argsort(c.sent_s, kind="stable")
    ttft, tpot = (np.asarray(values)[order] for values in (c.first_token_s - c.sent_s, tpot))
    return Answer(*(mean_of_waves(values, point.concurrency) * 1e3 for values in (ttft, tpot)))


def deployed(point: Any, pools: Sequence[Pool], **settings: Any) -> Deployment:
    """Combine pools like the engine: vLLM computes the prompt first, the others reserve its KV blocks first."""
    flow = "source-first" if point.backend == "vllm" else "destination-first"
    return Deployment(pools=tuple(pools), disaggregation=DisaggregationConfig(flow=flow), **settings)


def predict_blind(point: Any, most: int) -> Answer:
    """Predict a point of at most `most` requests at a time from its settings alone."""
    if point.concurrency > most:
        return Answer(float("nan"), float("nan"), f"more than {most} requests at a time")
    try:
        return act_out(point, deployed(point, [roofline_pool(point, role) for role in ROLES]))
    except ValueError as error:
        return Answer(float("nan"), float("nan"), str(error).partition(";")[0])


def roofline_pool(point: Any, role: str) -> Pool:
    """Return the pool of a configuration; if attention has ranks, each GPU has whole experts."""
    replicas, tp, ranks, experts = (getattr(point, name) for name in LAYOUT if name.startswith(role))
    gpu = STAND_IN.get(point.gpu, point.gpu)
    script = started(point, gpu)
    most = max(256, 2 * -(-point.concurrency // (replicas * ranks)))
    engine = EngineConfig(
        dp_size=ranks,
        block_size=BLOCK_SIZE,
        num_gpu_blocks=None if gpu == point.gpu else enough_blocks(point),
        max_num_seqs=most if role == "decode" else 256,
        max_num_batched_tokens=max(8192, int(point.isl), most),
        enable_prefix_caching=False,
        async_scheduling=script.async_scheduling,
    )
    timing = TimingConfig(
        model=CHECKPOINTS.get((point.model_path, point.precision), point.model_path),
        gpu=gpu,
        tensor_parallel_size=tp,
        enable_expert_parallel=experts > 1 or ranks > 1,
        quantization=point.precision if "Llama" in point.model_path else None,
        kv_cache_dtype="fp8" if script.has_small_kv else "bfloat16",
        timed_as=point.backend,
    )
    return Pool(name=role, role=role, replicas=replicas, mocker=engine, timing=timing)


def enough_blocks(point: Any) -> int:
    """Return enough KV blocks for all requests at once."""
    return point.concurrency * (-(-int(point.isl + point.osl) // BLOCK_SIZE) + 1) + 2


class Fitted(NamedTuple):
    """What some points of a configuration reveal about it."""

    steps: dict[int, float]
    """The time of a step (s), by the number of sequences that decode together on a worker."""
    prompt_s: float
    """Time of a prompt of mean length (s)."""
    delay_s: float
    """Other delays before a first token (s)."""


def fit(points: Sequence[Any]) -> Fitted:
    """Determine a configuration's times from some of its points.

    By Little's law, the share of the C requests that are in the decode pool equals decode's share of the total time. No
    line is fitted to the steps, because those of a mixture of experts rise steeply until all experts are in use, and
    slowly then. TTFT is a queue of prompts at each prefill rank, which remains after the burst, or if prefill is the
    limit; the prompt time is found by trial.
    """
    steps: dict[int, float] = {}
    for point in points:
        decode_s = point.silicon_tpot_ms * (LENGTH * point.osl - 1)
        share = decode_s / (decode_s + point.silicon_ttft_ms)
        steps[max(round(point.concurrency * share / point.decode_num_workers), 1)] = point.silicon_tpot_ms / 1e3
    real = np.array([point.silicon_ttft_ms / 1e3 for point in points])
    tried = []
    for prompt_s in GRID * real.min():
        queued = np.array([queue(point, prompt_s) for point in points])
        delay_s = max(0.0, np.sum((1 - queued / real) / real) / np.sum(real**-2.0))
        tried.append((np.sum(((queued + delay_s) / real - 1) ** 2), prompt_s, delay_s))
    _, prompt_s, delay_s = min(tried)
    return Fitted(dict(sorted(steps.items())), float(prompt_s), float(delay_s))


def share(point: Any) -> tuple[Any, int]:
    """Return a part of the deployment and how many such parts there are: prefill ranks are alike and take turns."""
    ranks = point.prefill_num_workers * point.prefill_attention_dp_size
    counts = [n for n in range(1, ranks + 1) if ranks % n == point.concurrency % n == 0]
    count = max([n for n in counts if point.concurrency // n >= LEAST_SHARE], default=1)
    part = {"prefill_num_workers": ranks // count, "concurrency": point.concurrency // count}
    return point._replace(**part, prefill_attention_dp_size=1), count


def queue(point: Any, prompt_s: float) -> float:
    """Return the mean TTFT (s) of a point if only prompts took time, one after another at each prefill rank in turn."""
    point, _ = share(point)
    step_s = point.silicon_tpot_ms / 1e3
    free_s = [0.0] * point.prefill_num_workers
    ready = [0.0] * point.concurrency
    waited = []
    for number, request in enumerate(requests_of(point).requests):
        sent_s, rank = ready[0], number % len(free_s)
        end_s = max(sent_s, free_s[rank]) + prompt_s * request.input_length / (LENGTH * point.isl)
        free_s[rank] = end_s
        end_s += step_s if point.backend == "vllm" else 0.0  # the decode worker sends token 1
        waited.append(end_s - sent_s)
        heapq.heapreplace(ready, end_s + step_s * (request.output_length - 1))
    return mean_of_waves(waited, point.concurrency)


def predict_from(fitted: Fitted, point: Any) -> Answer:
    """Predict a point of a fitted configuration; the ranks of a decode worker count as one batch here."""
    point, num_shares = share(point)
    least = min(fitted.steps.values())
    steps = {max(round(count / num_shares), 1): step_s for count, step_s in fitted.steps.items()}
    decodes = [(0, count, count, step_s * 1e3) for count, step_s in steps.items()]
    prompt_ms, num_tokens = fitted.prompt_s * 1e3, LENGTH * point.isl
    files = {
        "prefill": [(num_tokens / 1e3, 0, 0, prompt_ms / 1e3), (num_tokens, 0, 0, prompt_ms), decodes[0]],
        "decode": [(1, 0, 0, least * 1e3), *decodes],  # the last token of a prompt counts as a decode
    }
    with TemporaryDirectory() as folder:
        pools = []
        for role, rows in files.items():
            path = Path(folder, f"{role}.csv")
            with path.open("w", newline="") as file:
                csv.writer(file).writerows([COLUMNS, *rows])
            engine = EngineConfig(
                block_size=BLOCK_SIZE,
                num_gpu_blocks=enough_blocks(point),
                max_num_seqs=1 if role == "prefill" else point.concurrency,
                max_num_batched_tokens=max(8192, int(point.isl), point.concurrency),
                enable_prefix_caching=False,
            )
            replicas = getattr(point, f"{role}_num_workers")
            timing = TimingConfig(timing_file=str(path))
            pools.append(Pool(name=role, role=role, replicas=replicas, mocker=engine, timing=timing))
        overhead = OverheadConfig(request_overhead_ms=fitted.delay_s * 1e3)
        return act_out(point, deployed(point, pools, overhead=overhead, transfer=FREE))


def draw_lines(known: Sequence[Any], point: Any) -> Answer:
    """Predict a point from the two nearest fitted ones, on a line of log(TTFT), or of log(TPOT), over log(C)."""
    places, firsts = np.unique(np.log([other.concurrency for other in known]), return_index=True)
    values = np.log([(known[first].silicon_ttft_ms, known[first].silicon_tpot_ms) for first in firsts])
    place = np.log(point.concurrency)
    right = min(max(int(np.searchsorted(places, place)), 1), len(places) - 1)
    share_of_way = (place - places[right - 1]) / (places[right] - places[right - 1])
    ttft, tpot = np.exp(values[right - 1] + share_of_way * (values[right] - values[right - 1]))
    return Answer(float(ttft), float(tpot))


def halves(table: pd.DataFrame) -> Iterator[tuple[list[Any], list[Any]]]:
    """Yield the fitted points and the others of each configuration with enough concurrencies."""
    for _, rows in table.groupby(CONFIGURATION):
        known = sorted(set(rows.concurrency))
        if len(known) >= 3:
            is_fitted = rows.concurrency.isin(known[::2])
            yield list(rows[is_fitted].itertuples()), list(rows[~is_fitted].itertuples())


def compared(table: pd.DataFrame, answers: dict[int, Answer]) -> pd.DataFrame:
    """Join predictions with measurements, and add their errors (%)."""
    found = pd.DataFrame(answers.values(), index=list(answers), columns=Answer._fields)
    joined = table.join(found, how="inner")
    for name in ("ttft", "tpot"):
        joined[f"{name}_error"] = (joined[f"{name}_ms"] / joined[f"silicon_{name}_ms"] - 1) * 100
    return joined


def spread(errors: pd.Series) -> str:
    """Return the median and the 90th percentile of absolute errors, and the median error (%)."""
    size = errors.abs()
    return f"{size.median():.1f} / {size.quantile(0.9):.1f} / {errors.median():+.1f}"


def setting(point: Any) -> str:
    """Name a configuration, its prefill workers first; DP-TP: ranks of attention over slices of experts."""
    sides = []
    for role in ROLES:
        replicas, tp, ranks, experts = (getattr(point, name) for name in LAYOUT if name.startswith(role))
        kind = "DP" if experts > 1 else "DP-TP"
        sides.append(f"{replicas} x {f'{kind}{ranks}' if ranks > 1 else f'TP{tp}'}")
    model = point.model_path.rpartition("/")[2]
    lengths = f"{int(point.isl)}/{int(point.osl)}"
    return f"{model} {point.precision}, {point.backend}, {point.gpu}, {lengths}, {' + '.join(sides)}"


def told(point: Any) -> str:
    """Format the prediction for a point, with its errors."""
    if point.problem:
        return "no"
    return f"{point.ttft_ms:,.0f} ({point.ttft_error:+.0f}%), {point.tpot_ms:.1f} ({point.tpot_error:+.0f}%)"


def show(title: str, table: pd.DataFrame) -> None:
    """Print the errors of each engine and GPU, the worst points, and the errors of all by configuration."""
    done = table[table.problem == ""]
    print(f"\n### {title}\n")
    print("| points | n | TTFT: median, p90, bias (%) | TPOT: median, p90, bias (%) |\n|---|---|---|---|")
    groups = [(" ".join(key), rows) for key, rows in done.groupby(["backend", "gpu"])]
    for name, rows in [*groups, ("all", done)]:
        print(f"| {name} | {len(rows)} | {spread(rows.ttft_error)} | {spread(rows.tpot_error)} |")
    for problem, count in table[table.problem != ""].problem.value_counts().items():
        print(f"\nnot predicted: {count} points: {problem}")
    print("\n| worst | C | measured TTFT, TPOT (ms) | predicted (ms) |\n|---|---|---|---|")
    worst = [done.sort_values(f"{name}_error", key=abs, ascending=False).head(NUM_WORST) for name in ("ttft", "tpot")]
    for point in pd.concat(worst).drop_duplicates().itertuples():
        real = f"{point.silicon_ttft_ms:,.0f}, {point.silicon_tpot_ms:.1f}"
        print(f"| {setting(point)} | {point.concurrency} | {real} | {told(point)} |")
    print("\n| configuration | C: error of TTFT, of TPOT (%) |\n|---|---|")
    for _, rows in done.sort_values("concurrency").groupby(CONFIGURATION):
        points = list(rows.itertuples())
        errors = [f"{point.concurrency}: {point.ttft_error:+.0f}, {point.tpot_error:+.0f}" for point in points]
        print(f"| {setting(points[0])} | {'; '.join(errors)} |")


def show_named(half: pd.DataFrame, blind: pd.DataFrame) -> None:
    """Print both predictions of configurations that are often discussed."""
    print("\n### named\n\n| point | C | measured TTFT, TPOT (ms) | half fitted | blind |\n|---|---|---|---|---|")
    fitted = {point.Index: told(point) for point in half.itertuples()}
    for point in blind.sort_values([*CONFIGURATION, "concurrency"]).itertuples():
        if setting(point).startswith(NAMED):
            real = f"{point.silicon_ttft_ms:,.0f}, {point.silicon_tpot_ms:.1f}"
            print(
                f"| {setting(point)} | {point.concurrency} | {real} | {fitted.get(point.Index, '')} | {told(point)} |"
            )


def main() -> None:
    """Predict and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", type=Path)
    parser.add_argument("--backend", default="")
    parser.add_argument(
        "--most", type=int, default=4096, help="requests at a time up to which points are predicted blind"
    )
    parser.add_argument("--csv", type=Path, help="write every point with what was predicted")
    options = parser.parse_args()
    table, dropped = read(options.points)
    for reason, count in dropped.items():
        print(f"dropped: {count} points: {reason}")
    table = table[table.backend.str.contains(options.backend)]
    configurations = table.groupby(CONFIGURATION).ngroups
    print(f"{len(table)} points of {configurations} configurations")
    half: dict[int, Answer] = {}
    lines: dict[int, Answer] = {}
    for known, others in halves(table):
        fitted = fit(known)
        half |= {point.Index: predict_from(fitted, point) for point in others}
        lines |= {point.Index: draw_lines(known, point) for point in others}
    blind = {point.Index: predict_blind(point, options.most) for point in table.itertuples()}
    answers = {"half fitted": half, "lines": lines, "blind": blind}
    results = {title: compared(table, found) for title, found in answers.items()}
    for title, result in results.items():
        show(title, result)
    show_named(results["half fitted"], results["blind"])
    if options.csv:
        pd.concat([result.assign(prediction=title) for title, result in results.items()]).to_csv(
            options.csv, index=False
        )


if __name__ == "__main__":
    main()
